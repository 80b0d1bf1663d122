"""`lineartime info`: a model's specification, parameters by part, FLOPs and decoding state, from its configuration."""

import dataclasses
import math

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
           "cls_softmax", "rope_base", "key_conv", "local_key_conv", "linear_scale_init",
           "local_scale_init", "linear_rope", "linear_gate",
           "linear_norm", "linear_divisor", "keys_start_as_queries")
"""Fields that the paper's tables do not have; `print_description` shows those that are not the default."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a model: its parameters, `each`, and how many times the model has it, `count`."""

    name: str
    each: int
    count: int = 1

    @property
    def total(self) -> int:
        return self.each * self.count


@dataclasses.dataclass(frozen=True)
class Flops:
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
        """FLOPs of a forward pass."""
        return self.projections + self.attention + self.linear + self.head

    @property
    def training(self) -> float:
        """FLOPs of forward and backward: a matmul has two gradients, each a matmul of the same size."""
        return 3 * self.forward - self.constant


@dataclasses.dataclass(frozen=True)
class DecodingBytes:
    """Bytes of one row's decoding state."""

    constant: int
    per_token: int
    """Growth per token, on average over a chunk if the model keeps a summary of every chunk."""

    def at(self, n_tokens: int) -> int:
        """Bytes after n_tokens tokens."""
        return self.constant + self.per_token * n_tokens


@dataclasses.dataclass(frozen=True)
class Description:
    """What `describe` returns."""

    specification: list[tuple[str, str]]
    """Rows of the paper's specification tables, named as printed there."""
    parts: list[Part]
    flops: Flops
    decoding: DecodingBytes

    @property
    def n_parameters(self) -> int:
        """Number of parameters, in all parts."""
        return sum(part.total for part in self.parts)


def describe(config: ModelConfig) -> Description:
    """Describe a model without allocating it. FLOPs are at `config.context`; a model that does not decode has no
    decoding state."""
    with torch.device("meta"):
        model = LanguageModel(config)
    decoding = decoding_bytes(config) if config.decodes else DecodingBytes(0, 0)
    parts = count_parameters(model)
    return Description(specification(config, sum(part.total for part in parts)), parts, count_flops(model),
                       decoding)


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
    def named(value: str | None) -> str:
        return "--" if value is None else NAMES.get(value, value)

    n_layers = str(config.n_layers) if config.ffn == "gau" else f"{config.n_layers}+{config.n_layers}"
    return [
        ("# of attention heads", str(config.n_heads)),
        ("Attention kernel", named(config.attn_kernel)),
        ("Attention type", named(config.attn_type)),
        ("FFN type", named(config.ffn)),
        ("Activation", named(config.activation)),
        ("Norm. type", named(config.norm)),
        ("Absolute position emb.", named(config.abs_pos)),
        ("Relative position emb.", named(config.rel_pos)),
        ("# of layers", n_layers),
        ("Hidden size", str(config.d_model)),
        ("Expansion rate", f"{config.expansion_factor:g}"),
        ("Chunk size", "--" if config.chunk_size is None else str(config.chunk_size)),
        ("Params (M)", f"{n_parameters / 1e6:.0f}"),
    ]


def count_parameters(model: LanguageModel) -> list[Part]:
    """All parameters by part, each counted once; the head's matrix is the embedding."""
    per_layer: dict[str, int] = {}
    for layer in list(model.layers)[: len(model.layers) // model.config.n_layers]:
        attention, feed_forward = isinstance(layer, MultiHeadAttention), isinstance(layer, FeedForward)
        kind = "attention " * attention + "FFN " * feed_forward
        for name, parameter in layer.named_parameters():
            owner = name.split(".")[0]
            part = next((part for end, part in (("norm", "norms"), ("scale_offset", "scale and offset"),
                                                ("bias", "position bias"), ("conv", "key convolution"),
                                                ("gate", "write gate")) if owner.endswith(end)),
                        f"{kind}projections")
            per_layer[part] = per_layer.get(part, 0) + parameter.numel()

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
    linears = [module for module in model.layers.modules() if isinstance(module, nn.Linear)]
    qk, av = config.qk_width * config.n_heads, config.v_width * config.n_heads
    chunk = config.chunk_size or config.context
    n_full, rest = divmod(config.context, chunk)
    square = (n_full * chunk**2 + rest**2) / config.context
    """Keys per query in its row or chunk on average, masked ones included."""
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
    return Flops(
        projections=2 * sum(linear.weight.numel() for linear in linears),
        attention=config.n_layers * attention,
        linear=config.n_layers * linear,
        head=2 * model.embed.weight.numel(),
        masked=config.n_layers * masked,
        constant=config.n_layers * constant,
    )


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


def table(heading: str, *columns: str, width: int = 34) -> Table:
    """A table without lines: the first column left-aligned and at least `width` wide, the others right-aligned."""
    made = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    made.add_column(heading, min_width=width)
    for column in columns:
        made.add_column(column, justify="right")
    return made


def print_description(config: ModelConfig, title: str) -> None:
    """Print `describe(config)` as tables."""
    console, described = Console(highlight=False), describe(config)
    console.print(title, style="bold", markup=False)
    console.print()
    rows = table("Specification", "")
    for name, value in described.specification:
        rows.add_row(name, value)
    console.print(rows)
    console.print()

    rows = table("Beside the paper's table", "")
    rows.add_row("context", f"{config.context:,}")
    rows.add_row("inner width e", f"{config.d_inner:,}")
    if config.ffn == "gau":
        rows.add_row("query and key width s", f"{config.query_key_dim:,}")
    if config.attn_kernel == "relu2":
        rows.add_row("n of relu²(q k / n + b)", f"{config.scale_len:,}")
    for name in OPTIONS:
        if getattr(config, name) != getattr(ModelConfig, name):
            rows.add_row(name, str(getattr(config, name)).lower())
    rows.add_row("vocabulary", f"{config.vocab_size:,}")
    rows.add_row("causal", "yes" if config.causal else "no")
    console.print(rows)
    console.print()

    rows = table("Parameters", "each", "places", "total")
    for part in described.parts:
        rows.add_row(part.name, millions(part.each), str(part.count), millions(part.total))
    rows.add_row("total", "", "", millions(described.n_parameters), style="bold")
    console.print(rows)
    console.print()

    flops = described.flops
    rows = table(f"FLOPs per token at context {config.context:,}", "forward", "and backward")
    for name, n in (("projections", flops.projections), ("attention", flops.attention),
                    ("linear attention", flops.linear), ("head", flops.head)):
        if n:
            rows.add_row(name, millions(n), millions(3 * n))
    rows.add_row("total", millions(flops.forward), millions(flops.training), style="bold")
    console.print(rows)
    console.print("A multiply-add is 2; matrix products only; backward is twice forward.")
    if flops.masked:
        console.print(f"A causal square is counted whole: {millions(flops.masked)} of the forward pass are masked.")
    console.print()

    console.print("Decoding state of one row, float32", style="bold")
    if not config.decodes:
        console.print("none: the model " + ("does not decode" if config.causal else "is not causal"))
    elif described.decoding.per_token == 0:
        console.print(f"{mib(described.decoding.constant)} at any length")
    else:
        console.print(f"{described.decoding.per_token:,} bytes more with each token; "
                      f"{mib(described.decoding.at(config.context))} at context {config.context:,}")
