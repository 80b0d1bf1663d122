"""Decoding caches: a state of constant size for FLASH, keys and values for quadratic attention.

Rows of a batch may differ in length. As in training, attention does not cross documents.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from lineartime.config import ModelConfig
from lineartime.model.decoding.inputs import DecodeInputs, TokenPosition
from lineartime.ops.reference import Past, entering_states, product, read_states, with_past


class Cache:
    """The decoding cache of one attention layer for a batch of rows."""

    growing: ClassVar[tuple[str, ...]] = ()
    """Names of the tensors whose second axis grows with T."""
    constant: ClassVar[tuple[str, ...]] = ()
    """Names of the tensors that say nothing of the rows, such as biases."""
    n_heads: int = 1
    """Adjacent entries of the batch that make up a row."""
    z_BKS: Tensor | None = None
    """The last K tokens' z, or keys, of `memory.KeyConv`; position p at place p modulo K."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors with state of the rows, by name; the first axis counts rows times heads."""
        return {name: value for name, value in vars(self).items()
                if isinstance(value, Tensor) and name not in self.constant}

    def select(self, rows_B: Tensor) -> None:
        """Keep the rows rows_B, in this order; a row may occur more than once."""
        entries_B = rows_B
        if self.n_heads > 1:  # the heads of a row are adjacent entries
            heads = torch.arange(self.n_heads, device=rows_B.device)
            entries_B = (rows_B[:, None] * self.n_heads + heads).flatten()
        for name, tensor in self.tensors().items():
            setattr(self, name, tensor.index_select(0, entries_B.to(tensor.device)))

    def reserve(self, length: int) -> None:
        """Allocate room for rows of `length` tokens, if keys and values of all tokens are kept."""

    def closing(self) -> list[str]:
        """Names of the tensors that change when a chunk is full."""
        return []

    def closed(self, inputs: DecodeInputs, config: ModelConfig) -> dict[str, Tensor]:
        """The tensors of `closing` after each row's only new token, which the open chunk holds
        already. No shape depends on which rows' chunks are full now, as a graph needs it."""
        return {}


@dataclasses.dataclass
class ChunkState(Cache):
    """The open chunk, and a sum over closed chunks. Its size does not depend on T."""

    constant: ClassVar[tuple[str, ...]] = ("bias_M",)
    k_quad_BCS: Tensor
    k_lin_BCS: Tensor
    v_BCE: Tensor
    kv_BSE: Tensor
    """Sum of k v over the current document's closed chunks, if it has any; float32 at least."""
    n_heads: int = 1
    k_before_BCS: Tensor | None = None
    v_before_BCE: Tensor | None = None
    """Keys and values of the chunk before the open one, if local attention overlaps."""
    gate_BC: Tensor | None = None
    written_B: Tensor | None = None
    """With chunk_pooling "written" the gates of the open chunk, and their sum over `kv_BSE`."""
    bias_M: Tensor | None = None
    """The layer's position bias at key position minus query position: 1 - M, ..., 0."""

    @property
    def chunk_size(self) -> int:
        """Slots of the open chunk; a plain number in a graph too."""
        return int(self.v_BCE.shape[1])

    def close(self, at: TokenPosition) -> None:
        """In the rows `at.full`, add the open chunk's tokens of the current document to `kv_BSE`.
        With overlap the chunk becomes the one before the open one."""
        if self.k_before_BCS is not None and self.v_before_BCE is not None:
            self.k_before_BCS[at.full], self.v_before_BCE[at.full] = self.k_quad_BCS[at.full], self.v_BCE[at.full]
        # Tokens of earlier documents count 0, and so does the sum before the first closed chunk.
        k_BCS, v_BCE, is_carried_B11 = self.k_lin_BCS[at.full], self.v_BCE[at.full], at.weight_B11[at.full] > 0
        if at.document_BC is not None:
            k_BCS = k_BCS * at.document_BC[at.full][..., None]
        kv_BSE = torch.where(is_carried_B11, self.kv_BSE[at.full], 0.0)
        self.kv_BSE[at.full] = kv_BSE.add_(product("bcs,bce->bse", k_BCS, v_BCE))
        if self.gate_BC is not None and self.written_B is not None:
            gate_BC = self.gate_BC[at.full]
            if at.document_BC is not None:
                gate_BC = gate_BC * at.document_BC[at.full]
            written_B = torch.where(is_carried_B11[:, 0, 0], self.written_B[at.full], 0.0)
            self.written_B[at.full] = written_B + gate_BC.sum(-1)

    def past(self, inputs: DecodeInputs) -> Past:
        """What precedes the open chunk in each row's current document, see `reference.Past`."""
        n_carried_B = inputs.n_carried_B(self.chunk_size).to(self.kv_BSE.dtype)
        # What divides the sum: the tokens in it, or with chunk_pooling "written" their gates' sum.
        count_B = n_carried_B if self.written_B is None else torch.where(n_carried_B > 0, self.written_B, 0.0)
        return torch.where(n_carried_B[:, None, None] > 0, self.kv_BSE, 0.0), count_B

    def factor(self, at: TokenPosition, gate_BN: Tensor | None) -> Tensor:
        """What multiplies the linear half of a new token, `[B, 1, 1]`. Stores its gate, if any."""
        if self.gate_BC is None or self.written_B is None or gate_BN is None:
            return at.weight_B11
        self.gate_BC[at.place] = gate_BN[:, 0]
        return at.weight_B11 / self.written_B.clamp(min=1)[:, None, None]

    def advance(self, q_lin_BGCS: Tensor, k_lin_BGCS: Tensor, v_BGCE: Tensor, segment_ids_BGC: Tensor,
                inputs: DecodeInputs, pooling: str, gate_BGC: Tensor | None = None) -> Tensor:
        """The linear half for the chunks from the open one on: `[B, G, C, E]`. Full chunks are
        added to `kv_BSE`. gate_BGC: with pooling "written" the gates of tokens in their slots."""
        c = self.chunk_size
        # The states at the boundaries of the chunks, as in training, from the past on. A query
        # reads the state at the beginning of its chunk, if that is of the query's document.
        states = entering_states(k_lin_BGCS, v_BGCE, segment_ids_BGC, gate_BGC, leaving=True)
        kv_BPSE, count_BP, document_BP = with_past(states, self.past(inputs))
        seen_BGC = (segment_ids_BGC == document_BP[:, :-1, None]) & (segment_ids_BGC >= 0)
        count_BGC = count_BP[:, :-1, None].clamp(min=1) if pooling in ("mean", "written") else 1.0
        # The new state is that at the beginning of the chunk which is open now.
        rows, n_closed_B = torch.arange(kv_BPSE.shape[0], device=kv_BPSE.device), inputs.n_closed_B(c)
        self.kv_BSE = kv_BPSE[rows, n_closed_B]
        if self.written_B is not None:
            self.written_B = count_BP[rows, n_closed_B]
        return read_states(q_lin_BGCS, kv_BPSE[:, :-1], seen_BGC / count_BGC)

    def closing(self) -> list[str]:
        names = ("kv_BSE", "written_B", "k_before_BCS", "v_before_BCE")
        return [name for name in names if getattr(self, name) is not None]

    def closed(self, inputs: DecodeInputs, config: ModelConfig) -> dict[str, Tensor]:
        at = inputs.for_heads(self.n_heads).token_position(config, self.kv_BSE.dtype)
        before = {name: getattr(self, name).clone() for name in self.closing()}
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
    bias_L: Tensor | None = None
    """The layer's position bias at key position minus query position: 1 - length, ..., 0."""

    def append(self, k_BN: Tensor, v_BN: Tensor, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
        """Append each row's new keys and values. Returns all, `[B, inputs.longest, ...]`."""
        if inputs.longest > self.k_BL.shape[1]:
            self.k_BL, self.v_BL = with_room(self.k_BL, inputs.longest), with_room(self.v_BL, inputs.longest)
        k_BN, v_BN = k_BN.to(self.k_BL.dtype), v_BN.to(self.v_BL.dtype)  # autocast makes a shorter type
        if k_BN.requires_grad or self.k_BL.requires_grad:  # a gradient needs what was read as it was
            self.k_BL, self.v_BL = self.k_BL.clone(), self.v_BL.clone()
        # Rows of one length take a slice; otherwise tokens are written by index.
        if inputs.common_position is not None:
            at = slice(inputs.common_position, inputs.longest)
            self.k_BL[:, at], self.v_BL[:, at] = k_BN, v_BN
        elif inputs.single_token or inputs.window is not None:
            # Padding is written too: behind a row's tokens, where the next ones overwrite it.
            rows = torch.arange(k_BN.shape[0], device=k_BN.device)[:, None]
            self.k_BL[rows, inputs.position_BN], self.v_BL[rows, inputs.position_BN] = k_BN, v_BN
        else:
            rows, n = inputs.valid_BN.nonzero(as_tuple=True)
            position = inputs.position_BN[rows, n]
            self.k_BL[rows, position], self.v_BL[rows, position] = k_BN[rows, n], v_BN[rows, n]
        return self.k_BL[:, : inputs.longest], self.v_BL[:, : inputs.longest]

    def reserve(self, length: int) -> None:
        self.k_BL, self.v_BL = larger(self.k_BL, length), larger(self.v_BL, length)


def larger(x_BL: Tensor, length: int) -> Tensor:
    """`x_BL` padded with zeros to at least `length`."""
    if length <= x_BL.shape[1]:
        return x_BL
    with torch.inference_mode(False):  # what is made in that mode can be written only in it
        made_BL = x_BL.new_zeros(x_BL.shape[0], length, *x_BL.shape[2:])
    made_BL[:, : x_BL.shape[1]] = x_BL
    return made_BL


def with_room(x_BL: Tensor, length: int) -> Tensor:
    """`larger`, at least twice as long: an append takes constant time on average."""
    return larger(x_BL, max(length, 2 * x_BL.shape[1]))
