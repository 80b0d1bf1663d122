"""Decoding caches: a state of constant size for FLASH, keys and values for quadratic attention."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from lineartime.config import ModelConfig
from lineartime.model.decoding.inputs import DecodeInputs, TokenPosition
from lineartime.ops.reference import Past, entering_states, product, read_states, with_past


class Cache:
    """The decoding cache of one attention layer for a batch of rows."""

    growing: ClassVar[tuple[str, ...]] = ()  # tensors whose second axis grows with T
    closing: ClassVar[tuple[str, ...]] = ()  # tensors that change when a chunk is full, where there are such
    constant: ClassVar[tuple[str, ...]] = ()  # tensors that say nothing of the rows, such as biases
    n_heads: int = 1  # adjacent entries of the batch that make up a row
    z_BKS: Tensor | None = None  # the last K tokens' z, or keys, of `KeyConv`; position p at place p modulo K
    by_row: ClassVar[tuple[str, ...]] = ("shift_BKF",)  # tensors without an axis of heads
    shift_BKF: Tensor | None = None  # with `token_shift` half of the last token's features, `[B, 1, D / 2]`

    def tensors(self) -> dict[str, Tensor]:
        """The state of the rows by name; the first axis counts rows times heads."""
        return {name: value for name, value in vars(self).items()
                if isinstance(value, Tensor) and name not in self.constant}

    def wants_gradient(self, new: Iterable[Tensor]) -> bool:
        """Whether a gradient needs what is here as it is. new: what comes here, what reads it; it
        is not looked at where no gradient is recorded, as in every step of `generate`."""
        return ((torch.is_grad_enabled() and any(x.requires_grad for x in new))
                or any(x.requires_grad for x in self.tensors().values()))

    def select(self, rows_B: Tensor) -> None:
        """Keep the rows rows_B, in this order; a row may occur more than once."""
        entries_B = (rows_B[:, None] * self.n_heads + torch.arange(self.n_heads, device=rows_B.device)).flatten()
        for name, tensor in self.tensors().items():
            chosen_B = rows_B if name in self.by_row else entries_B
            setattr(self, name, tensor.index_select(0, chosen_B.to(tensor.device)))

    def append_last(self, name: str, new_BNF: Tensor, inputs: DecodeInputs) -> Tensor:
        """The last K tokens' vectors, which the tensor `name` holds, and the new ones: `[B, K + N,
        F]`, the oldest first. Then it holds the last K of these: the token at position p is at
        place p modulo K, so that a step that is repeated writes the same."""
        last_BKF = getattr(self, name)
        order_BKF, place_BKF = inputs.of_last(*map(int, last_BKF.shape[1:]))  # plain numbers in a graph too
        row_BLF = torch.cat([last_BKF.gather(1, order_BKF), new_BNF], dim=1)
        kept_BKF = row_BLF.gather(1, place_BKF)
        # In place, for a captured step, unless a gradient needs what is there.
        setattr(self, name, kept_BKF if self.wants_gradient([kept_BKF]) else last_BKF.copy_(kept_BKF))
        return row_BLF

    def reserve(self, length: int) -> None:
        """Make the tensors that grow at least so long."""
        for name in self.growing:
            x_BL = getattr(self, name)
            if length > x_BL.shape[1]:
                with torch.inference_mode(False):  # what is made in that mode can be written only in it
                    made_BL = x_BL.new_zeros(x_BL.shape[0], length, *x_BL.shape[2:])
                made_BL[:, : x_BL.shape[1]] = x_BL
                setattr(self, name, made_BL)

    def closed(self, inputs: DecodeInputs, config: ModelConfig) -> dict[str, Tensor]:
        """Those of `closing` after each row's only new token, which the open chunk holds already.
        No shape depends on which rows' chunks are full, as a graph needs it."""
        return {}


@dataclasses.dataclass
class LastTokens(Cache):
    """Vectors of the last K tokens of each row, for a layer that reads no others."""

    last_BKF: Tensor


@dataclasses.dataclass
class ChunkState(Cache):
    """The open chunk, and a sum over closed chunks."""

    closing: ClassVar[tuple[str, ...]] = ("kv_BSE", "written_B", "k_before_BCS", "v_before_BCE")
    constant: ClassVar[tuple[str, ...]] = ("bias_M",)
    k_quad_BCS: Tensor
    k_lin_BCS: Tensor
    v_BCE: Tensor
    kv_BSE: Tensor  # sum of k v over the current document's closed chunks, if it has any; float32 at least
    n_heads: int = 1
    k_before_BCS: Tensor | None = None  # with overlap keys and values of the chunk before the open one
    v_before_BCE: Tensor | None = None
    gate_BC: Tensor | None = None  # with chunk_pooling "written" the gates of the open chunk
    written_B: Tensor | None = None  # and the sum of gates over the chunks of `kv_BSE`
    bias_M: Tensor | None = None  # the position bias at key position minus query position: 1 - M, ..., 0

    @property
    def chunk_size(self) -> int:
        return int(self.v_BCE.shape[1])  # a plain number in a graph too

    def close(self, at: TokenPosition) -> None:
        """In the rows `at.full`, add the open chunk's tokens of the current document to `kv_BSE`
        (Eq. 6). With overlap the chunk becomes the one before the open one."""
        if self.k_before_BCS is not None and self.v_before_BCE is not None:
            self.k_before_BCS[at.full], self.v_before_BCE[at.full] = self.k_quad_BCS[at.full], self.v_BCE[at.full]
        # Tokens of earlier documents count 0, and so does the sum before the first closed chunk.
        k_BCS, v_BCE, is_carried_B11 = self.k_lin_BCS[at.full], self.v_BCE[at.full], at.weight_B11[at.full] > 0
        of_document_BC = None if at.document_BC is None else at.document_BC[at.full]
        if of_document_BC is not None:
            k_BCS = k_BCS * of_document_BC[..., None]
        kv_BSE = torch.where(is_carried_B11, self.kv_BSE[at.full], 0.0)
        self.kv_BSE[at.full] = kv_BSE.add_(product("bcs,bce->bse", k_BCS, v_BCE))
        if self.gate_BC is not None and self.written_B is not None:
            gate_BC = self.gate_BC[at.full] * (1 if of_document_BC is None else of_document_BC)
            written_B = torch.where(is_carried_B11[:, 0, 0], self.written_B[at.full], 0.0)
            self.written_B[at.full] = written_B + gate_BC.sum(-1)

    def past(self, inputs: DecodeInputs) -> Past:
        """What precedes the open chunk in each row's current document, see `reference.Past`."""
        in_chunks_B = inputs.seq_lens_B - inputs.seq_lens_B % self.chunk_size
        n_carried_B = (in_chunks_B - inputs.start_B).clamp(min=0).to(self.kv_BSE.dtype)
        # What divides the sum: its tokens, or with chunk_pooling "written" the sum of their gates.
        count_B = n_carried_B if self.written_B is None else torch.where(n_carried_B > 0, self.written_B, 0.0)
        return torch.where(n_carried_B[:, None, None] > 0, self.kv_BSE, 0.0), count_B

    def factor(self, at: TokenPosition, gate_BN: Tensor | None) -> Tensor:
        """What multiplies the linear half of a new token, `[B, 1, 1]`. Stores its gate, if any."""
        if self.gate_BC is None or self.written_B is None or gate_BN is None:
            return at.weight_B11
        self.gate_BC[at.place] = gate_BN
        return at.weight_B11 / self.written_B.clamp(min=1).view(-1, 1, 1)

    def advance(self, q_lin_BGCS: Tensor, k_lin_BGCS: Tensor, v_BGCE: Tensor, segment_ids_BGC: Tensor, past: Past,
                now_open: tuple[Tensor, Tensor], pooling: str, gate_BGC: Tensor | None) -> Tensor:
        """The linear half for the chunks from the open one on: `[B, G, C, E]`. `kv_BSE` becomes the
        state at the beginning of the chunk `now_open` of each row."""
        # The states at the boundaries of the chunks, as in training, from the past on. A query
        # reads the state at the beginning of its chunk, if that is of the query's document.
        states = entering_states(k_lin_BGCS, v_BGCE, segment_ids_BGC, gate_BGC, leaving=True)
        kv_BPSE, count_BP, document_BP = with_past(states, past)
        seen_BGC = (segment_ids_BGC == document_BP[:, :-1, None]) & (segment_ids_BGC >= 0)
        count_BGC = count_BP[:, :-1, None].clamp(min=1) if pooling in ("mean", "written") else 1.0
        self.kv_BSE = kv_BPSE[now_open]
        if self.written_B is not None:
            self.written_B = count_BP[now_open]
        return read_states(q_lin_BGCS, kv_BPSE[:, :-1], seen_BGC / count_BGC)

    def closed(self, inputs: DecodeInputs, config: ModelConfig) -> dict[str, Tensor]:
        at = inputs.for_heads(self.n_heads).token_position(config, self.kv_BSE.dtype)
        before = {name: getattr(self, name).clone() for name in self.closing if getattr(self, name) is not None}
        at.full = slice(None)  # close all rows; only the full ones are taken
        self.close(at)
        is_full_B = at.offset_B == self.chunk_size - 1
        return {name: torch.where(is_full_B.view(-1, *[1] * (tensor.dim() - 1)), getattr(self, name), tensor)
                for name, tensor in before.items()}


@dataclasses.dataclass
class KeyValueCache(Cache):
    """The cache of quadratic attention: all keys and values so far, `[B, L, ...]`."""

    growing: ClassVar[tuple[str, ...]] = ("k_BL", "v_BL")
    constant: ClassVar[tuple[str, ...]] = ("bias_L",)
    k_BL: Tensor
    v_BL: Tensor
    n_heads: int = 1
    bias_L: Tensor | None = None  # the position bias at key position minus query position: 1 - L, ..., 0

    def append(self, k_BN: Tensor, v_BN: Tensor, inputs: DecodeInputs,
               readers: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
        """Append each row's new keys and values. Returns all, `[B, inputs.longest, ...]`. readers:
        what else the attention over them takes."""
        if inputs.longest > self.k_BL.shape[1]:  # twice as long: an append takes constant time on average
            self.reserve(max(inputs.longest, 2 * self.k_BL.shape[1]))
        k_BN, v_BN = k_BN.to(self.k_BL.dtype), v_BN.to(self.v_BL.dtype)  # autocast makes a shorter type
        if self.wants_gradient(itertools.chain((k_BN, v_BN), readers)):
            self.k_BL, self.v_BL = self.k_BL.clone(), self.v_BL.clone()
        # Rows of one length take a slice; otherwise tokens are written by index.
        at: tuple[Tensor | slice, Tensor | slice]
        if inputs.common_position is not None:
            at = slice(None), slice(inputs.common_position, inputs.longest)
        elif inputs.single_token or inputs.window is not None:
            # Padding is written too: behind a row's tokens, where the next ones overwrite it.
            at = torch.arange(k_BN.shape[0], device=k_BN.device)[:, None], inputs.position_BN
        else:
            valid = inputs.valid_BN.nonzero(as_tuple=True)
            at, k_BN, v_BN = (valid[0], inputs.position_BN[valid]), k_BN[valid], v_BN[valid]
        self.k_BL[at], self.v_BL[at] = k_BN, v_BN
        return self.k_BL[:, : inputs.longest], self.v_BL[:, : inputs.longest]
