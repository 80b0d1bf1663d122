"""Models of a few hundred weights: every preset and variant, in float64, nothing near zero."""

from dataclasses import replace
from typing import TypeVar

import pytest
import torch

from lineartime.config import ModelConfig, model_config
from lineartime.data.tokens import TokenStream
from lineartime.model.language_model import LanguageModel

Model = TypeVar("Model", bound=torch.nn.Module)
CONTEXT, CHUNK = 24, 4
SIZES = {"n_layers": 2, "d_model": 8, "vocab_size": 13, "context": CONTEXT}
HEADS = {"n_heads": 2}
GAU = {"query_key_dim": 4, "expansion_factor": 2}

LONG_MEMORY = {"key_conv": 3, "linear_rope": False, "linear_gate": True, "chunk_pooling": "written"}
"""The options of flash+."""

FLASH = model_config("flash", **SIZES, **GAU, chunk_size=CHUNK)
FLASH_QUAD = model_config("flash-quad", **SIZES, **GAU)

CONFIGS: dict[str, ModelConfig] = {
    **{name: model_config(name, **SIZES, **HEADS)
       for name in ("transformer", "transformer+", "transformer++", "performer", "performer-matmul")},
    "flash-quad": FLASH_QUAD,
    "flash-quad rotated bias": replace(FLASH_QUAD, attn_scale_len=512),
    "performer blocks": model_config("performer", **SIZES, **HEADS, prefix_sum="blocks"),
    "combiner": model_config("combiner", **SIZES, **HEADS, chunk_size=CHUNK),
    "mc-tfm++": model_config("mc-tfm++", **SIZES, **HEADS, chunk_size=CHUNK),
    "transformer++ relu2": model_config("transformer++", **SIZES, **HEADS, attn_kernel="relu2"),
    "transformer++ gate": model_config("transformer++", **SIZES, **HEADS, gate=True),
    "transformer++ qk norm": model_config("transformer++", **SIZES, **HEADS, qk_norm=True),
    "flash": FLASH,
    "flash softmax": replace(FLASH, attn_kernel="softmax"),
    "flash heads": replace(FLASH, n_heads=2),
    "flash no gate": replace(FLASH, gate=False),
    "flash overlap": replace(FLASH, overlap=True),
    "flash scale_norm": replace(FLASH, norm="scale_norm"),
    "flash sum": replace(FLASH, chunk_pooling="sum"),
    "flash local": replace(FLASH, chunk_parts="local"),
    "flash global": replace(FLASH, chunk_parts="global"),
    "flash key conv": replace(FLASH, key_conv=3),
    "flash local key conv": replace(FLASH, key_conv=3, local_key_conv=True, chunk_parts="local", overlap=True),
    "flash write gate": replace(FLASH, linear_gate=True, linear_rope=False),
    "flash rope base": replace(FLASH, rope_base=100.0),
    "flash+": model_config("flash+", **SIZES, **GAU, chunk_size=CHUNK),
    "flash others' options": replace(FLASH, rotary_dim=2, token_shift=True, bias=False, position_bias=False),
}
"""Every preset and every option that changes what attention computes; all causal."""

COMBINED: dict[str, ModelConfig] = {
    "flash-quad softmax": replace(FLASH_QUAD, attn_kernel="softmax"),
    "flash-quad heads": replace(FLASH_QUAD, n_heads=2),
    "flash-quad no gate": replace(FLASH_QUAD, gate=False),
    "mc-tfm++ overlap": model_config("mc-tfm++", **SIZES, **HEADS, chunk_size=CHUNK, overlap=True),
    "flash rotated bias": replace(FLASH, chunk_size=512),
    "flash local overlap": replace(FLASH, chunk_parts="local", overlap=True),
    "combiner rope base": model_config("combiner", **SIZES, **HEADS, chunk_size=CHUNK, rope_base=100.0),
    "flash+ heads": model_config("flash+", **SIZES, **GAU, **HEADS, chunk_size=CHUNK),
    "flash global heads long memory": replace(FLASH, **LONG_MEMORY, n_heads=2, chunk_parts="global"),
    "mc-tfm++ long memory": model_config("mc-tfm++", **SIZES, **HEADS, chunk_size=CHUNK, **LONG_MEMORY),
    "flash long memory": replace(FLASH, **LONG_MEMORY),
    "mc-tfm++ near and long memory": model_config("mc-tfm++", **SIZES, **HEADS, chunk_size=CHUNK, **LONG_MEMORY,
                                                  local_key_conv=True),
    "flash-quad key conv": replace(FLASH_QUAD, key_conv=3),
    "flash-quad in flash+": model_config("flash+", **SIZES, **GAU, chunk_size=CHUNK, layers=("gau", "gau_quadratic"),
                                         attn_scale_len=512),
    "transformer++ key conv": model_config("transformer++", **SIZES, **HEADS, key_conv=3, rope_base=100.0),
    "transformer++ key conv qk norm": model_config("transformer++", **SIZES, **HEADS, key_conv=3, qk_norm=True),
    "flash-quad others' options": replace(FLASH_QUAD, rel_pos=None, token_shift=True, bias=False, position_bias=False),
    "mc-tfm++ others' options": model_config("mc-tfm++", **SIZES, **HEADS, chunk_size=CHUNK, token_shift=True,
                                             rotary_dim=2, bias=False, head_norm="scale_norm", tied_head=False),
    "hybrid": model_config("flash+", **SIZES | {"n_layers": 4}, **GAU, chunk_size=CHUNK, attn_scale_len=512,
                           token_shift=True, layers=("gau", "gau_quadratic", "attention", "ffn")),
    "transformer++ relu2 key conv": model_config("transformer++", **SIZES, **HEADS, attn_kernel="relu2", key_conv=3),
}
"""Options together, which `make test` has one by one."""
CONFIGS |= COMBINED

OWN_GRID = {f"{name}, own grid": replace(CONFIGS[name], document_grid="own") for name in (
    "flash", "flash+", "transformer++", "flash-quad", "mc-tfm++", "performer", "combiner", "flash overlap",
    "flash long memory", "flash-quad key conv", "flash-quad in flash+", "flash others' options", "hybrid")}
"""Models whose documents have positions and chunks of their own in a packed row."""
BOTH_GRIDS = CONFIGS | OWN_GRID
OWN_ON_PUSH = ("flash, own grid", "flash+, own grid", "transformer++, own grid")

UNPACKED = {
    "flash learned weights": replace(FLASH, chunk_pooling="attention"),
    "flash global learned weights": replace(FLASH, chunk_pooling="attention", chunk_parts="global"),
    "flash overlap learned weights": replace(FLASH, chunk_pooling="attention", overlap=True, gate=False),
    "flash learned weights long memory": replace(FLASH, **{**LONG_MEMORY, "chunk_pooling": "attention"}),
}
"""Models whose rows are one document, causal too."""

BIDIRECTIONAL = {
    "flash cls": replace(FLASH, causal=False, cls_softmax=True),
    "flash-quad cls": replace(FLASH_QUAD, causal=False, cls_softmax=True),
    "flash first to all": replace(FLASH, causal=False, first_to_all=True),
    "flash local first to all": replace(FLASH, causal=False, first_to_all=True, chunk_parts="local"),
    "flash overlap cls first to all": replace(FLASH, causal=False, first_to_all=True, cls_softmax=True, overlap=True),
    "flash cls first to all long memory": replace(FLASH, causal=False, first_to_all=True, cls_softmax=True,
                                                  **LONG_MEMORY),
}
"""What only a bidirectional model can be."""

def case_of(name: str, *more: object, rest: bool = False) -> object:
    """A case of a test over models; `make test-all` has those of combined models and `rest`."""
    is_rest = rest or name in COMBINED or name in OWN_GRID.keys() - set(OWN_ON_PUSH)
    return pytest.param(name, *more, marks=pytest.mark.rest if is_rest else ())


def with_end(config: ModelConfig, end: int = 0) -> ModelConfig:
    return config if config.chunk_pooling == "attention" else replace(config, end_of_document=end)


def random_model(config: ModelConfig, seed: int = 0) -> LanguageModel:
    """Float64 weights from normal(0, 0.5), biases too, so that no path is dead."""
    return drawn(LanguageModel(config).double(), seed)


def tiny_flash(stream: TokenStream, task: str = "wiki40b") -> LanguageModel:
    """For the tokens of this stream; initial weights in float64."""
    torch.manual_seed(0)
    config = model_config("flash", task, n_layers=2, d_model=16, query_key_dim=8, chunk_size=8, context=32,
                          vocab_size=stream.vocab_size, end_of_document=stream.end_of_document)
    return LanguageModel(config).double()


def drawn(model: Model, seed: int = 0, of_layers: float = 0.5, of_others: float = 0.5) -> Model:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            in_layers = name.startswith(("layers", "span_head"))
            parameter.normal_(0, of_layers if in_layers else of_others, generator=generator)
    return model.eval()


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    a, b = a.detach(), b.detach()
    return float((a - b).abs().max()) / max(1.0, float(b.abs().max()))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return difference(a, b) <= 1e-12


def random_ids(*shape: int, seed: int = 0, vocab_size: int = SIZES["vocab_size"]) -> torch.Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))
