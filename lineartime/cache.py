"""What decoding remembers of a row: a state of constant size for FLASH, keys and values for quadratic attention.

Rows of a batch may differ in length, and a row's documents are kept apart as in training.
"""

import dataclasses
import itertools
from typing import ClassVar

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
        self.folded: Feed | None = None

    def for_heads(self, n_heads: int) -> "Feed":
        """The same for every head, where a row and a head are one entry of the batch; made once for all layers."""
        if n_heads == 1:
            return self
        if self.folded is None:
            parts = (self.length_B, self.start_B, self.n_new_B, self.begins_BN)
            self.folded = Feed(*(part.repeat_interleave(n_heads, 0) for part in parts))
        return self.folded

    def documents(self, row: int) -> list[tuple[int, int, bool]]:
        """The row's new tokens cut at the documents: start, stop, and whether a document begins at the start."""
        n_new = int(self.n_new_B[row])
        starts = [n for n in self.begins_BN[row, :n_new].nonzero().flatten().tolist() if n]
        bounds = [0, *starts, n_new]
        return [(a, b, bool(self.begins_BN[row, a])) for a, b in itertools.pairwise(bounds) if b > a]

    def visible(self, n_keys: int) -> Tensor:
        """True where a query may see key position l: not after it, and of its document. `[B, N, L]`."""
        key_L = torch.arange(n_keys, device=self.position_BN.device)
        return (key_L <= self.position_BN[..., None]) & (key_L >= self.start_BN[..., None])


@dataclasses.dataclass
class ChunkState:
    """One mixed chunk layer's memory: the open chunk and the sum over closed ones. Nothing in it grows with T, but for
    learned chunk weights, which look back at every closed chunk. A row's heads are entries of the batch side by side.
    """

    growing: ClassVar[tuple[str, ...]] = ("kv_BLSE", "summary_BLS")
    n_heads: int
    k_quad_BCS: Tensor
    k_lin_BCS: Tensor
    v_BCE: Tensor
    kv_BSE: Tensor
    """Sum of k v over the current document's tokens in closed chunks, or their weighted sum with learned weights;
    float32 at least."""
    count_B: Tensor
    """Number of tokens in that sum."""
    k_before_BCS: Tensor | None = None
    v_before_BCE: Tensor | None = None
    """The closed chunk before the open one, where local attention overlaps."""
    z_sum_BS: Tensor | None = None
    """With learned chunk weights: the sum of the open chunk's base z, and of each closed chunk k v and the mean of z,
    by its number in the row."""
    kv_BLSE: Tensor | None = None
    summary_BLS: Tensor | None = None

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

    def step_back(self, full_B: Tensor) -> None:
        """Where local attention overlaps, a full open chunk is now the one before the open one."""
        if self.k_before_BCS is not None and self.v_before_BCE is not None:
            self.k_before_BCS = torch.where(full_B[:, None, None], self.k_quad_BCS, self.k_before_BCS)
            self.v_before_BCE = torch.where(full_B[:, None, None], self.v_BCE, self.v_before_BCE)


@dataclasses.dataclass
class KeyValueCache:
    """One quadratic layer's memory: every key and value so far, `[B, L, ...]`; it grows with T."""

    growing: ClassVar[tuple[str, ...]] = ("k_BL", "v_BL")
    k_BL: Tensor
    v_BL: Tensor
    n_heads: int = 1
    """Entries of the batch that belong to one row."""

    def append(self, k_BN: Tensor, v_BN: Tensor, feed: Feed) -> tuple[Tensor, Tensor]:
        """Write each row's new keys and values behind its old ones; returns all, as long as the longest row."""
        length = int((feed.length_B + feed.n_new_B).max())
        if length > self.k_BL.shape[1]:
            self.k_BL, self.v_BL = with_room(self.k_BL, length), with_room(self.v_BL, length)
        for row in range(len(k_BN)):
            start, n_new = int(feed.length_B[row]), int(feed.n_new_B[row])
            self.k_BL[row, start : start + n_new] = k_BN[row, :n_new]
            self.v_BL[row, start : start + n_new] = v_BN[row, :n_new]
        return self.k_BL[:, :length], self.v_BL[:, :length]


def with_room(x_BL: Tensor, length: int) -> Tensor:
    """At least twice the room, so that appending one by one costs constant time on average."""
    larger = x_BL.new_zeros(len(x_BL), max(length, 2 * x_BL.shape[1]), *x_BL.shape[2:])
    larger[:, : x_BL.shape[1]] = x_BL
    return larger


@dataclasses.dataclass
class PrefixState:
    """One Performer layer's memory: the sum of phi(k) [v, 1] over the current document; it does not grow."""

    growing: ClassVar[tuple[str, ...]] = ()
    n_heads: ClassVar[int] = 1
    kv_BHMK: Tensor


@dataclasses.dataclass
class RowCache:
    """One Combiner layer's memory: the document's open row, and a summary for every place of its full rows, which are
    as large as keys and values: it grows with T."""

    growing: ClassVar[tuple[str, ...]] = ("ks_BLCHK", "vs_BLCHK")
    n_heads: ClassVar[int] = 1
    n_open_B: Tensor
    """Tokens in the open row."""
    n_full_B: Tensor
    """Full rows of the current document."""
    x_BCD: Tensor
    q_BCHK: Tensor
    k_BCHK: Tensor
    v_BCHK: Tensor
    ks_BLCHK: Tensor
    vs_BLCHK: Tensor

    def keep(self, row: int, n_full: int, ks_LCHK: Tensor, vs_LCHK: Tensor) -> None:
        """Write a row's new summaries behind its first `n_full`."""
        length = n_full + len(ks_LCHK)
        if length > self.ks_BLCHK.shape[1]:
            self.ks_BLCHK, self.vs_BLCHK = with_room(self.ks_BLCHK, length), with_room(self.vs_BLCHK, length)
        self.ks_BLCHK[row, n_full:length], self.vs_BLCHK[row, n_full:length] = ks_LCHK, vs_LCHK


Cache = ChunkState | KeyValueCache | PrefixState | RowCache


def tensors_of(cache: Cache) -> dict[str, Tensor]:
    return {name: value for name, value in vars(cache).items() if isinstance(value, Tensor)}


@dataclasses.dataclass
class DecodingState:
    """What a model remembers of a batch of rows: each attention layer's memory, and where the rows stand."""

    caches: list[Cache]
    length_B: Tensor
    start_B: Tensor

    @property
    def n_bytes(self) -> int:
        """Bytes in all caches: constant in T for FLASH."""
        tensors = [tensor for cache in self.caches for tensor in tensors_of(cache).values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def select(self, rows_B: Tensor) -> None:
        """Keep these rows, in this order; a row may come more than once."""
        rows_B = rows_B.to(self.length_B.device)
        for cache in self.caches:
            entries_B = rows_B
            if cache.n_heads > 1:
                heads = torch.arange(cache.n_heads, device=rows_B.device)
                entries_B = (rows_B[:, None] * cache.n_heads + heads).flatten()
            for name, tensor in tensors_of(cache).items():
                setattr(cache, name, tensor.index_select(0, entries_B))
        self.length_B, self.start_B = self.length_B.index_select(0, rows_B), self.start_B.index_select(0, rows_B)
