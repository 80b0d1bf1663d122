"""Combiner's core: an op, rowmajor-axial attention (Ren et al. 2021), for one document; its cache;
and a core, which splits rows into documents."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime.config import ModelConfig
from lineartime.model.decoding.cache import Cache
from lineartime.model.decoding.inputs import DecodeInputs
from lineartime.model.layers import SequenceInfo, by_document, rotate_heads
from lineartime.ops.dtypes import at_least_float32
from lineartime.ops.reference import from_chunks, rope, rotary, to_chunks, turn


def rowmajor_axial_attention(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor,
                             summarise: Callable[[Tensor], Tensor], *, chunk_size: int, causal: bool,
                             earlier: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A document is cut into rows of C tokens. A query at place i of a row sees the tokens of its
    row, and the summary for place i of other rows. Returns `[B, T, H, K]` and keys and values of
    the summaries, `[B, G, C, H, K]` each; earlier: those of rows before these.

    q and k are after RoPE. summarise: maps summary values `[B, G, C, H, K]` to summary keys. A
    causal query sees the summaries of earlier rows only; a summary covers its whole row. A query
    that is not causal sees its own row twice, as tokens and as a summary.

    | step | formula |
    |---|---|
    | tokens | a_ij = q_i k_j / sqrt(K) in a row |
    | summary | vs_i = sum_j softmax_j(a_ij) v_j, never masked; ks = summarise(vs) |
    | summaries | s_if = q_i ks_fi / sqrt(K), row f, place i |
    | result | softmax([a, s]) [v, vs] |

    A last row of fewer than C tokens has summaries only for the places of its tokens."""
    n_tokens, width = q_BTHK.shape[1], q_BTHK.shape[-1]
    # Fill up the last row of C tokens and cut the document into rows.
    q, k, v = (to_chunks(x, chunk_size) for x in (q_BTHK, k_BTHK, v_BTHK))
    q = q / width**0.5
    # Scores within a row. Summaries are made of them before the causal mask.
    there_GC = (torch.arange(q.shape[1] * chunk_size, device=q.device) < n_tokens).view(-1, chunk_size)
    a_BGHCJ = at_least_float32(torch.einsum("bgihk,bgjhk->bghij", q, k))
    lowest = torch.finfo(a_BGHCJ.dtype).min
    a_BGHCJ = a_BGHCJ.masked_fill(~there_GC[:, None, None, :], lowest)
    vs_BGCHK = torch.einsum("bghij,bgjhk->bgihk", a_BGHCJ.softmax(-1).to(v.dtype), v)
    ks_BGCHK = summarise(vs_BGCHK)
    # The summaries that each row may see: F counts earlier calls', then those here.
    n_rows, n_earlier = q.shape[1], 0 if earlier is None else earlier[0].shape[1]
    ks_BFCHK, vs_BFCHK = ks_BGCHK, vs_BGCHK
    if earlier is not None:
        ks_BFCHK, vs_BFCHK = torch.cat([earlier[0], ks_BGCHK], dim=1), torch.cat([earlier[1], vs_BGCHK], dim=1)
    seen_GCF = F.pad(there_GC.T, [n_earlier, 0], value=True).expand(n_rows, -1, -1)
    if causal:
        row_F = torch.arange(-n_earlier, n_rows, device=q.device)
        seen_GCF = seen_GCF & (row_F < row_F[n_earlier:, None])[:, None, :]
        later_CJ = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).triu(1)
        a_BGHCJ = a_BGHCJ.masked_fill(later_CJ, lowest)
    # One softmax over the tokens of the row and the summaries of others.
    s_BGHCF = at_least_float32(torch.einsum("bgihk,bfihk->bghif", q, ks_BFCHK))
    s_BGHCF = s_BGHCF.masked_fill(~seen_GCF[:, None], lowest)
    w_BGHCW = torch.cat([a_BGHCJ, s_BGHCF], dim=-1).softmax(-1).to(v.dtype)
    direct, summed = w_BGHCW.split([chunk_size, s_BGHCF.shape[-1]], dim=-1)
    out = torch.einsum("bghij,bgjhk->bgihk", direct, v) + torch.einsum("bghif,bfihk->bgihk", summed, vs_BFCHK)
    return from_chunks(out, n_tokens), (ks_BGCHK, vs_BGCHK)


@dataclasses.dataclass
class RowCache(Cache):
    """The open row of the current document, and the summaries of its full rows. These are as large
    as keys and values, so the cache grows with T."""

    growing: ClassVar[tuple[str, ...]] = ("ks_BLCHK", "vs_BLCHK")
    n_open_B: Tensor  # tokens in the open row
    n_full_B: Tensor  # full rows of the current document
    x_BCD: Tensor  # the open row; then the summaries
    q_BCHK: Tensor
    k_BCHK: Tensor
    v_BCHK: Tensor
    ks_BLCHK: Tensor
    vs_BLCHK: Tensor

    def reserve(self, length: int) -> None:
        """Make room for the summaries of rows of `length` tokens."""
        super().reserve(length // self.x_BCD.shape[1])


@dataclasses.dataclass
class Combiner:
    """`rowmajor_axial_attention` of each document, which begins a row of C tokens. A summary's key
    is RoPE(W_b norm(x + W_a vs)), with x and position of the token there."""

    config: ModelConfig
    summary_proj: nn.Module
    summary_key: nn.Module
    summary_norm: nn.Module

    def attend(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, x_BTD: Tensor, info: SequenceInfo,
               cache: Cache | None = None) -> Tensor:
        q_BTHK, k_BTHK = rotate_heads(q_BTHK, info, self.config), rotate_heads(k_BTHK, info, self.config)
        if isinstance(cache, RowCache) and info.inputs is not None:
            return self.extend(q_BTHK, k_BTHK, v_BTHK, x_BTD, info, info.inputs, cache)
        # Each document by itself, for its rows of C tokens begin at its first token.
        angles = tuple(a.expand(len(x_BTD), -1, -1) for a in info.angles.get(self.config.qk_width, ()))
        parts = [self.attend_document(x, q, k, v, sin_cos)[0]
                 for q, k, v, x, *sin_cos in by_document((q_BTHK, k_BTHK, v_BTHK, x_BTD, *angles), info)]
        return torch.cat(parts, dim=1).view_as(v_BTHK).flatten(2)

    def attend_document(self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, angles: Sequence[Tensor],
                        earlier: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """`rowmajor_axial_attention` of one document. angles: sin and cos, or empty."""
        config, c = self.config, self.config.chunk_size or 1

        def summarise(vs_BGCHK: Tensor) -> Tensor:
            # A key for the summary at each place, rotated like the token at that place.
            summary_BGCD = to_chunks(x_BTD, c) + self.summary_proj(vs_BGCHK.flatten(3))
            key_BGCHK = self.summary_key(self.summary_norm(summary_BGCD)).unflatten(-1, (config.n_heads, -1))
            if not angles:
                return key_BGCHK
            by = turn(*(to_chunks(angle, c)[..., None, :] for angle in angles))
            return rope(key_BGCHK, by).to(key_BGCHK.dtype)

        return rowmajor_axial_attention(q_BTHK, k_BTHK, v_BTHK, summarise, chunk_size=c, causal=config.causal,
                                        earlier=earlier)

    def empty_cache(self, n_rows: int, weight: Tensor) -> Cache:
        h, k, c = self.config.n_heads, self.config.qk_width, self.config.chunk_size or 1
        none_B = torch.zeros(n_rows, dtype=torch.long, device=weight.device)
        zeros, chunk, chunks = weight.new_zeros, (n_rows, c, h, k), (n_rows, 0, c, h, k)
        return RowCache(none_B, none_B.clone(), zeros(n_rows, c, h * k), zeros(chunk), zeros(chunk), zeros(chunk),
                        zeros(chunks), zeros(chunks))

    def extend(self, q_BNHK: Tensor, k_BNHK: Tensor, v_BNHK: Tensor, x_BND: Tensor, info: SequenceInfo,
               inputs: DecodeInputs, cache: RowCache) -> Tensor:
        out, c, config = torch.zeros_like(v_BNHK), cache.x_BCD.shape[1], self.config
        rotated, new = info.angles.get(config.qk_width), (x_BND, q_BNHK, k_BNHK, v_BNHK)
        buffers = (cache.x_BCD, cache.q_BCHK, cache.k_BCHK, cache.v_BCHK)
        for row in range(len(v_BNHK)):
            for start, stop, begins in inputs.documents(row):
                # The open row goes on with the new tokens, unless they begin a document.
                n_open, n_full = (0, 0) if begins else (int(cache.n_open_B[row]), int(cache.n_full_B[row]))
                x, q, k, v = (torch.cat([old[row, :n_open], part[row, start:stop]])[None]
                              for old, part in zip(buffers, new, strict=True))
                earlier = (cache.ks_BLCHK[row : row + 1, :n_full], cache.vs_BLCHK[row : row + 1, :n_full])
                position_1T = inputs.position_BN[row, start] - n_open + torch.arange(x.shape[1], device=x.device)[None]
                angles = () if rotated is None else rotary(position_1T, config.qk_width, rotated[0].dtype,
                                                           config.rope_base, config.n_rotated)
                attended, (ks, vs) = self.attend_document(x, q, k, v, angles, earlier)
                out[row, start:stop] = attended[0, n_open:]
                # Rows that are full now leave their summaries; what is left is the open row.
                n_new_full, n_open = divmod(x.shape[1], c)
                room, now_full = cache.ks_BLCHK.shape[1], n_full + n_new_full
                if now_full > room:
                    cache.reserve(max(now_full, 2 * room) * c)
                for kept, part in ((cache.ks_BLCHK, ks), (cache.vs_BLCHK, vs)):
                    kept[row, n_full:now_full] = part[0, :n_new_full]
                for buffer, part in zip(buffers, (x, q, k, v), strict=True):
                    buffer[row, :n_open] = part[0, n_new_full * c :]
                cache.n_open_B[row], cache.n_full_B[row] = n_open, now_full
        return out.flatten(2)
