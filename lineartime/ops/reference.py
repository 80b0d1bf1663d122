"""The PyTorch reference of every attention op, which the kernels must agree with.

Mixed chunk attention has three stages: attention inside a chunk (`quadratic_attention`), the
states, sums of k v that enter each chunk (`sum_states`), and the reading of states by queries
(`read_states`). A document is a run of equal `segment_ids`; -1 marks padding, which contributes
nothing. The paper's ablations are in `ops/ablations.py`.

Tensors of float16 are multiplied in float32 (`product`), and what attention gives for them is
float32: relu(score)^2, sums of k v and u * A v can exceed 65,504, float16's largest number, and
1 / 16,384 is its smallest normal one."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.dtypes import as_dtype, at_least_float32, autocast_off, float16_as_float32, matmul_dtype

SCAN_BLOCK = 32  # chunks whose states are summed by one matmul, see `sum_states`
NORM_EPS = 1e-5  # what LayerNorm and ScaleNorm add to the variance or mean square (Code 5)


def rotary(position: Tensor, width: int, dtype: torch.dtype, base: float = 10_000.0,
           n_rotated: int | None = None) -> tuple[Tensor, Tensor]:
    """sin and cos of position x base^(-i / half) for i < half = width / 2: angles of Codes 2 and 3.

    position: integers of any shape `[...]`. n_rotated: half is n_rotated / 2, and the other angles
    are 0. Returns two tensors `[..., width / 2]` of `dtype`. All is computed in float64: the error
    is below 1e-6 at position 10^6."""
    n_rotated = width if n_rotated is None else n_rotated
    angle = position.double()[..., None] * frequencies(width, n_rotated, base, position.device)
    return angle.sin().to(dtype), angle.cos().to(dtype)


def frequencies(width: int, n_rotated: int, base: float = 10_000.0, device: torch.device | None = None) -> Tensor:
    """What `rotary` multiplies positions by: `[width / 2]`, float64, 0 behind n_rotated / 2."""
    half = n_rotated // 2
    frequency = base ** (torch.arange(half, dtype=torch.float64, device=device) / -max(half, 1))
    return F.pad(frequency, [0, width // 2 - half]) if half < width // 2 else frequency


def turn(sin: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
    """The tables of `rotary` as `rope` takes them: `[..., 1, width / 2]`, `[..., 2, width / 2]`."""
    return cos[..., None, :], sin[..., None, :] * torch.arange(-1, 2, 2, device=sin.device)[:, None]


def rope(x: Tensor, by: tuple[Tensor, Tensor], parts: tuple[int, ...] = (2, -1)) -> Tensor:
    """RoPE (Code 3): the halves of the last axis rotated by a `turn`, which broadcasts.

    x: `[..., width]`. parts: (heads, 2, -1) if heads lie side by side. Returns x's shape."""
    halves = x.unflatten(-1, parts)
    # This is [x1 cos - x2 sin, x2 cos + x1 sin] without a cat, slow in torch.compile.
    return (halves * by[0] + halves.flip(-2) * by[1]).flatten(-len(parts))


def toeplitz(w: Tensor, n_queries: int, n_keys: int | None = None) -> Tensor:
    """b[i, j] = w[j - i + n_queries - 1] as a matrix `[n_queries, n_keys]`, square by default."""
    n_keys = n_keys or n_queries
    if torch.compiler.is_exporting():  # unfold takes no symbolic length
        return w[torch.arange(n_keys, device=w.device) - torch.arange(1 - n_queries, 1, device=w.device)[:, None]]
    # Row i is a window of n_keys entries of w, one entry further left with every query.
    return w[: n_queries - 1 + n_keys].unfold(0, n_keys, 1).flip(0)


def add_shifted(lines: Tensor, step: int) -> Tensor:
    """The sum over the first axis of lines along the last one, line i shifted by i `step`."""
    length = lines.shape[-1]  # of a line, the block that `fold` adds to what overlaps with it
    size = (1, (lines.shape[0] - 1) * step + length)
    return F.fold(lines.movedim(0, -1), size, (1, length), stride=(1, step))[..., 0, 0, :]


def to_chunks(x_BT: Tensor, chunk_size: int, fill: int = 0) -> Tensor:
    """`[B, T, ...]` as `[B, G, C, ...]`, padded with `fill`; in `torch.export` two more chunks."""
    # There T may be symbolic: G is then more than 2, and unfold does not compare lengths.
    n_tokens, c, exports = x_BT.shape[1], chunk_size, torch.compiler.is_exporting()
    missing = ((n_tokens + c - 1) // c + 2) * c - n_tokens if exports else -n_tokens % c
    if exports or missing:
        x_BT = F.pad(x_BT, [0, 0] * (x_BT.dim() - 2) + [0, missing], value=fill)
    return x_BT.unfold(1, c, c).movedim(-1, 2) if exports else x_BT.unflatten(1, (-1, c))


def from_chunks(x_BGC: Tensor, n_tokens: int) -> Tensor:
    """`[B, G, C, ...]` as `[B, T, ...]`, without the padding of `to_chunks`."""
    x_BT = x_BGC.flatten(1, 2)
    if torch.compiler.is_exporting():  # a copy: the strides of a slice would be compared with a symbolic length
        return x_BT.index_select(1, torch.arange(n_tokens, device=x_BT.device))
    return x_BT[:, :n_tokens]


def chunk_ids(segment_ids_BT: Tensor | None, x_BTE: Tensor, chunk_size: int, causal: bool) -> Tensor | None:
    """The documents of tokens in chunks: segment_ids_BGC, with -1 for the padding of the last
    chunk. None for causal rows of one document: the mask hides the padding. x_BTE: any tensor of
    them."""
    if segment_ids_BT is None and causal:
        return None
    return to_chunks(ids_or_zeros(segment_ids_BT, x_BTE), chunk_size, fill=-1)


def ids_or_zeros(segment_ids: Tensor | None, x: Tensor) -> Tensor:
    """Segment ids `[B, ...]`, by default of one document without padding. x: `[B, ..., E]`."""
    return torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device) if segment_ids is None else segment_ids


def bias_or_zeros(w: Tensor | None, x: Tensor, n_tokens: int) -> Tensor:
    """The position bias of n_tokens; zeros of x's dtype, float32 at least, where there is none."""
    return at_least_float32(x.new_zeros(2 * n_tokens - 1)) if w is None else w


def same_document(segment_ids_BGC: Tensor, key_segment_ids_BGM: Tensor | None = None) -> Tensor:
    """True where query c and key m are of one document: `[B, G, C, M]`; keys may be queries."""
    keys = segment_ids_BGC if key_segment_ids_BGM is None else key_segment_ids_BGM
    return (segment_ids_BGC[..., :, None] == keys[..., None, :]) & (keys >= 0)[..., None, :]


def product(formula: str, a: Tensor, b: Tensor) -> Tensor:
    """`torch.einsum(formula, a, b)`; in float32 where it would be in float16."""
    if torch.float16 not in (matmul_dtype(a), matmul_dtype(b)):
        return torch.einsum(formula, a, b)
    with autocast_off(a):
        return torch.einsum(formula, a.float(), b.float())


def weigh_values(a: Tensor, v: Tensor) -> Tensor:
    """a v in the dtype of a matmul with v, or float32 for float16: `[..., N, M]` and `[..., M, E]`
    give `[..., N, E]`."""
    if matmul_dtype(v) == torch.float16:
        return product("...nm,...me->...ne", a, v)
    return torch.matmul(as_dtype(a, v.dtype), v)


def attention_weights(score: Tensor, visible: Tensor | None, kernel: str = "relu2") -> Tensor:
    """relu(score)^2, or softmax over the last axis: exactly 0 for keys that are not visible.

    visible: bool, broadcast to score; None: every key is. Returns score's shape and dtype."""
    # With relu^2 a hidden key gets score 0, and so weight 0.
    if kernel == "relu2":
        return torch.relu(score if visible is None else torch.where(visible, score, 0.0)).square()
    if visible is None:
        return score.softmax(-1)
    # The least finite number, not -inf: a query without any key would be NaN.
    return score.masked_fill(~visible, torch.finfo(score.dtype).min).softmax(-1).masked_fill(~visible, 0.0)


def visible_keys(q_BGCS: Tensor, n_keys: int, causal: bool, segment_ids_BGC: Tensor | None,
                 key_segment_ids_BGM: Tensor | None = None, n_before: int = 0) -> Tensor | None:
    """True where query c may see key m: a key of its document and, when causal, not a later one.
    `[B or 1, G or 1, C, M]`; None if every key is visible.

    n_before: number of keys before the position of the first query."""
    visible = None
    if causal:
        key_M = torch.arange(n_keys, dtype=torch.int32, device=q_BGCS.device)  # torch.compile is slow with 64 bits
        visible = (key_M <= key_M[: q_BGCS.shape[-2], None] + n_before)[None, None]
    if segment_ids_BGC is not None:
        document_BGCM = same_document(segment_ids_BGC, key_segment_ids_BGM)
        visible = document_BGCM if visible is None else document_BGCM & visible
    return visible


def scores(q_BGCS: Tensor, k_BGMS: Tensor, scale: float, w: Tensor | None) -> Tensor:
    """q k^T / scale + b: score_BGCM in float32 at least. w: b, see `toeplitz`, or None."""
    # q is divided before the product, because it is smaller than the scores.
    score_BGCM = at_least_float32(product("bgcs,bgms->bgcm", float16_as_float32(q_BGCS) / scale, k_BGMS))
    return score_BGCM if w is None else score_BGCM + toeplitz(w, *score_BGCM.shape[-2:])


def quadratic_attention(q_BGCS: Tensor, k_BGCS: Tensor, v_BGCE: Tensor, w: Tensor | None, *, scale_len: float,
                        causal: bool, segment_ids_BGC: Tensor | None = None) -> Tensor:
    """relu(q k^T / n + b)^2 v inside each chunk: with one chunk FLASH-Quad (Code 6).

    q_BGCS, k_BGCS `[B, G, C, S]` and v_BGCE `[B, G, C, E]`: one floating dtype. w `[2 C - 1]`: the
    position bias, see `toeplitz`; None: without one. scale_len: n. segment_ids_BGC: integers, the
    document of each token, -1 for padding; None: one document. Returns `[B, G, C, E]`, of v's dtype
    or autocast's, or float32 for float16."""
    visible = visible_keys(q_BGCS, k_BGCS.shape[-2], causal, segment_ids_BGC)
    a_BGCM = attention_weights(scores(q_BGCS, k_BGCS, float(scale_len), w), visible)
    return weigh_values(a_BGCM, v_BGCE)


def sum_states(kv_BGSE: Tensor, last_BG: Tensor, entering_BP: Tensor) -> Tensor:
    """`[B, P, S, E]`: the sum of kv over the chunks g < p that end in the document entering_BP[p].

    last_BG: the last document of each chunk; ids do not decrease along a row. Up to SCAN_BLOCK
    places are one matmul with a matrix of zeros and ones. More places are cut into blocks; the
    state that enters a block is the same sum over blocks, so that the work is linear in G."""
    # One matmul adds up the states of chunks: row p of the matrix says which.
    def add_up(kept_BPG: Tensor, kv_BGSE: Tensor) -> Tensor:
        with autocast_off(kv_BGSE):
            return torch.bmm(kept_BPG.to(kv_BGSE.dtype), kv_BGSE.flatten(2)).unflatten(2, kv_BGSE.shape[2:])

    def add_up_earlier(kv_BGSE: Tensor, last_BG: Tensor, entering_BP: Tensor) -> Tensor:
        before_PG = torch.ones(entering_BP.shape[1], last_BG.shape[1], dtype=torch.bool, device=last_BG.device).tril(-1)
        return add_up((entering_BP[..., None] == last_BG[:, None]) & before_PG, kv_BGSE)

    n_places, n_chunks = entering_BP.shape[1], last_BG.shape[1]
    if torch.compiler.is_exporting() or n_places <= SCAN_BLOCK:
        return add_up_earlier(kv_BGSE, last_BG, entering_BP)
    # Cut the places into blocks. The padding gets document numbers that no document has.
    n_blocks = -(-n_places // SCAN_BLOCK)
    in_blocks = (n_blocks, SCAN_BLOCK)
    missing = n_blocks * SCAN_BLOCK - n_chunks
    if missing:
        kv_BGSE, last_BG = F.pad(kv_BGSE, [0, 0, 0, 0, 0, missing]), F.pad(last_BG, [0, missing], value=-2)
    entering_BP = F.pad(entering_BP, [0, n_blocks * SCAN_BLOCK - n_places], value=-3)
    kv, last, entering = (x.unflatten(1, in_blocks).flatten(0, 1) for x in (kv_BGSE, last_BG, entering_BP))
    # The sum over the chunks of the same block, and each block's sum for its last document.
    within = add_up_earlier(kv, last, entering).unflatten(0, (-1, n_blocks))
    of_block = add_up((last == last[:, -1:])[:, None], kv).unflatten(0, (-1, n_blocks))[:, :, 0]
    # What enters a block is the same sum over blocks, for its first document.
    first_BN = entering_BP[:, ::SCAN_BLOCK]
    entered = sum_states(of_block, last[:, -1].unflatten(0, (-1, n_blocks)), first_BN)
    still = entering_BP.unflatten(1, in_blocks) == first_BN[..., None]
    total = within + torch.where(still[..., None, None], entered[:, :, None], 0.0)
    return total.flatten(1, 2)[:, :n_places]


def last_documents(segment_ids_BGC: Tensor) -> tuple[Tensor, Tensor]:
    """The last document of each chunk, last_BG, and whether each token belongs to it, tail_BGC."""
    last_BG = segment_ids_BGC.amax(-1)
    return last_BG, (segment_ids_BGC == last_BG[..., None]) & (segment_ids_BGC >= 0)


States = tuple[Tensor, Tensor, Tensor]
"""At each chunk boundary of a row: the sum of k v over the tokens before it of the document there,
their number (or the sum of their gates), and the document: kv_BPSE, count_BP, document_BP."""
Past = tuple[Tensor, Tensor]
"""What the linear half keeps of the tokens before a row's first: kv_BSE, the sum of k v over those
of document 0, and count_B, their number, or with "written" the sum of their gates; in float32 at
least."""
Exchange = Callable[[Tensor, Tensor], Tensor]
"""For rows that are parts of longer rows: (leaving_DBF, passes_B) -> entering_DBF. It takes the
states that leave the part and whether document 0 goes on to its end, and gives those that enter. D:
directions; F: a flat sum, here with its count. A `CarriedState` where one process reads the parts
in turn, `ops.context.exchange_states` on ranks."""


class CarriedState:
    """The linear half's state of causal rows that are read part by part, as the `exchange` of each
    call: before a call what enters the part, after it what leaves it. Gradients flow through it, so
    the parts have the whole row's. Document 0 of a part is that of the token before it."""

    def __init__(self, kv_BSE: Tensor, count_B: Tensor):
        """See `Past`; zeros where a row begins."""
        self.kv_BSE, self.count_B = kv_BSE, count_B

    def __call__(self, leaving_DBF: Tensor, passes_B: Tensor) -> Tensor:
        # Sum and count are one vector. They go on where document 0 reaches the part's end.
        entering_BF = torch.cat([self.kv_BSE.flatten(1), self.count_B.to(self.kv_BSE.dtype)[:, None]], dim=1)
        left_BF = leaving_DBF[0] + torch.where(passes_B[:, None], entering_BF, 0.0)
        self.kv_BSE, self.count_B = left_BF[:, :-1].unflatten(1, self.kv_BSE.shape[1:]), left_BF[:, -1]
        return entering_BF[None]


def entering_states(k_BGCS: Tensor, v_BGCE: Tensor, segment_ids_BGC: Tensor, gate_BGC: Tensor | None = None, *,
                    leaving: bool = False) -> States:
    """What enters each chunk: the sum of k v over the tokens so far of the last document before it,
    their number, and that document: kv_BGSE and count_BG, in float32 at least, and entering_BG.
    gate_BGC: what tokens count for, else 1. leaving: also what leaves the last chunk, kv_BPSE and
    so on."""
    # Of each chunk the sum of k v and the count: only its last document can go on in the next one.
    last_BG, tail_BGC = last_documents(segment_ids_BGC)
    kv_BGSE = at_least_float32(product("bgcs,bgce->bgse", k_BGCS * tail_BGC[..., None], v_BGCE))
    counted_BGC = tail_BGC if gate_BGC is None else tail_BGC * gate_BGC
    count_BG = counted_BGC.sum(-1).to(kv_BGSE.dtype)
    # What enters a chunk is of the document that ended the chunk before, at first document 0.
    entering_BG = F.pad(last_BG if leaving else last_BG[:, :-1], [1, 0])
    kv_in_BGSE = sum_states(kv_BGSE, last_BG, entering_BG)
    count_in_BG = sum_states(count_BG[..., None, None], last_BG, entering_BG)[..., 0, 0]
    return kv_in_BGSE, count_in_BG, entering_BG


def with_past(states: States, past: Past) -> States:
    """The states, with the past added to those of document 0, to which it belongs."""
    (kv_BPSE, count_BP, document_BP), (kv_BSE, count_B) = states, past
    still_BP = document_BP == 0
    kv_BPSE = kv_BPSE + torch.where(still_BP[..., None, None], kv_BSE[:, None], 0.0)
    return kv_BPSE, count_BP + torch.where(still_BP, count_B[:, None], 0.0), document_BP


def reversed_ids(segment_ids_BGC: Tensor) -> Tensor:
    """The documents of rows read from their end: the last document is 0, so that ids still rise."""
    last_B11 = F.pad(segment_ids_BGC.flatten(1), [1, 0]).amax(1)[:, None, None]
    return torch.where(segment_ids_BGC >= 0, last_B11 - segment_ids_BGC, -1).flip(1, 2)


def states_of_rows(k_BGCS: Tensor, v_BGCE: Tensor, segment_ids_BGC: Tensor, gate_BGC: Tensor | None = None, *,
                   causal: bool, exchange: Exchange | None = None) -> list[States]:
    """`entering_states` of rows, and when not causal also of the reversed rows.

    exchange: if the rows are parts of rows, see `Exchange`. A part hands on the state after its
    last chunk, and backwards that of its document 0."""
    # The states of each direction as if nothing were outside of the rows.
    leaving = exchange is not None
    states = [entering_states(k_BGCS, v_BGCE, segment_ids_BGC, gate_BGC, leaving=leaving)]
    if not causal:
        reversed_gate_BGC = None if gate_BGC is None else gate_BGC.flip(1, 2)
        states.append(entering_states(k_BGCS.flip(1, 2), v_BGCE.flip(1, 2), reversed_ids(segment_ids_BGC),
                                      reversed_gate_BGC, leaving=leaving))
    if exchange is None:
        return states
    # Exchange what leaves the last chunk for what enters, and add that to its document's states.
    handed = [torch.cat([kv_BPSE[:, -1].flatten(1), count_BP[:, -1:]], dim=1) for kv_BPSE, count_BP, _ in states]
    handed[1:] = [torch.where(segment_ids_BGC[:, 0, :1] == 0, state_BF, 0.0) for state_BF in handed[1:]]
    entering_DBF = exchange(torch.stack(handed), states[0][2][:, -1] == 0)
    s, e = states[0][0].shape[2:]
    added = [with_past(part, (state_BF[:, :-1].unflatten(1, (s, e)), state_BF[:, -1]))
             for part, state_BF in zip(states, entering_DBF, strict=True)]
    return [(kv_BPSE[:, :-1], count_BP[:, :-1], document_BP[:, :-1]) for kv_BPSE, count_BP, document_BP in added]


def read_states(q_BGCS: Tensor, kv_BGSE: Tensor, weight_BGC: Tensor) -> Tensor:
    """weight q kv, of the states that enter chunks: `[B, G, C, E]`, in q's or autocast's dtype, or
    float32 for float16."""
    # The weight, 0 or 1 / count, is put into q, which is smaller than the result.
    q_BGCS = float16_as_float32(q_BGCS)
    q_BGCS = (q_BGCS * weight_BGC[..., None]).to(q_BGCS.dtype)
    return product("bgcs,bgse->bgce", q_BGCS, kv_BGSE.to(q_BGCS.dtype))


def linear_attention(q_BGCS: Tensor, k_BGCS: Tensor, v_BGCE: Tensor, *, causal: bool,
                     segment_ids_BGC: Tensor | None = None, pooling: str = "mean",
                     gate_BGC: Tensor | None = None, exchange: Exchange | None = None) -> Tensor:
    """q sum(k^T v) over tokens of the query's document (Eqs. 7-8): when causal of earlier chunks.

    pooling: "mean" divides by their number (Codes 7-8), "written" by the sum of their gates, or by
    1 if that is less; others do not. gate_BGC: the gates, for "written". exchange: if the rows are
    parts of rows, see `Exchange`. Returns `[B, G, C, E]`."""
    # One document: no mask, and before chunk g there are C g tokens.
    if segment_ids_BGC is None and causal and gate_BGC is None and exchange is None:
        n_chunks, c = q_BGCS.shape[1:3]
        kv_BGSE = at_least_float32(product("bgcs,bgce->bgse", k_BGCS, v_BGCE))
        zeros_BG = torch.zeros(q_BGCS.shape[:2], dtype=torch.long, device=q_BGCS.device)
        count_G = c * torch.arange(n_chunks, device=q_BGCS.device).to(kv_BGSE.dtype)
        weight_G = 1 / count_G.clamp(min=1) if pooling == "mean" else torch.ones_like(count_G)
        return read_states(q_BGCS, sum_states(kv_BGSE, zeros_BG, zeros_BG), weight_G[None, :, None])

    # A query reads the state that enters its chunk where that is of its own document.
    segment_ids_BGC = ids_or_zeros(segment_ids_BGC, q_BGCS)
    states = states_of_rows(k_BGCS, v_BGCE, segment_ids_BGC, gate_BGC, causal=causal, exchange=exchange)
    (seen_BGC, *seen_after), count_BGC = tokens_read(states, segment_ids_BGC, gate_BGC)
    each_BGC = 1 / count_BGC.clamp(min=1) if pooling in ("mean", "written") else torch.ones_like(count_BGC)
    if causal:
        return read_states(q_BGCS, states[0][0], each_BGC * seen_BGC)

    # Not causal: the own chunk with its mask, the chunks before, and the chunks after.
    wide_BGCS = float16_as_float32(q_BGCS)
    scaled_BGCS = (wide_BGCS * each_BGC[..., None]).to(wide_BGCS.dtype)
    own_BGCE = weigh_values(product("bgcs,bgms->bgcm", scaled_BGCS, k_BGCS) * same_document(segment_ids_BGC), v_BGCE)
    before_BGCE = read_states(q_BGCS, states[0][0], each_BGC * seen_BGC)
    after_BGCE = read_states(q_BGCS, states[1][0].flip(1), each_BGC * seen_after[0])
    return before_BGCE + own_BGCE + after_BGCE


def tokens_read(states: list[States], segment_ids_BGC: Tensor, gate_BGC: Tensor | None) -> tuple[list[Tensor], Tensor]:
    """Which tokens read the state before their chunk and, when not causal, that after it: a
    seen_BGC per state. And count_BGC, the tokens that each token reads, or their gates' sum."""
    # Before: the tokens whose document began before their chunk.
    _, count_BG, entering_BG = states[0]
    seen_BGC = (segment_ids_BGC == entering_BG[..., None]) & (segment_ids_BGC >= 0)
    count_BGC = seen_BGC * count_BG[..., None]
    if len(states) == 1:
        return [seen_BGC], count_BGC
    # After: the same of the rows read from their end. The own chunk counts too.
    _, count_after_BG, entering_after_BG = (x.flip(1) for x in states[1])
    seen_after_BGC = (reversed_ids(segment_ids_BGC).flip(1, 2) == entering_after_BG[..., None]) & (segment_ids_BGC >= 0)
    same_BGCM = same_document(segment_ids_BGC)
    own_BGC = (same_BGCM if gate_BGC is None else same_BGCM * gate_BGC[..., None, :]).sum(-1)
    return [seen_BGC, seen_after_BGC], count_BGC + seen_after_BGC * count_after_BG[..., None] + own_BGC


def mixed_chunk_attention(q_quad_BGCS: Tensor, k_quad_BGCS: Tensor, q_lin_BGCS: Tensor, k_lin_BGCS: Tensor,
                          v_BGCE: Tensor, w: Tensor | None, *, scale_len: float, causal: bool,
                          segment_ids_BGC: Tensor | None = None, pooling: str = "mean",
                          gate_BGC: Tensor | None = None, exchange: Exchange | None = None) -> Tensor:
    """Quadratic attention inside a chunk plus linear attention across (Section 3.2, Code 8): `[B,
    G, C, E]`.

    Arguments: see `quadratic_attention` and `linear_attention`."""
    quad_BGCE = quadratic_attention(q_quad_BGCS, k_quad_BGCS, v_BGCE, w, scale_len=scale_len, causal=causal,
                                    segment_ids_BGC=segment_ids_BGC)
    return quad_BGCE + linear_attention(q_lin_BGCS, k_lin_BGCS, v_BGCE, causal=causal, segment_ids_BGC=segment_ids_BGC,
                                        pooling=pooling, gate_BGC=gate_BGC, exchange=exchange)


def make_heads(z_BTS: Tensor, gamma_NS: Tensor, beta_NS: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Heads from z by scales and offsets (Eq. 5), then RoPE (Code 3): heads_NBTS of z's dtype.

    sin, cos: `[1 or B, T, S / 2]`, see `rotary`."""
    # RoPE is computed in the wider of the dtypes, as its angles are; the result is rounded once.
    made_NBTS = z_BTS * gamma_NS[:, None, None] + beta_NS[:, None, None]
    return rope(made_NBTS, turn(sin, cos)).to(z_BTS.dtype)


class HeadsFromZ(NamedTuple):
    """What `make_heads` takes beside z, which the op then reads behind u and v."""

    gamma_NS: Tensor
    beta_NS: Tensor
    sin: Tensor
    cos: Tensor


Heads = HeadsFromZ | Sequence[Tensor]
"""q and k of the quadratic half, then of the linear half: `[B, T, S]` each, or made from z."""


def split_projection(uvz_BTF: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Iterable[Tensor]]:
    """u_BTE and v_BTE after silu (Eqs. 1 and 4), and the heads, made from z where not given.

    The split comes before silu, so each part is contiguous, which saves copies on a CPU."""
    if isinstance(heads, HeadsFromZ):
        s = heads.gamma_NS.shape[-1]
        e = (uvz_BTF.shape[-1] - s) // 2
        u_BTE, v_BTE, z_BTS = (F.silu(part) for part in uvz_BTF.split([e, e, s], dim=-1))
        return u_BTE, v_BTE, make_heads(z_BTS, *heads)
    u_BTE, v_BTE = (F.silu(part) for part in uvz_BTF.chunk(2, dim=-1))
    return u_BTE, v_BTE, heads


def gated_quadratic_attention(uvz_BTF: Tensor, heads: HeadsFromZ, w: Tensor | None, *, scale_len: float, causal: bool,
                              segment_ids_BT: Tensor | None = None) -> Tensor:
    """FLASH-Quad between its projections (Code 6): silu, q, k from z, u * (relu(q k^T / n + b)^2
    v).

    Arguments: see `ops.gated_quadratic_attention`. Returns `[B, T, E]`."""
    u_BTE, v_BTE, (q_BTS, k_BTS) = split_projection(uvz_BTF, heads)
    segment_ids_B1T = None if segment_ids_BT is None else segment_ids_BT[:, None]
    return u_BTE * quadratic_attention(q_BTS[:, None], k_BTS[:, None], v_BTE[:, None], w, scale_len=scale_len,
                                       causal=causal, segment_ids_BGC=segment_ids_B1T)[:, 0]


def gated_chunk_attention(uvz_BTF: Tensor, heads: Heads, w: Tensor | None, *, chunk_size: int, causal: bool,
                          segment_ids_BT: Tensor | None = None, pooling: str = "mean", gate_BT: Tensor | None = None,
                          exchange: Exchange | None = None) -> Tensor:
    """FLASH between its projections (Code 8): silu, heads from z, u * (mixed chunk attention of v).

    Arguments: see `ops.gated_chunk_attention`. Returns `[B, T, E]`."""
    u_BTE, v_BTE, made = split_projection(uvz_BTF, heads)
    return u_BTE * chunk_attention(v_BTE, made, w, chunk_size=chunk_size, causal=causal, segment_ids_BT=segment_ids_BT,
                                   pooling=pooling, gate_BT=gate_BT, exchange=exchange)


def chunk_attention(v_BTE: Tensor, heads: Iterable[Tensor], w: Tensor | None = None, *, chunk_size: int, causal: bool,
                    segment_ids_BT: Tensor | None = None, pooling: str = "mean", gate_BT: Tensor | None = None,
                    exchange: Exchange | None = None) -> Tensor:
    """Mixed chunk attention of rows of any length (Code 8).

    Arguments: see `ops.chunk_attention`. Returns `[B, T, E]`."""
    # Rows are cut into chunks, and the padding of the last chunk is cut off again.
    q_quad_BGCS, k_quad_BGCS, q_lin_BGCS, k_lin_BGCS = (to_chunks(head_BTS, chunk_size) for head_BTS in heads)
    out_BGCE = mixed_chunk_attention(
        q_quad_BGCS, k_quad_BGCS, q_lin_BGCS, k_lin_BGCS, to_chunks(v_BTE, chunk_size), w, scale_len=chunk_size,
        causal=causal, segment_ids_BGC=chunk_ids(segment_ids_BT, v_BTE, chunk_size, causal), pooling=pooling,
        gate_BGC=None if gate_BT is None else to_chunks(gate_BT, chunk_size), exchange=exchange)
    return from_chunks(out_BGCE, v_BTE.shape[1])


def divided_by_gates(heads: Sequence[Tensor], gate_BT: Tensor | None, segment_ids_BT: Tensor | None, chunk_size: int,
                     causal: bool, exchange: Exchange | None = None) -> Sequence[Tensor]:
    """Heads with which pooling "sum" gives what "written" gives: each linear query is divided by
    the sum of the gates that it reads, or by 1 if that is less. Without gates the heads themselves.
    exchange: of sums of gates alone, see `Exchange`."""
    if gate_BT is None:
        return heads
    q_quad, k_quad, q_lin, k_lin = heads
    gate_BGC = to_chunks(gate_BT, chunk_size)
    ids_BGC = to_chunks(ids_or_zeros(segment_ids_BT, q_lin), chunk_size, fill=-1)
    # The sum of the gates of the tokens that each token reads. Values of width 0: no sums of k v.
    none_BGC0 = gate_BGC.new_zeros(*gate_BGC.shape, 0)
    states = states_of_rows(none_BGC0, none_BGC0, ids_BGC, gate_BGC, causal=causal, exchange=exchange)
    count_BT = from_chunks(tokens_read(states, ids_BGC, gate_BGC)[1], gate_BT.shape[1]).clamp(min=1)
    return q_quad, k_quad, (q_lin / count_BT[..., None]).to(q_lin.dtype), k_lin


def scale_norm(x: Tensor, weight: Tensor, eps: float = NORM_EPS) -> Tensor:
    """weight x / sqrt(mean(x^2) + eps) over the last axis, in float32 at least (Code 5)."""
    wide = at_least_float32(x)
    return weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None,
             eps: float = NORM_EPS) -> tuple[Tensor, Tensor]:
    """x + delta, or x if delta is None, and the norm of this sum over its last axis (Code 5).

    x, delta: `[..., D]`, floating. weight `[D]` with bias `[D]`: LayerNorm. weight `[1]` without
    bias: ScaleNorm. Returns the sum in the promoted dtype of x and delta, and its norm in the dtype
    of matmuls: float16 if the weight's is, autocast's, or the sum's. The norm is computed in
    float32 at least."""
    # LayerNorm is PyTorch's own; ScaleNorm has one weight and subtracts no mean.
    total = x if delta is None else x + delta
    dtype = total.dtype if total.dtype == weight.dtype else torch.promote_types(total.dtype, weight.dtype)
    normed = scale_norm(total, weight, eps) if bias is None else F.layer_norm(
        as_dtype(total, dtype), weight.shape, as_dtype(weight, dtype), as_dtype(bias, dtype), eps)
    return total, as_dtype(normed, weight.dtype if weight.dtype == torch.float16 else matmul_dtype(total))
