"""What decoding remembers of a row: a state of constant size for FLASH, keys and values for quadratic attention.

Rows of a batch may differ in length, and a row's documents are kept apart as in training.
"""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass
class Feed:
    """The next N tokens of each row and where they stand; made once per call, read by every layer."""

    length_B: Tensor
    """Tokens each row has had before."""
    start_B: Tensor
    """Position at which the document that a row is in began."""
    n_new_B: Tensor
    """How many of the N tokens are the row's; the rest is padding at the end."""
    begins_BN: Tensor
    """True where a token starts a document."""

    def __post_init__(self) -> None:
        index_N = torch.arange(self.begins_BN.shape[1], device=self.begins_BN.device)
        self.valid_BN = index_N < self.n_new_B[:, None]
        self.position_BN = self.length_B[:, None] + index_N
        begins_BN = self.begins_BN & self.valid_BN
        starts_BN = torch.where(begins_BN, self.position_BN, -1)
        self.start_BN = torch.maximum(starts_BN.cummax(1).values, self.start_B[:, None])
        """Position at which each token's document began."""
        self.last_document_B = begins_BN.sum(1)
        self.segment_ids_BN = torch.where(self.valid_BN, begins_BN.cumsum(1), -1)
        """0 for the document a row was in, then 1, 2, ...; -1 for padding."""
        self.one_each = len(index_N) == 1 and bool((self.n_new_B == 1).all())
        """Whether every row gets exactly one token, the common case of decoding."""

    def visible(self, n_keys: int) -> Tensor:
        """True where a query may see key position l: not after it, and of its document. `[B, N, L]`."""
        key_L = torch.arange(n_keys, device=self.position_BN.device)
        return (key_L <= self.position_BN[..., None]) & (key_L >= self.start_BN[..., None])


@dataclasses.dataclass
class ChunkState:
    """One FLASH layer's memory: the open chunk and the sum over closed ones. Nothing in it grows with T."""

    k_quad_BCS: Tensor
    k_lin_BCS: Tensor
    v_BCE: Tensor
    kv_BSE: Tensor
    """Sum of k v over the current document's tokens in closed chunks, float32 at least."""
    count_B: Tensor
    """Number of tokens in that sum."""

    def forget(self, begins_B: Tensor) -> None:
        """Rows where a document begins lose what earlier documents left."""
        if begins_B.any():  # rare, and rewriting the whole state is not cheap
            self.kv_BSE = torch.where(begins_B[:, None, None], 0.0, self.kv_BSE)
            self.count_B = torch.where(begins_B, 0.0, self.count_B)

    def close(self, full_B: Tensor, document_BC: Tensor) -> None:
        """Add the current document's tokens of the open chunk to the sum, in rows whose chunk is full."""
        added_BC = document_BC & full_B[:, None]
        kv_BSE = torch.einsum("bcs,bce->bse", self.k_lin_BCS * added_BC[..., None], self.v_BCE)
        self.kv_BSE = self.kv_BSE + kv_BSE.to(self.kv_BSE.dtype)
        self.count_B = self.count_B + added_BC.sum(-1)


@dataclasses.dataclass
class KeyValueCache:
    """One quadratic layer's memory: every key and value so far, `[B, L, ...]`; it grows with T."""

    k_BL: Tensor
    v_BL: Tensor

    def append(self, k_BN: Tensor, v_BN: Tensor, feed: Feed) -> tuple[Tensor, Tensor]:
        """Write each row's new keys and values behind its old ones; returns all, as long as the longest row."""
        length = int((feed.length_B + feed.n_new_B).max())
        if length > self.k_BL.shape[1]:
            self.k_BL, self.v_BL = self.with_room(self.k_BL, length), self.with_room(self.v_BL, length)
        for row in range(len(k_BN)):
            start, n_new = int(feed.length_B[row]), int(feed.n_new_B[row])
            self.k_BL[row, start : start + n_new] = k_BN[row, :n_new]
            self.v_BL[row, start : start + n_new] = v_BN[row, :n_new]
        return self.k_BL[:, :length], self.v_BL[:, :length]

    @staticmethod
    def with_room(x_BL: Tensor, length: int) -> Tensor:
        """At least twice the room, so that appending one by one costs constant time on average."""
        larger = x_BL.new_zeros(len(x_BL), max(length, 2 * x_BL.shape[1]), *x_BL.shape[2:])
        larger[:, : x_BL.shape[1]] = x_BL
        return larger


@dataclasses.dataclass
class DecodingState:
    """What a model remembers of a batch of rows: each attention layer's memory, and where the rows stand."""

    caches: list[ChunkState | KeyValueCache]
    length_B: Tensor
    start_B: Tensor

    @property
    def n_bytes(self) -> int:
        """Bytes in all caches: constant in T for FLASH."""
        return sum(value.numel() * value.element_size() for cache in self.caches for value in vars(cache).values())
