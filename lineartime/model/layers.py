"""The small layers of Codes 2-5: ScaledSin, the relative position bias and the norms;
scale-and-offset (Eq. 5); and `ResidualLayer`, the base class of all layers of a model.

Shape letters, in the whole package: B batch, T time, G chunks, P = G + 1 places before, between and
after chunks, C chunk length (M for keys), D `d_model`, E `d_inner`, S `query_key_dim`, F = 2 E + S,
N heads made from one base, H heads, K head width, V vocabulary, L places of a row after `lay_out`,
W ranks of a row. In decoding N counts new tokens, L cached keys. Some ops use D, N, F otherwise."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime.base.errors import UsageError
from lineartime.base.ranks import ALONE, Ranks
from lineartime.base.settings import check_rules, require
from lineartime.config import TOEPLITZ_BELOW, ModelConfig
from lineartime.model import layout
from lineartime.model.decoding.cache import Cache
from lineartime.model.decoding.inputs import DecodeInputs
from lineartime.model.decoding.state import DecodingState
from lineartime.ops.context import exchange_states, with_neighbours
from lineartime.ops.dtypes import as_dtype, at_least_float32, float16_as_float32, matmul_dtype
from lineartime.ops.reference import NORM_EPS, Exchange, add_norm, ids_or_zeros, rope, rotary, scale_norm, turn

BIAS_WIDTH = 128  # of the two vectors of the rotated position bias (Code 4), whatever `query_key_dim` is
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu}


class ScaledSin(nn.Module):
    """Sinusoidal position embedding times a learned scalar that starts at d^-1/2 (Code 2)."""

    def __init__(self, d_model: int):
        super().__init__()
        self.d_model = d_model
        self.scalar = nn.Parameter(torch.empty(1))

    def forward(self, position_BT: Tensor) -> Tensor:
        """position_BT: integers. Returns `[B, T, D]`."""
        return self.scalar * torch.cat(rotary(position_BT, self.d_model, self.scalar.dtype), dim=-1)


class RelPosBias(nn.Module):
    """Relative position bias b[i, j] = w[j - i + n - 1] (Code 4): a table for n < 512, else two
    rotated vectors, rope(a, i) . rope(b, j). The configuration gives n, not the input's length."""

    def __init__(self, n: int):
        super().__init__()
        self.n = n
        if n < TOEPLITZ_BELOW:
            self.weight = nn.Parameter(torch.empty(2 * n - 1))
        else:
            self.a, self.b = (nn.Parameter(torch.empty(BIAS_WIDTH)) for _ in range(2))

    def at(self, offset: Tensor) -> Tensor:
        """The bias at integers key position minus query position, |offset| < n in a table."""
        if self.n < TOEPLITZ_BELOW:
            return self.weight[offset + self.n - 1]
        # rope(a, i) . rope(b, j) depends on i - j alone: the sum over frequencies f_k of
        # (a1 b1 + a2 b2) cos((i - j) f_k) + (a1 b2 - a2 b1) sin((i - j) f_k).
        (a1, a2), (b1, b2) = (at_least_float32(x).chunk(2) for x in (self.a, self.b))
        sin, cos = rotary(-offset, BIAS_WIDTH, a1.dtype)
        # Not two matmuls: autocast would take them in bfloat16, and the terms nearly cancel.
        return (cos * (a1 * b1 + a2 * b2) + sin * (a1 * b2 - a2 * b1)).sum(-1)

    def forward(self, length: int) -> Tensor:
        """w for `length` queries and as many keys: `[2 length - 1]`, entry j - i + length - 1 is
        b[i, j]. Raises UsageError for more than a table has."""
        if self.n < TOEPLITZ_BELOW:
            if length > self.n:
                raise UsageError("row longer than the position table", f"{length} tokens, the table has {self.n}",
                                 "make it with a larger context, or with a chunk_size")
            return self.weight[self.n - length : self.n + length - 1].clone()  # modes take no view of a parameter
        return self.at(torch.arange(1 - length, max(length, 1), device=self.a.device))

    def before(self, length: int) -> Tensor:
        """The bias at offsets 1 - length, ..., 0, as far as a table reaches; float32 at least."""
        if self.n < TOEPLITZ_BELOW:  # by no index, which on the meta device would load a compiler
            return at_least_float32(self.weight[max(self.n - length, 0) : self.n].clone())
        return at_least_float32(self.at(torch.arange(1 - length, 1, device=self.a.device)))


class ScaleNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) times a learned scalar (Code 5)."""

    def __init__(self, eps: float = NORM_EPS) -> None:
        super().__init__()
        self.eps = eps
        self.scalar = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        """Of x's shape `[..., D]` and dtype; computed in float32 at least."""
        return scale_norm(x, self.scalar, self.eps).to(x.dtype)


def norm_parameters(norm: nn.LayerNorm | ScaleNorm) -> tuple[Tensor, Tensor | None, float]:
    """A norm's weight, bias and epsilon, as `reference.add_norm` takes them."""
    return (norm.scalar, None, norm.eps) if isinstance(norm, ScaleNorm) else (norm.weight, norm.bias, norm.eps)


def make_norm(config: ModelConfig, kind: str | None = None) -> nn.LayerNorm | ScaleNorm:
    """LayerNorm or ScaleNorm (Code 5). kind: in place of the configuration's, with epsilon 1e-5."""
    eps = NORM_EPS if kind else config.norm_eps
    return nn.LayerNorm(config.d_model, eps=eps) if (kind or config.norm) == "layer_norm" else ScaleNorm(eps)


class ScaleOffset(nn.Module):
    """gamma_NS and beta_NS, by which `reference.make_heads` makes N heads from one base (Eq. 5)."""

    def __init__(self, n_heads: int, width: int):
        super().__init__()
        self.gamma, self.beta = (nn.Parameter(torch.empty(n_heads, width)) for _ in range(2))


@dataclasses.dataclass
class SequenceInfo:
    """Positions and documents of a batch of rows: made once, read by every layer."""

    angles: dict[int, tuple[Tensor, Tensor]]
    """sin and cos of the positions, `[1 or B, T, width / 2]`, by the width of heads with RoPE."""
    position_BT: Tensor  # `[1 or B, T]`
    segment_ids_BT: Tensor | None = None  # see `layout.lay_out`; None: every row is one document
    cu_seqlens: list[int] | None = None  # `[0, ..., B T]`: where documents, and runs of padding, begin in flat rows
    shared_by: Ranks | None = None
    """The ranks that share the rows. The other fields are then of this rank's part, and 0 is the
    document of the token before it. None, the one default torch.compile takes: this rank alone."""
    inputs: DecodeInputs | None = None  # in decoding: the rows are the next tokens of rows that have a cache

    def __post_init__(self) -> None:  # `angles` as `reference.rope` takes them, for heads `[B, T, H, width]`
        self.turns = {width: turn(*(angle[..., None, :] for angle in both)) for width, both in self.angles.items()}

    @property
    def ranks(self) -> Ranks:
        return self.shared_by or ALONE

    @property
    def exchange(self) -> Exchange | None:
        """What brings the states of the rows' other parts; None if the rows are whole."""
        return None if self.ranks.size == 1 else partial(exchange_states, ranks=self.ranks)

    @property
    def age_BT(self) -> Tensor:
        """How many tokens of its document are before each token of its row: `[1 or B, T]`."""
        if self.inputs is not None:
            return self.inputs.position_BN - self.inputs.start_BN
        if self.segment_ids_BT is None:
            return torch.arange(self.position_BT.shape[1], device=self.position_BT.device)[None]
        return layout.tokens_since(layout.ids_change(self.segment_ids_BT))

    def with_last(self, x_BTF: Tensor, n: int, cache: Cache | None = None, name: str = "last_BKF") -> Tensor:
        """x with the n tokens before it in front, in decoding those of a `LastTokens` cache, 0
        where a row begins: `[B, n + T, F]`. `age_BT` says which are of a token's document.

        Raises UsageError where ranks share the rows."""
        require(self.ranks.size == 1, "this layer needs whole rows", "context_parallel", "set context_parallel = 1")
        if cache is None or self.inputs is None:
            return F.pad(x_BTF, [0, 0, n, 0])
        return cache.append_last(name, x_BTF, self.inputs)


def sequence_info(config: ModelConfig, position_BT: Tensor, dtype: torch.dtype, segment_ids_BT: Tensor | None = None,
                  ranks: Ranks | None = None, inputs: DecodeInputs | None = None) -> SequenceInfo:
    """The `SequenceInfo` of rows of tokens at these positions, integers `[1 or B, T]`, for all
    layers of a model. dtype: for sin and cos. Raises UsageError for several documents in a model
    with learned chunk weights."""
    angles = {kind.qk_width: rotary(position_BT, kind.qk_width, dtype, kind.rope_base, kind.n_rotated)
              for kind in config.kinds if kind.rel_pos is not None or kind.ffn == "gau"}
    info = SequenceInfo(angles, position_BT, segment_ids_BT, shared_by=ranks, inputs=inputs)
    if segment_ids_BT is None:
        return info
    if config.by_document(in_graph=torch.compiler.is_compiling()):
        # A document begins at the first token of a row and wherever the id changes.
        starts_BT = layout.ids_change(segment_ids_BT)
        info.cu_seqlens = [*(starts_BT.flatten().nonzero().flatten().tolist() or [0]), segment_ids_BT.numel()]
    if config.chunk_pooling == "attention" and not (
            (segment_ids_BT == segment_ids_BT[:, :1]) | (segment_ids_BT < 0)).all():
        raise UsageError("learned chunk weights are for rows of one document", "segment_ids",
                         "give each document its own row")
    return info


def by_document(parts: tuple[Tensor, ...], info: SequenceInfo) -> list[list[Tensor]]:
    """Tensors `[B, T, ...]` of the flattened rows split by document, each document a batch of one;
    without `cu_seqlens` one entry, the batch."""
    if info.cu_seqlens is None:
        return [list(parts)]
    flat = [part.flatten(0, 1)[None] for part in parts]
    return [[part[:, start:stop] for part in flat] for start, stop in itertools.pairwise(info.cu_seqlens)]


def rotate_heads(x_BTHK: Tensor, info: SequenceInfo, config: ModelConfig) -> Tensor:
    """RoPE of every head at the positions of the rows; x itself in a model without RoPE."""
    by = info.turns.get(config.qk_width)
    return x_BTHK if by is None else as_dtype(rope(x_BTHK, by), x_BTHK.dtype)


class ResidualLayer(nn.Module):
    """x + f(norm(x)); a subclass defines f as `branch`, and to decode `empty_cache`.

    A model passes the residual stream from layer to layer as a pair: x, and delta, the last
    branch's output, which the next layer adds and normalises by one op (`reference.add_norm`)."""

    kind: ClassVar[str] = "own"  # what its projections are called in a list of parameters
    attends: ClassVar[bool] = True  # whether tokens read others; then decoding needs a cache
    in_proj: nn.Linear
    out_proj: nn.Linear

    def __init__(self, config: ModelConfig, in_sizes: tuple[int, ...] = ()):
        super().__init__()
        self.config = config
        self.impl: str | None = None  # "reference", "triton" or None, see the table of `ops`
        self.norm = None if config.norm is None else make_norm(config)
        self.in_sizes = in_sizes  # outputs of each matrix in `in_proj`, which holds them one below the other
        if in_sizes:
            self.in_proj = nn.Linear(config.d_model, sum(in_sizes), bias=config.bias)

    def __getstate__(self) -> dict[str, Any]:
        # Without a compiled `add`, which would run on the original's weights.
        return {name: value for name, value in super().__getstate__().items() if name != "add"}

    @torch.no_grad()
    def init_weights(self, std: float) -> None:
        """Set the initial values that `language_model.init_weights` lists; std: of matrices, which
        are drawn first. A parameter's name says what it is."""
        for child, module in sorted(self.named_children(), key=lambda each: not isinstance(each[1], nn.Linear)):
            if hasattr(module, "init_weights"):  # an option beyond the paper
                module.init_weights()  # type: ignore[operator]
                continue
            for name, parameter in module.named_parameters():
                if name in ("bias", "beta"):
                    nn.init.zeros_(parameter)
                elif child.endswith("norm"):
                    nn.init.ones_(parameter)
                else:
                    nn.init.normal_(parameter, std=std if isinstance(module, nn.Linear) else 0.02)

    def forward(self, x_BTD: Tensor, segment_ids: Tensor | None = None, token_mask: Tensor | None = None, *,
                cu_seqlens: Tensor | Sequence[int] | None = None, cache: DecodingState | None = None) -> Any:
        """x + f(norm(x)): `[B, T, D]`, for x of the weights' dtype; with a cache (y, cache).

        segment_ids, token_mask: `[B, T]` as in `lay_out`; by default each row is one document. No
        document sees another, and a token is computed as if its row had no padding, whose results
        are finite and mean nothing. cu_seqlens: in place of segment_ids for a batch of one row,
        where its documents begin, and its length: `[0, ..., T]`. cache: of `decoding_state`; x are
        then the next tokens of its rows. It is changed, and returned. Raises UsageError for a wrong
        shape, dtype, segment id or mask, a row longer than a position table, and a cache of other
        rows or of another layer."""
        self.check_input(x_BTD)
        if cu_seqlens is not None:
            require(segment_ids is None and cache is None, "cu_seqlens goes without segment_ids and cache",
                    "cu_seqlens", "give segment_ids alone")
            segment_ids = layout.ids_of_cu_seqlens(cu_seqlens, x_BTD)
        if cache is not None:
            return self.read_next(x_BTD, segment_ids, token_mask, cache), cache
        laid = layout.lay_out(self.config, x_BTD, segment_ids, token_mask)
        x_BLD = laid.take_vectors(x_BTD)
        info = sequence_info(self.config, laid.position_BL, at_least_float32(x_BLD).dtype, laid.segment_ids_BL)
        return laid.give_back(self.with_residual(x_BLD, info))

    def read_next(self, x_BND: Tensor, segment_ids: Tensor | None, token_mask: Tensor | None,
                  state: DecodingState) -> Tensor:
        """`forward` of the next tokens of rows, whose past is in a state, which is changed. A
        document begins where the id is not that of the token before, also of an earlier call."""
        require(self.config.causal, "only a causal layer decodes", "causal = false", "give it whole rows")
        state.check(self, x_BND.shape[0])
        # Each row's tokens go to its front, its padding behind them.
        laid = layout.lay_out(self.config, x_BND, segment_ids, token_mask, in_grid=False)
        if x_BND.numel() == 0:
            return x_BND
        ids_BN = ids_or_zeros(laid.segment_ids_BL, x_BND)
        begins_BN = torch.zeros_like(ids_BN).bool() if segment_ids is None else state.begins(ids_BN)

        def read(x_BND: Tensor, inputs: DecodeInputs) -> list[Tensor]:
            info = sequence_info(self.config, inputs.position_BN, at_least_float32(x_BND).dtype, inputs=inputs)
            return [self.with_residual(x_BND, info, *state.caches)]

        (out_BND,) = state.read(self.config, read, laid.take_vectors(x_BND), begins_BN, (ids_BN >= 0).sum(1))
        return laid.give_back(out_BND)

    def with_residual(self, x_BTD: Tensor, info: SequenceInfo, cache: Cache | None = None) -> Tensor:
        """`add` with the sum, or without the residual the branch alone."""
        x_BTD, delta_BTD = self.add(x_BTD, None, info, cache)
        out_BTD = x_BTD + delta_BTD if self.config.residual else delta_BTD
        return out_BTD.half() if x_BTD.dtype == torch.float16 else out_BTD

    def check_input(self, x_BTD: Tensor) -> None:
        """Raise UsageError unless x is `[B, T, D]` and has the dtype of the projection. Autocast
        casts all but float64, and another module in the projection's place takes any dtype."""
        width, in_proj = self.config.d_model, getattr(self, "in_proj", None)
        if x_BTD.dim() != 3 or x_BTD.shape[-1] != width:
            raise UsageError("wrong shape of a layer's input", f"{list(x_BTD.shape)}", f"give [batch, tokens, {width}]")
        if type(in_proj) is not nn.Linear or x_BTD.dtype == (dtype := in_proj.weight.dtype):
            return
        casts = torch.is_autocast_enabled(x_BTD.device.type) and torch.float64 not in (x_BTD.dtype, dtype)
        if not (x_BTD.is_floating_point() and casts):
            raise UsageError("wrong dtype of a layer's input", f"{x_BTD.dtype}, the weights are {dtype}",
                             "convert the input or the layer with .to; torch.autocast casts all but float64")

    def add(self, x_BTD: Tensor, delta_BTD: Tensor | None, info: SequenceInfo,
            cache: Cache | None = None) -> tuple[Tensor, Tensor]:
        """x + delta, and this layer's branch, which is the next delta: both `[B, T, D]`. cache: the
        rows are the next tokens of rows whose past is there; it is changed. For causal models."""
        normed_BTD = x_BTD
        if self.norm is not None:
            x_BTD, normed_BTD = add_norm(x_BTD, delta_BTD, *norm_parameters(self.norm))
        if self.config.token_shift and self.attends:
            first_BTF, others_BTF = normed_BTD.chunk(2, dim=-1)
            normed_BTD = torch.cat([token_before(first_BTF, info, cache), others_BTF], dim=-1)
        delta_BTD = self.branch(normed_BTD, info, cache)
        # Not `require`, whose words would make the shape a constant for torch.compile.
        if (shape := getattr(delta_BTD, "shape", ())) != normed_BTD.shape:
            raise UsageError("wrong shape of a layer's branch", f"{type(self).__name__} gives {list(shape)}",
                             f"give {list(normed_BTD.shape)}")
        return x_BTD, delta_BTD

    def project_out(self, out: Tensor) -> Tensor:
        """W_o of what attention or a feed-forward gives, with dropout before and behind it: `[...,
        D]`, in float32 where the matmul is of float16, whose largest number is 65,504."""
        drop = partial(F.dropout, p=self.config.dropout, training=True)
        if drops := self.training and self.config.dropout > 0:
            out = drop(out)
        if torch.float16 not in (self.small_weight.dtype, matmul_dtype(out)):
            projected = self.out_proj(out)
        else:
            # A token is divided so that no entry is above 64, and its product multiplied again:
            # so it stays in float16's range. A lower limit would round it away beside the bias.
            factor = (float16_as_float32(out.detach()).abs().amax(-1, keepdim=True) / 64).clamp(min=1)
            bias = self.out_proj.bias
            projected = self.out_proj((out / factor).half()).float() * factor
            projected = projected if bias is None else projected + (1 - factor) * bias
        return drop(projected) if drops else projected

    @property
    def small_weight(self) -> Tensor:
        """The norm's weight, or without a norm the first parameter: matrices may be quantised."""
        return next(self.parameters()) if self.norm is None else norm_parameters(self.norm)[0]

    @property
    def like(self) -> Tensor:
        """A tensor without elements (a parameter may be sharded) of caches' dtype and device."""
        return torch.empty(0, dtype=self.small_weight.dtype, device=self.small_weight.device)

    def branch(self, normed_BTD: Tensor, info: SequenceInfo, cache: Cache | None = None) -> Tensor:
        """f: `[B, T, D]` of x after its norm. With a cache, of `empty_cache`, x are the next tokens
        of rows whose past is there, and f is what it would be in whole rows."""
        raise UsageError("this layer has no branch", type(self).__name__, "define branch(normed_BTD, info, cache=None)")

    def empty_cache(self, n_rows: int) -> Cache:
        """The cache of `n_rows` rows that have no token yet. Raises UsageError in this class."""
        raise UsageError("this layer does not decode", type(self).__name__, "define its empty_cache")

    def decoding_state(self, n_rows: int) -> DecodingState:
        """The state of `n_rows` rows without a token, for `forward`. Raises as `caches`."""
        state = DecodingState.of_rows(n_rows, self.like.device, self.caches(n_rows), self)
        state.document_B = torch.zeros_like(state.start_B)  # the id of tokens that are given none
        return state

    def caches(self, n_rows: int) -> list[Cache]:
        """`empty_cache` with what options need; none for a layer that does not attend. Raises
        UsageError for a layer that does not decode, see `ModelConfig.decoding_rules`."""
        if not self.attends:
            return []
        check_rules(self.config, self.config.decoding_rules())
        cache, c = self.empty_cache(n_rows), self.config
        if getattr(self, "key_conv", None) is not None:
            cache.z_BKS = self.like.new_zeros(n_rows * c.n_heads, c.key_conv, c.qk_width)
        if c.token_shift:
            cache.shift_BKF = self.like.new_zeros(n_rows, 1, c.d_model // 2)
        return [cache]

    def keep_scores(self, old: ModelConfig) -> None:
        """Scale queries, in a layer with weights of the configuration `old`, so that q k / n of
        relu(q k / n + b)^2 keeps its value, also between chunks with learned weights."""


def token_before(x_BTF: Tensor, info: SequenceInfo, cache: Cache | None) -> Tensor:
    """Of each token the vector of the token before it in its document, else 0: `[B, T, F]`."""
    if info.ranks.size > 1:
        assert info.segment_ids_BT is not None
        row_BLF, ids_BL = with_neighbours(x_BTF, info.segment_ids_BT, (1, 0), info.ranks)
        is_there_BT = ids_BL[:, :-1] == info.segment_ids_BT
    else:
        row_BLF, is_there_BT = info.with_last(x_BTF, 1, cache, "shift_BKF"), info.age_BT > 0
    return torch.where(is_there_BT[..., None], row_BLF[:, :-1], 0.0)


def fold_heads(x_BTF: Tensor, n_heads: int) -> Tensor:
    """`[B, T, ..., F]` as `[B H, T, ..., F / H]`: heads become entries of the batch."""
    return x_BTF if n_heads == 1 else x_BTF.unflatten(-1, (n_heads, -1)).movedim(-2, 1).flatten(0, 1)


def unfold_heads(x_BTF: Tensor, n_heads: int) -> Tensor:
    """The inverse of `fold_heads`, for `[B H, T, F / H]`."""
    return x_BTF if n_heads == 1 else x_BTF.unflatten(0, (-1, n_heads)).movedim(1, -2).flatten(-2)
