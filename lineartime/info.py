"""`lineartime info`: a model's specification, parameters by part, FLOPs and decoding state, from its configuration."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from lineartime.attention.performer import BLOCK
from lineartime.config import ModelConfig
from lineartime.decoding.cache import KeyValueCache
from lineartime.mhsa import FeedForward, MultiHeadAttention
from lineartime.model import LanguageModel

NAMES = {"relu2": "relu²", "quadratic": "Quadratic", "mixed_chunk": "Mixed Chunk", "silu": "SiLU/Swish", "gelu": "GELU",
         "layer_norm": "LayerNorm", "scale_norm": "ScaleNorm", "scaled_sin": "ScaledSin", "learned": "Learnable",
         "rope": "RoPE", "mlp": "MLP", "glu": "GLU", "gau": "GAU", "rowmajor_axial": "Rowmajor-Axial",
         "linear": "Linear"}
"""Values of fields by their names in the paper's tables, where the two differ."""

OPTIONS = ("gate", "prefix_sum", "document_mask", "chunk_pooling", "chunk_parts", "overlap", "first_to_all",
           "cls_softmax", "rope_base", "key_conv", "local_key_conv", "linear_scale_init", "local_scale_init",
           "linear_rope", "linear_gate", "linear_norm", "linear_divisor", "keys_start_as_queries")
"""Fields that the paper's tables do not have; `print_description` shows those that are not the default."""


class Part(NamedTuple):
    """A part of a model, the number of its parameters, and how many times the model has it."""

    name: str
    each: int
    places: int = 1

    @property
    def total(self) -> int:
        return self.each * self.places


class Flops(NamedTuple):
    """FLOPs of a forward pass, per token of a full row that is one document.

    A multiply-add is 2, and only matmuls count: not `key_conv`, `linear_gate` and `linear_norm`. Causal scores are
    counted in full, masked half included; a kernel that skips the masked half saves `masked` of `attention`."""

    projections: float
    attention: float
    """q k^T and A v within a row or a chunk, Combiner's summaries, and first-to-all."""
    linear: float
    """k^T v and q (k^T v) of mixed chunk attention and of Performer, and learned chunk weights."""
    head: float
    masked: float
    constant: float = 0.0
    """The part of `linear` that multiplies by a constant matrix of ones, which has one gradient instead of two."""

    @property
    def forward(self) -> float:
        return self.projections + self.attention + self.linear + self.head

    @property
    def training(self) -> float:
        """FLOPs of forward and backward: a matmul has two gradients, each a matmul of the same size."""
        return 3 * self.forward - self.constant


class DecodingBytes(NamedTuple):
    """Bytes of one row's decoding state."""

    constant: int
    per_token: int
    """Growth per token, on average over a chunk if the model keeps a summary of every chunk."""

    def at(self, n_tokens: int) -> int:
        return self.constant + self.per_token * n_tokens


class Description(NamedTuple):
    """What `describe` returns."""

    specification: list[tuple[str, str]]
    """Rows of the paper's specification tables, named as printed there."""
    parts: list[Part]
    flops: Flops
    decoding: DecodingBytes

    @property
    def n_parameters(self) -> int:
        return sum(part.total for part in self.parts)


def describe(config: ModelConfig) -> Description:
    """Describe a model without allocating it. FLOPs are at `config.context`; a model that does not decode has no
    decoding state."""
    with torch.device("meta"):
        model = LanguageModel(config)
    parts = count_parameters(model)
    return Description(specification(config, sum(part.total for part in parts)), parts, count_flops(model),
                       decoding_bytes(config) if config.decodes else DecodingBytes(0, 0))


def decoding_bytes(config: ModelConfig, dtype: torch.dtype = torch.float32) -> DecodingBytes:
    """The decoding state of one row of a model that decodes, with weights of `dtype`; sums are in float32 at least."""
    with torch.device("meta"):
        caches = LanguageModel(config).to(dtype).decoding_state(1).caches
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


def count_parameters(model: LanguageModel) -> list[Part]:
    """All parameters by part, each counted once; the head's matrix is the embedding."""
    # The parameters of one block, added up by what they are for.
    kinds = (("norm", "norms"), ("scale_offset", "scale and offset"), ("bias", "position bias"),
             ("conv", "key convolution"), ("gate", "write gate"))
    per_layer: dict[str, int] = {}
    for layer in model.layers[: model.layers_per_block]:
        of = "attention " if isinstance(layer, MultiHeadAttention) else "FFN " if isinstance(layer, FeedForward) else ""
        for name, parameter in layer.named_parameters():
            owner = name.split(".")[0]
            kind = next((kind for end, kind in kinds if owner.endswith(end)), f"{of}projections")
            per_layer[kind] = per_layer.get(kind, 0) + parameter.numel()

    def size(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    return [
        Part("embedding, and the head's matrix", size(model.embed)),
        Part("ScaledSin scalar" if model.config.abs_pos == "scaled_sin" else "position table", size(model.abs_pos)),
        *(Part(f"layer: {name}", each, model.config.n_layers) for name, each in per_layer.items()),
        Part("final norm", size(model.norm)),
        Part("head bias", model.head_bias.numel()),
    ]


def count_flops(model: LanguageModel) -> Flops:
    """FLOPs per token at `config.context`; see `Flops` for the rule."""
    config = model.config
    projections = sum(module.weight.numel() for module in model.layers.modules() if isinstance(module, nn.Linear))
    qk, av = config.qk_width * config.n_heads, config.v_width * config.n_heads
    chunk = config.chunk_size or config.context
    # Keys per query in its row or chunk on average, masked ones included; the last chunk may be a part.
    n_full, rest = divmod(config.context, chunk)
    square = (n_full * chunk**2 + rest**2) / config.context
    neighbours = (2 if config.causal else 3) if config.overlap else 1
    attention = masked = linear = constant = 0.0
    if config.attn_type == "rowmajor_axial":
        attention = 2 * qk * (3 * chunk + 2 * config.n_chunks)
    elif config.attn_type == "linear":
        linear, constant = count_performer(config)
    elif config.chunk_parts != "global":
        attention = 2 * square * (qk + av) * neighbours
        masked = (square - 1) * (qk + av) * config.causal
    if config.attn_type == "mixed_chunk" and config.chunk_parts != "local":
        linear = 4 * qk * config.v_width
        if config.chunk_pooling == "attention":
            linear += 2 * config.n_chunks**2 * qk * (1 + av) / config.context
        elif not config.causal and config.document_mask == "exact":
            linear += linear + 2 * square * (qk + av)  # chunks before, chunks after, the own chunk with its mask
    if config.first_to_all:
        attention += 2 * config.n_chunks * (qk + av)
    if config.cls_softmax:
        attention += 2 * chunk * neighbours * qk / config.context
    n = config.n_layers
    return Flops(2 * projections, n * attention, n * linear, 2 * model.embed.weight.numel(), n * masked, n * constant)


def count_performer(config: ModelConfig) -> tuple[float, float]:
    """FLOPs per token of one layer's k^T v and q (k^T v), numerator and denominator, and the part that multiplies by a
    matrix of ones. "scan" and "matmul" form k^T v of each token as an outer product, which is not a matmul."""
    pair = 2 * config.d_model * (config.qk_width + 1)
    if not config.causal:
        return 2 * pair, 0.0
    if config.prefix_sum == "scan":
        return pair, 0.0
    filled_up = -(-config.context // BLOCK) * BLOCK / config.context
    if config.prefix_sum == "matmul":
        return filled_up * pair * (2 + BLOCK), filled_up * pair * BLOCK
    return filled_up * (2 * pair + 2 * BLOCK * (2 * config.d_model + config.n_heads)), 0.0


def millions(n: float) -> str:
    """"112.1 M", or a small count in full."""
    return f"{n / 1e6:,.1f} M" if n >= 1e6 else f"{n:,.0f}"


def mib(n_bytes: float) -> str:
    """"1.5 MiB"."""
    return f"{n_bytes / 2**20:,.1f} MiB"


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
    rows += [(name, str(getattr(config, name)).lower()) for name in OPTIONS
             if getattr(config, name) != getattr(ModelConfig, name)]
    rows += [("vocabulary", f"{config.vocab_size:,}"), ("causal", "yes" if config.causal else "no")]
    console.print()
    print_table(console, ("Beside the paper's table", ""), rows)

    console.print()
    print_table(console, ("Parameters", "each", "places", "total"), [
        *((part.name, millions(part.each), str(part.places), millions(part.total)) for part in described.parts),
        ("total", "", "", millions(described.n_parameters))], total=True)

    flops = described.flops
    parts = [("projections", flops.projections), ("attention", flops.attention), ("linear attention", flops.linear),
             ("head", flops.head)]
    console.print()
    print_table(console, (f"FLOPs per token at context {config.context:,}", "forward", "and backward"), [
        *((name, millions(n), millions(3 * n)) for name, n in parts if n),
        ("total", millions(flops.forward), millions(flops.training))], total=True)
    console.print("A multiply-add is 2; matrix products only; backward is twice forward.")
    if flops.masked:
        console.print(f"A causal square is counted whole: {millions(flops.masked)} of the forward pass are masked.")

    console.print("\nDecoding state of one row, float32", style="bold")
    decoding = described.decoding
    if not config.decodes:
        console.print("none: the model " + ("does not decode" if config.causal else "is not causal"))
    elif decoding.per_token == 0:
        console.print(f"{mib(decoding.constant)} at any length")
    else:
        console.print(f"{decoding.per_token:,} bytes more with each token; "
                      f"{mib(decoding.at(config.context))} at context {config.context:,}")
