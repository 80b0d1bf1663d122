"""`lineartime info`: a model's specification, parameters by part, FLOPs and decoding state, from its configuration."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lineartime.base.settings import field_text
from lineartime.base.words import mib, millions
from lineartime.config import MODEL_FIELDS, SOURCES, ModelConfig
from lineartime.model.decoding.cache import KeyValueCache
from lineartime.model.language_model import LanguageModel, empty_model
from lineartime.model.mhsa import FeedForward, MultiHeadAttention

NAMES = {"relu2": "relu²", "quadratic": "Quadratic", "mixed_chunk": "Mixed Chunk", "silu": "SiLU/Swish", "gelu": "GELU",
         "layer_norm": "LayerNorm", "scale_norm": "ScaleNorm", "scaled_sin": "ScaledSin", "learned": "Learnable",
         "rope": "RoPE", "mlp": "MLP", "glu": "GLU", "gau": "GAU", "rowmajor_axial": "Rowmajor-Axial",
         "linear": "Linear"}
"""Values of fields by their names in the paper's tables, where the two differ."""

SHOWN = (*SOURCES["Tables 8-10"], "context", "query_key_dim", "vocab_size", "causal")
"""Fields that `print_description` always shows. It shows the others where they are not the default."""


class ModelPart(NamedTuple):
    """A part of a model, the number of its parameters, and how many times the model has it."""

    name: str
    each: int
    places: int = 1

    @property
    def total(self) -> int:
        return self.each * self.places


class Flops(NamedTuple):
    """FLOPs of a forward pass, per token of a full row that is one document.

    A multiply-add is 2, and only matmuls count. Causal scores are counted in full, masked half included. The backward
    pass has twice as many: a matmul has two gradients, each a matmul of the same size."""

    projections: float
    attention: float
    """Matmuls without a weight: scores, their product with the values, and states of chunks."""
    head: float

    @property
    def forward(self) -> float:
        return sum(self)


class DecodingBytes(NamedTuple):
    """Bytes of one row's decoding state."""

    constant: int
    per_token: int
    """Growth per token, on average over a chunk if the model keeps a summary of every chunk."""

    def at(self, n_tokens: int) -> int:
        """Bytes after so many tokens."""
        return self.constant + self.per_token * n_tokens


class Description(NamedTuple):
    """What `describe` returns."""

    specification: list[tuple[str, str]]
    """Rows of the paper's specification tables, named as printed there."""
    parts: list[ModelPart]
    decoding: DecodingBytes

    @property
    def n_parameters(self) -> int:
        return sum(part.total for part in self.parts)


def describe(config: ModelConfig) -> Description:
    """Describe a model without allocating it. A model that does not decode has no decoding state."""
    parts = count_parameters(empty_model(config))
    return Description(specification(config, sum(part.total for part in parts)), parts,
                       decoding_bytes(config) if config.decodes else DecodingBytes(0, 0))


def decoding_bytes(config: ModelConfig, dtype: torch.dtype = torch.float32) -> DecodingBytes:
    """The decoding state of one row of a model that decodes, with weights of `dtype`; sums are in float32 at least."""
    with torch.device("meta"):
        caches = empty_model(config).to(dtype).decoding_state(1).caches
    constant = per_token = 0
    for cache in caches:
        tokens = 1 if isinstance(cache, KeyValueCache) else config.chunk_size or 1
        for name, buffer in cache.tensors().items():
            if name in cache.growing:
                per_token += buffer.shape[0] * math.prod(buffer.shape[2:]) * buffer.element_size() // tokens
            else:
                constant += buffer.numel() * buffer.element_size()
    return DecodingBytes(constant, per_token)


def specification(config: ModelConfig, n_parameters: int) -> list[tuple[str, str]]:
    """The configuration as a column of Tables 8-10: names and values of the rows."""
    n_layers = str(config.n_layers) if config.ffn == "gau" else f"{config.n_layers}+{config.n_layers}"
    named = [(row, getattr(config, field)) for row, field in (
        ("Attention kernel", "attn_kernel"), ("Attention type", "attn_type"), ("FFN type", "ffn"),
        ("Activation", "activation"), ("Norm. type", "norm"), ("Absolute position emb.", "abs_pos"),
        ("Relative position emb.", "rel_pos"))]
    return [
        ("# of attention heads", str(config.n_heads)),
        *((row, "--" if value is None else NAMES.get(value, value)) for row, value in named),
        ("# of layers", n_layers),
        ("Hidden size", str(config.d_model)),
        ("Expansion rate", f"{config.expansion_factor:g}"),
        ("Chunk size", "--" if config.chunk_size is None else str(config.chunk_size)),
        ("Params (M)", f"{n_parameters / 1e6:.0f}"),
    ]


def count_parameters(model: LanguageModel) -> list[ModelPart]:
    """All parameters by part, each counted once; the head's matrix is the embedding."""
    # The parameters of the blocks of a kind, added up by what they are for.
    kinds = (("norm", "norms"), ("scale_offset", "scale and offset"), ("bias", "position bias"),
             ("conv", "key convolution"), ("gate", "write gate"))
    config, of_blocks = model.config, dict[tuple[str, str], int]()
    blocks = ["layer" if config.layer(i) is config else "full layer" for i in range(config.n_layers)]
    for i, layer in enumerate(model.layers):
        of = "attention " if isinstance(layer, MultiHeadAttention) else "FFN " if isinstance(layer, FeedForward) else ""
        for name, parameter in layer.named_parameters():
            kind = next((kind for end, kind in kinds if name.split(".")[0].endswith(end)), f"{of}projections")
            part = blocks[i // model.layers_per_block], kind
            of_blocks[part] = of_blocks.get(part, 0) + parameter.numel()

    def size(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    return [
        ModelPart("embedding, and the head's matrix", size(model.embed)),
        ModelPart("ScaledSin scalar" if model.config.abs_pos == "scaled_sin" else "position table",
                  size(model.abs_pos)),
        *(ModelPart(f"{block}: {kind}", n // blocks.count(block), blocks.count(block))
          for (block, kind), n in of_blocks.items()),
        ModelPart("final norm", size(model.norm)),
        ModelPart("head bias", model.head_bias.numel()),
    ]


def count_flops(config: ModelConfig) -> Flops:
    """FLOPs per token at `config.context`, as PyTorch counts them in a pass with tensors that have shapes and no data;
    see `Flops` for the rule."""
    with FakeTensorMode():
        model = LanguageModel(config)
        model.set_impl("reference")
        model.config = replace(config, end_of_document=None)  # documents cannot be told in a tensor without data
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, config.context, dtype=torch.long))
    projections = 2 * sum(module.weight.numel() for module in model.layers.modules() if isinstance(module, nn.Linear))
    head = 2 * model.embed.weight.numel()
    return Flops(projections, counter.get_total_flops() / config.context - projections - head, head)


def print_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], total: bool = False) -> None:
    """Print a table without lines: the first column at the left, the others at the right. total: the last row is
    bold."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column(columns[0], min_width=34)
    for column in columns[1:]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row, style="bold" if total and row is rows[-1] else None)
    console.print(table)


def print_description(config: ModelConfig, title: str) -> None:
    """Print `describe(config)` as tables."""
    console, described = Console(highlight=False), describe(config)
    console.print(f"{title}\n", style="bold", markup=False)
    print_table(console, ("Specification", ""), described.specification)

    rows = [("context", f"{config.context:,}"), ("inner width e", f"{config.d_inner:,}")]
    if config.ffn == "gau":
        rows.append(("query and key width s", f"{config.query_key_dim:,}"))
    if config.attn_kernel == "relu2":
        rows.append(("n of relu²(q k / n + b)", f"{config.scale_len:,}"))
    rows += [(name, field_text(getattr(config, name))) for name in MODEL_FIELDS
             if name not in SHOWN and getattr(config, name) != getattr(ModelConfig, name)]
    rows += [("vocabulary", f"{config.vocab_size:,}"), ("causal", "yes" if config.causal else "no")]
    console.print()
    print_table(console, ("Beside the paper's table", ""), rows)

    console.print()
    print_table(console, ("Parameters", "each", "places", "total"), [
        *((part.name, millions(part.each), str(part.places), millions(part.total)) for part in described.parts),
        ("total", "", "", millions(described.n_parameters))], total=True)

    flops = count_flops(config)
    console.print()
    print_table(console, (f"FLOPs per token at context {config.context:,}", "forward", "and backward"), [
        *((name, millions(n), millions(3 * n)) for name, n in flops._asdict().items()),
        ("total", millions(flops.forward), millions(3 * flops.forward))], total=True)
    console.print("Matrix products only, a causal square in full; backward is twice forward.")

    console.print("\nDecoding state of one row, float32", style="bold")
    decoding = described.decoding
    if not config.decodes:
        console.print("none: the model " + ("does not decode" if config.causal else "is not causal"))
    elif decoding.per_token == 0:
        console.print(f"{mib(decoding.constant)} at any length")
    else:
        console.print(f"{decoding.per_token:,} bytes more with each token; "
                      f"{mib(decoding.at(config.context))} at context {config.context:,}")
