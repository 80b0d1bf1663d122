"""Positions and documents of the next tokens of rows, which may differ in length."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lineartime.config import ModelConfig
from lineartime.model.layout import in_order


@dataclasses.dataclass
class DecodeInputs:
    """The next N tokens of each row: made once per call, read by every layer."""

    seq_lens_B: Tensor  # tokens of each row so far, without the new ones
    start_B: Tensor  # start position of each row's current document
    n_new_B: Tensor  # new tokens of each row; the rest of N is padding
    begins_BN: Tensor  # True for tokens that start a document
    window: int | None = None
    """For a graph: the number of cached keys that are read, at least those of the longest row with
    its new token. There is no host synchronisation, and no shape depends on the position."""

    def __post_init__(self) -> None:
        index_N = torch.arange(self.begins_BN.shape[1], device=self.begins_BN.device)
        self.valid_BN = index_N < self.n_new_B[:, None]
        self.position_BN = self.seq_lens_B[:, None] + index_N
        begins_BN = self.begins_BN & self.valid_BN
        starts_BN = torch.where(begins_BN, self.position_BN, -1)
        if begins_BN.shape[1] > 1:  # ONNX has no cummax, and one token needs none
            starts_BN = starts_BN.cummax(1)[0]
        self.start_BN = torch.maximum(starts_BN, self.start_B[:, None])  # start position of each token's document
        # 0 for the row's current document, then 1, 2, ...; padding has the last token's, or -1.
        self.document_BN = begins_BN.cumsum(1)
        self.segment_ids_BN = torch.where(self.valid_BN, self.document_BN, -1)
        self.longest = self.window or 0  # tokens of the longest row, with the new ones
        self.any_begins = True  # whether a new token may start a document
        self.one_document = False  # whether each row is known to be one
        self.single_token = begins_BN.shape[1] == 1  # whether every row has exactly one new token, as in most steps
        self.common_position: int | None = None  # of the first new tokens, if no row has padding
        self.lengths: tuple[int, ...] = ()  # `seq_lens_B` and `n_new_B`; with a window unknown
        self.n_new: tuple[int, ...] = ()
        if self.window is None:
            self.lengths, self.n_new = tuple(self.seq_lens_B.tolist()), tuple(self.n_new_B.tolist())
            self.longest = max(map(sum, zip(self.lengths, self.n_new, strict=True)))
            self.any_begins, self.one_document = bool(begins_BN.any()), not bool(self.start_BN.any())
            self.single_token = len(index_N) == 1 and min(self.n_new) == 1
            if len({*self.lengths}) == 1 and min(self.n_new) == len(index_N):
                self.common_position = self.lengths[0]
        self.made: dict[Any, Any] = {}

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, which is computed when the first layer asks for it."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def for_heads(self, n_heads: int) -> "DecodeInputs":
        """The same inputs with every row repeated `n_heads` times."""
        names = ("seq_lens_B", "start_B", "n_new_B", "begins_BN")
        return self if n_heads == 1 else self.once(("heads", n_heads), lambda: dataclasses.replace(
            self, **{name: getattr(self, name).repeat_interleave(n_heads, 0) for name in names}))

    def whole_chunks(self, chunk_size: int) -> tuple[int, ...]:
        """Where to cut each row's new tokens, so that whole chunks are computed together: behind
        what fills its open chunk, if any row adds to one, else behind its whole chunks. Empty if no
        row fills a chunk other than the open one."""
        # The quick way out of every step of decoding, and of a graph, which knows no lengths.
        if not self.lengths or self.begins_BN.shape[1] < chunk_size:
            return ()
        rows = list(zip(self.lengths, self.n_new, strict=True))
        before = tuple(min(-length % chunk_size, n_new) for length, n_new in rows)
        whole = tuple((n_new - n) // chunk_size * chunk_size for n, (_, n_new) in zip(before, rows, strict=True))
        return (before if any(before) else whole) if any(whole) else ()

    def cut(self, first: tuple[int, ...]) -> "Cut":
        """The new tokens in two parts: the first so many of each row, and the others."""
        return self.once(first, lambda: Cut(self, first))

    def without_padding(self, x_BN: Tensor) -> Tensor:
        """`[B, N, ...]` with 0 for padding."""
        if self.common_position is not None:
            return x_BN
        return torch.where(self.valid_BN.view(*self.valid_BN.shape, *[1] * (x_BN.dim() - 2)), x_BN, 0.0)

    def documents(self, row: int) -> list[tuple[int, int, bool]]:
        """The row's new tokens by document: start, stop, and whether it begins at the start."""
        n_new = int(self.n_new_B[row])
        bounds = [0, *(n for n in self.begins_BN[row, :n_new].nonzero().flatten().tolist() if n), n_new]
        return [(a, b, bool(self.begins_BN[row, a])) for a, b in itertools.pairwise(bounds) if b > a]

    def visible(self) -> Tensor | None:
        """True where a query may see the key at position l, which is of its document and not later:
        `[B or 1, N, L]`, L = `longest`; None where every key is visible."""
        if self.common_position is not None and self.one_document and self.single_token:
            return None
        all_of_document = self.common_position is not None and self.one_document
        return self.once("visible", lambda: (self.offset_BNL() <= 0) & (True if all_of_document else (
            torch.arange(self.longest, device=self.position_BN.device) >= self.start_BN[..., None])))

    def bias_index(self) -> Tensor | None:
        """Where in `KeyValueCache.bias_L` each offset is; None for one query at one position."""
        if self.common_position is not None and self.single_token:
            return None
        return self.once("bias", lambda: self.offset_BNL().clamp(1 - self.longest, 0) + self.longest - 1)

    def offset_BNL(self) -> Tensor:
        """Key position minus query position: `[B, N, L]`, or `[1, N, L]` with a common position."""
        position_BN = self.position_BN if self.common_position is None else self.position_BN[:1]
        return torch.arange(self.longest, device=position_BN.device) - position_BN[..., None]

    def sees_before(self, n: int) -> list[Tensor] | None:
        """Whether each token sees that n - 1, ..., 0 tokens before it, which is of its document:
        `[B, N, 1]` each; None where all do."""
        if self.common_position is not None and self.one_document and self.common_position >= n - 1:
            return None
        return self.once(n, lambda: [(self.position_BN - self.start_BN)[..., None] >= n_before
                                     for n_before in range(n - 1, -1, -1)])

    def of_last(self, n: int, width: int) -> list[Tensor]:
        """For `Cache.append_last`, `[B, n, width]`: the places of each row's last n tokens, the
        oldest first; and which of these n tokens and the new ones each place then holds."""
        def places() -> list[Tensor]:
            place_K = torch.arange(n, device=self.position_BN.device)
            length_B1, n_new_B1 = self.seq_lens_B[:, None], self.n_new_B[:, None]
            both_BK = (length_B1 + place_K) % n, n_new_B1 + (place_K - length_B1 - n_new_B1) % n
            return [each_BK[..., None].expand(-1, -1, width) for each_BK in both_BK]

        return self.once(("last", n, width), places)

    def token_position(self, config: ModelConfig, dtype: torch.dtype) -> "TokenPosition":
        """Of each row's only new token. dtype: of `kv_BSE`."""
        key = dtype, config.chunk_size, config.overlap, config.chunk_pooling
        return self.once(key, lambda: TokenPosition(self, config, dtype))


class Cut:
    """The next tokens of rows in two parts, with the `inputs` of each, see `DecodeInputs.cut`."""

    def __init__(self, inputs: DecodeInputs, first: tuple[int, ...]):
        device, n_tokens = inputs.begins_BN.device, inputs.begins_BN.shape[1]
        first_B1, index_N = torch.tensor(first, device=device)[:, None], torch.arange(n_tokens, device=device)
        n_first, n_others = max(first), max(1, *(n_new - n for n, n_new in zip(first, inputs.n_new, strict=True)))
        # Row b's tokens first[b], first[b] + 1, ... are the second part, whose padding has any.
        self.orders = (index_N[:n_first].expand(len(first), -1),
                       (first_B1 + index_N[:n_others]).clamp(max=n_tokens - 1))
        # Where each token is when the second part follows the first.
        joined_BN = torch.where(index_N < first_B1, index_N, index_N + n_first - first_B1)
        self.joined_BN = joined_BN.clamp(max=n_first + n_others - 1)
        # The second part begins in the document of the first part's last token, if it has one.
        first_B, (begins_BN, others_begin_BN) = first_B1[:, 0], self.split(inputs.begins_BN)
        start_B = inputs.start_BN.gather(1, (first_B1 - 1).clamp(min=0))[:, 0]
        self.inputs = (DecodeInputs(inputs.seq_lens_B, inputs.start_B, first_B, begins_BN),
                       DecodeInputs(inputs.seq_lens_B + first_B, start_B, inputs.n_new_B - first_B, others_begin_BN))

    def split(self, x_BN: Tensor) -> tuple[Tensor, Tensor]:
        return in_order(x_BN, self.orders[0]), in_order(x_BN, self.orders[1])

    def join(self, first_BN: Tensor, others_BN: Tensor) -> Tensor:
        return in_order(torch.cat([first_BN, others_BN], dim=1), self.joined_BN)


class TokenPosition:
    """The position of one new token per row in its chunk. If it is the same in all rows, only the
    filled part of the open chunk is read; otherwise the whole chunk, with a mask."""

    def __init__(self, inputs: DecodeInputs, config: ModelConfig, dtype: torch.dtype):
        assert config.chunk_size is not None
        position_B, start_B, c = inputs.position_BN[:, 0], inputs.start_BN[:, 0], config.chunk_size
        common, n_before = inputs.common_position, c if config.overlap else 0
        self.n_open = c if common is None else common % c + 1  # slots that are read
        # Slots of the token and of its document's first token: below 0 in an earlier chunk.
        self.offset_B = position_B % c
        self.first_B = start_B - position_B + self.offset_B
        # Factor of the linear half: 0 if the document has no closed chunk.
        n_carried_B = (-self.first_B).clamp(min=0).to(dtype)
        each_B = 1 / n_carried_B.clamp(min=1) if config.chunk_pooling == "mean" else 1.0
        self.weight_B11 = (n_carried_B.clamp(max=1) * each_B)[:, None, None]
        # It sees its document up to itself, in its own chunk and with overlap in the one before.
        self.visible_B1M: Tensor | None = None
        self.document_BC: Tensor | None = None  # the slots of a full chunk that hold the current document; None: all
        if common is None or not inputs.one_document or common + 1 - self.n_open < n_before:
            distance_BM = torch.arange(-n_before, c, device=position_B.device) - self.offset_B[:, None]
            of_document_BM = position_B[:, None] + distance_BM >= start_B[:, None]
            self.visible_B1M = (of_document_BM & (distance_BM <= 0))[:, None, : n_before + self.n_open]
            self.document_BC = None if inputs.one_document else of_document_BM[:, n_before:]
        self.place: tuple[Tensor | slice, Tensor | slice] = slice(None), slice(self.n_open - 1, self.n_open)
        self.bias_index: Tensor | slice = slice(c - self.n_open, None)
        self.full: Tensor | slice | None = None if self.n_open < c else slice(None)
        if common is None:
            rows_B, full_B = torch.arange(position_B.shape[0], device=position_B.device), self.offset_B == c - 1
            self.place = rows_B[:, None], self.offset_B[:, None]
            self.bias_index = (distance_BM.clamp(max=0) + n_before + c - 1)[:, None]
            self.full = full_B.nonzero().flatten() if inputs.window is None and full_B.any() else None
