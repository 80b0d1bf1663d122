"""`lineartime info`: a model's specification, its parameters by part, and the memory it takes."""

from typing import NamedTuple

import torch
from torch import nn

from lineartime.base.errors import escaped
from lineartime.base.settings import field_text
from lineartime.base.words import mib, millions
from lineartime.config import MODEL_FIELDS, SOURCES, ModelConfig
from lineartime.model.language_model import LanguageModel, empty_model
from lineartime.ops import compiled

NAMES = {"relu2": "relu²", "quadratic": "Quadratic", "mixed_chunk": "Mixed Chunk", "silu": "SiLU/Swish", "gelu": "GELU",
         "layer_norm": "LayerNorm", "scale_norm": "ScaleNorm", "scaled_sin": "ScaledSin", "learned": "Learnable",
         "rope": "RoPE", "mlp": "MLP", "glu": "GLU", "gau": "GAU", "rowmajor_axial": "Rowmajor-Axial",
         "linear": "Linear"}
"""Values of fields by their names in the paper's tables, where the two differ."""
PARTS = {"norm": "norms", "scale_offset": "scale and offset", "bias": "position bias", "conv": "key convolution",
         "gate": "write gate"}
"""What a layer's parameters are for, by the end of their module's name; the others project."""


class DecodingBytes(NamedTuple):
    """Bytes of one row's decoding state, and its growth: with summaries of chunks on average."""

    constant: int
    per_token: int

    def at(self, n_tokens: int) -> int:
        return self.constant + self.per_token * n_tokens


class Description(NamedTuple):
    """The rows of the paper's specification tables, the parameters of each part, and the state."""

    specification: list[tuple[str, str]]
    parts: dict[str, int]
    decoding: DecodingBytes

    @property
    def n_parameters(self) -> int:
        return sum(self.parts.values())


def describe(config: ModelConfig) -> Description:
    """Describe a model without allocating it. One that does not decode has a state of 0 bytes."""
    parts = count_parameters(empty_model(config))
    return Description(specification(config, sum(parts.values())), parts, decoding_bytes(config))


def decoding_bytes(config: ModelConfig, dtype: torch.dtype = torch.float32) -> DecodingBytes:
    """The decoding state of one row, with weights of `dtype`; sums are in float32 at least."""
    model = empty_model(config).to(dtype)
    if not model.decodes:
        return DecodingBytes(0, 0)
    with torch.device("meta"):
        caches = model.decoding_state(1).caches
    constant = per_token = 0
    summary_tokens = config.chunk_size or 1 if config.attn_type == "rowmajor_axial" else 1
    for cache in caches:
        for name, buffer in cache.tensors().items():
            if name in cache.growing:
                per_token += buffer.sum(1).nbytes // summary_tokens  # all axes but that of tokens
            else:
                constant += buffer.nbytes
    return DecodingBytes(constant, per_token)


def specification(config: ModelConfig, n_parameters: int) -> list[tuple[str, str]]:
    """The configuration as a column of Tables 8-10: names and values of the rows."""
    n, c = config.n_layers, config
    rows = (("# of attention heads", c.n_heads), ("Attention kernel", c.attn_kernel), ("Attention type", c.attn_type),
            ("FFN type", c.ffn), ("Activation", c.activation), ("Norm. type", c.norm),
            ("Absolute position emb.", c.abs_pos), ("Relative position emb.", c.rel_pos),
            ("# of layers", n if c.ffn == "gau" or c.layers else f"{n}+{n}"), ("Hidden size", c.d_model),
            ("Expansion rate", f"{c.expansion_factor:g}"), ("Chunk size", c.chunk_size),
            ("Params (M)", f"{n_parameters / 1e6:.0f}"))
    return [(row, "--" if value is None else NAMES.get(str(value), str(value))) for row, value in rows]


def count_parameters(model: LanguageModel) -> dict[str, int]:
    """All parameters by part, each counted once; the head's matrix is the embedding."""
    def size(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    config = model.config
    parts = {"embedding, and the head's matrix" if config.tied_head else "embedding": size(model.embed),
             "ScaledSin scalar" if config.abs_pos == "scaled_sin" else "position table": size(model.abs_pos)}
    for i, layer in enumerate(model.residual_layers()):
        layers, kind = (f"{config.layers[i]}: ", "") if config.layers else ("layers: ", f"{layer.kind} ")
        for name, parameter in layer.named_parameters():
            purposes = [purpose for end, purpose in PARTS.items() if name.split(".")[0].endswith(end)]
            part = layers + (*purposes, f"{kind}projections")[0]
            parts[part] = parts.get(part, 0) + parameter.numel()
    head = {} if model.head_weight is None else {"head's matrix": model.head_weight.numel()}
    return parts | {"final norm": size(model.norm), **head, "head bias": model.head_bias.numel()}


def print_description(config: ModelConfig, title: str) -> None:
    """Print `describe(config)`, and the fields that the paper's tables do not have."""
    described, n_tokens = describe(config), f"{config.context:,}"
    changed = [name for name in MODEL_FIELDS if name not in SOURCES["Tables 8-10"]
               and (name in ("context", "vocab_size", "causal") or getattr(config, name) != getattr(ModelConfig, name))]
    total, (constant, per_token) = described.n_parameters, described.decoding
    if not any(described.decoding):
        state = "none: the model " + ("does not decode" if config.causal else "is not causal")
    elif per_token == 0:
        state = f"{mib(constant)} at any length"
    else:
        state = f"{per_token:,} bytes more with each token; {mib(described.decoding.at(config.context))} at {n_tokens}"
    for head, rows in (
            (escaped(title), []), ("Specification", described.specification),
            ("Beside the paper's table", [(name, field_text(getattr(config, name))) for name in changed]),
            ("Parameters", [(part, millions(n)) for part, n in (*described.parts.items(), ("total", total))]),
            ("Memory in float32", [("weights", mib(4 * total)), ("with gradient and AdamW's state", mib(16 * total)),
                                   ("decoding state of a row", state)]),
            ("What runs", [("on a processor", escaped(compiled.in_words()))])):
        width = max([32, *(len(name) for name, _ in rows)])
        print(head, *(f"{name:<{width}} {value:>14}" for name, value in rows), "", sep="\n")
