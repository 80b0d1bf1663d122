"""Prepared text: the manifest of its folder, the tokens of a split, the rows of a training step.

A prepared folder holds `manifest.json`, `tokenizer.json`, and for each split numbered shards of
little-endian uint16 or uint32 ids (`train-00000.bin`) and the positions of its end-of-document
tokens as uint64 (`train-documents.bin`). A split is one stream

    [EOD] document 1 [EOD] document 2 [EOD] ... document n [EOD]

in which every token but the first is a target once. Document i lies between [EOD] i and i + 1."""

import functools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lineartime.base.errors import DataError, raised_as
from lineartime.base.files import MAX_LINES_BYTES, json_sha256, write_atomically
from lineartime.base.settings import require, require_counts
from lineartime.base.stores import Name, cached, exists, hash_of, is_address, is_as_written, read_all, size_of
from lineartime.config import LARGEST
from lineartime.data.corpora import published_words
from lineartime.data.mixture import orders, places_of_step, read_mixture
from lineartime.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer

FORMAT_VERSION = 1
DATA_MANIFEST = "manifest.json"
HASHED_BYTES = 256 << 20  # data of fewer bytes are compared by SHA-256 whenever they are opened


@dataclass
class Split:
    """Counts of a split. `tokens` are targets: the tokens of each document and the end-of-document
    token after it, which `words` (between white space) and `bytes` (of UTF-8) leave out."""

    documents: int
    tokens: int
    words: int
    bytes: int


@dataclass
class Manifest:
    """The content of manifest.json, which ends with the SHA-256 of its other fields."""

    settings: dict[str, Any]
    sources: list[dict[str, Any]] = field(default_factory=list)
    """Split, name, bytes and SHA-256 of every file of text, in the order of their documents."""
    tokenizer: dict[str, Any] = field(default_factory=dict)
    """SHA-256, vocab_size and end_of_document; with "[MASK]" also mask, separator and special."""
    dtype: str = ""
    shard_tokens: int = 0
    splits: dict[str, Split] = field(default_factory=dict)
    blank_documents: int = 0
    """Documents of white space only, which were left out."""
    notes: list[str] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Bytes and SHA-256 of every other file in the folder."""
    already_prepared = False  # whether `prepare` found the folder complete: no field, for it is not written

    @property
    def vocab_size(self) -> int:
        return self.tokenizer["vocab_size"]

    @property
    def end_of_document(self) -> int:
        return self.tokenizer["end_of_document"]

    @property
    def sha256(self) -> str:
        """The hash of all fields, which include the hash of every file."""
        return json_sha256({"version": FORMAT_VERSION} | asdict(self))

    def to_json(self) -> str:
        return json.dumps({"version": FORMAT_VERSION, **asdict(self), "manifest_sha256": self.sha256}, indent=1) + "\n"


def read_manifest(folder: Name) -> Manifest:
    """A prepared folder's manifest. Raises UsageError without the folder, DataError for damage."""
    path, todo = os.path.join(folder, DATA_MANIFEST), "make one with `lineartime prepare`"
    require(is_address(folder) or Path(folder).is_dir(), "no such folder", str(folder), todo)
    require(exists(path), "no manifest of prepared text", path, todo, DataError)
    with raised_as(DataError, "damaged manifest", path, ValueError, RecursionError, KeyError, TypeError, AttributeError,
                   todo="prepare it again"):
        if size_of(path) > MAX_LINES_BYTES:
            raise ValueError
        fields = json.loads(read_all(path))
        digest, version = fields.pop("manifest_sha256"), fields["version"]
        require(not isinstance(version, int) or version <= FORMAT_VERSION, "prepared by a newer lineartime", path,
                f"it has format {version}, this reads {FORMAT_VERSION}", DataError)
        if digest != json_sha256(fields):
            raise ValueError
        del fields["version"]
        manifest = Manifest(**fields | {"splits": {name: Split(**each) for name, each in fields["splits"].items()}})
        require_sizes(manifest)
        return manifest


def require_sizes(manifest: Manifest) -> None:
    """Raise ValueError, KeyError, TypeError or AttributeError unless what a manifest says fits
    together. Anybody may have written it and signed it."""
    sizes, known = {name: file["bytes"] for name, file in manifest.files.items()}, manifest.tokenizer
    tokens = [known["end_of_document"], *known.get("special", [])]
    tokens += [known["mask"], known["separator"]] if "mask" in known else []
    counts = [count for split in manifest.splits.values() for count in astuple(split)]
    numbers = [*sizes.values(), *counts, *tokens, known["vocab_size"], manifest.shard_tokens]
    is_sound = (all(type(number) is int and number >= 0 for number in numbers)
                and max(tokens) < known["vocab_size"] <= LARGEST["vocab_size"]
                and type(known["sha256"]) is str and type(manifest.settings) is dict and TOKENIZER_FILE in sizes
                and np.dtype(manifest.dtype).str in ("<u2", "<u4") and all(Path(name).name == name for name in sizes))
    for name, split in manifest.splits.items():
        n_tokens, most, width = split.tokens + 1, manifest.shard_tokens, np.dtype(manifest.dtype).itemsize
        is_sound = is_sound and sizes[f"{name}-documents.bin"] == 8 * (split.documents + 1) and all(
            sizes[shard_name(name, number)] == width * min(most, n_tokens - start)
            for number, start in enumerate(range(0, n_tokens, most)))
    if not is_sound:
        raise ValueError


def verify_file(folder: Name, manifest: Manifest, name: str, by_hash: bool = True) -> None:
    """Raise DataError unless a file has the size and, with `by_hash`, the hash of the manifest."""
    path, expected = os.path.join(folder, name), manifest.files[name]
    if not (hash_of(path) == expected if is_address(path) else is_as_written(Path(path), expected, by_hash)):
        raise DataError("damaged or missing file", path, "delete the folder and prepare it again")


def verify_data(data_dir: Name) -> Manifest:
    """`read_manifest`, after which all files are compared by SHA-256. Raises DataError."""
    manifest = read_manifest(data_dir)
    for name in manifest.files:
        verify_file(data_dir, manifest, name)
    return manifest


def local_copy(folder: Name, manifest: Manifest, names: Iterable[str] = (TOKENIZER_FILE,)) -> Path:
    """The folder itself; of an address, a folder in the cache with the manifest and these files."""
    if not is_address(folder):
        return Path(folder)
    cache = cached(folder, {name: manifest.files[name]["bytes"] for name in names}, manifest.sha256)
    write_atomically(cache / DATA_MANIFEST, manifest.to_json())
    return cache


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


class TokenStream:
    """One split's tokens, memory-mapped: an end-of-document token, then `n_tokens` targets.

    `name` is the folder as it was given, perhaps an address. `n_words` is published for a published
    split of PG-19 and counted for other text, see `word_count`. `mask` is the id of "[MASK]", or
    None. `special` are the ids that no text has, `ordinary` all others. Document i is
    `read(document_positions[i] + 1, document_positions[i + 1])`, between end-of-document tokens."""

    def __init__(self, folder: Path, split: str, manifest: Manifest, name: Name):
        self.folder, self.split, self.name, counts = folder, split, str(name), manifest.splits[split]
        is_pg19 = manifest.settings.get("task") == "pg19"
        published = published_words(counts.documents, counts.words) if is_pg19 else None
        self.n_tokens, self.n_words, self.n_bytes = counts.tokens, published or counts.words, counts.bytes
        self.word_count = "published" if published else "counted"
        self.vocab_size, self.end_of_document = manifest.vocab_size, manifest.end_of_document
        self.mask: int | None = manifest.tokenizer.get("mask")
        self.special: list[int] = manifest.tokenizer.get("special", [self.end_of_document])
        self.ordinary = np.setdiff1d(np.arange(self.vocab_size), self.special)
        self.tokenizer_sha256: str = manifest.tokenizer["sha256"]
        self.shard_tokens = manifest.shard_tokens
        n_shards = -(-len(self) // self.shard_tokens)
        self._shards = [np.memmap(folder / shard_name(split, i), manifest.dtype, "r") for i in range(n_shards)]
        self.document_positions = np.memmap(folder / f"{split}-documents.bin", "<u8", "r")

    def __len__(self) -> int:
        """Tokens in the stream, including the first end-of-document token."""
        return self.n_tokens + 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """The int64 ids [start, stop), across shards. Raises IndexError outside the stream,
        DataError for an id outside the vocabulary."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"[{start}, {stop}) of {len(self)} tokens")
        size = self.shard_tokens
        numbers = range(start // size, -(-stop // size))
        parts = [self._shards[k][max(start - k * size, 0):stop - k * size] for k in numbers]
        ids = np.concatenate([np.empty(0, np.int64), *parts])
        if ids.max(initial=0) >= self.vocab_size:
            number, token = divmod(start + int(np.argmax(ids >= self.vocab_size)), size)
            where = f"{self.folder / shard_name(self.split, number)}, token {token}"
            raise DataError("a token outside the vocabulary", where, "prepare the data again")
        return ids


def open_split(data_dir: Name, split: str) -> TokenStream:
    """The tokens of one split. Its files and the tokenizer are first compared with the manifest:
    sizes, and up to `HASHED_BYTES` hashes. Raises UsageError without the folder, DataError without
    the split and for damage."""
    manifest = read_manifest(data_dir)
    has = ", ".join(manifest.splits)
    require(split in manifest.splits, f"no {split} split", data_dir,
            f"it has {has}; prepare with --held-out 0.05, --validation or --test for more", DataError)
    names = [name for name in manifest.files if name == TOKENIZER_FILE or name.startswith(f"{split}-")]
    folder = local_copy(data_dir, manifest, names)
    is_small = sum(manifest.files[name]["bytes"] for name in names) < HASHED_BYTES
    for name in names:
        verify_file(folder, manifest, name, by_hash=is_small)
    return TokenStream(folder, split, manifest, data_dir)


def require_mask(mask: int | None, data_dir: Path | str) -> None:
    """Raise UsageError for data that was prepared without [MASK]."""
    require(mask is not None, "the tokenizer has no [MASK]", str(data_dir), "prepare with --mlm")


@functools.lru_cache(maxsize=64)
def words_and_bytes(stream: TokenStream, context: int, starts: tuple[int, ...]) -> tuple[int, int]:
    """Words and bytes of the targets of the rows that begin at `starts`. A word is counted in the
    row in which it begins, a character in the row in which it ends."""
    tokenizer, ends = load_tokenizer(stream.folder / TOKENIZER_FILE), stream.document_positions

    def counts(start: int, stop: int, begin: int, end: int) -> np.ndarray:
        # Tokens of a document [begin, end), without characters that are cut off.
        text = tokenizer.decode(stream.read(start, stop).tolist())
        text = text if start == begin else text.lstrip("\ufffd")
        text = text if stop == end else text.rstrip("\ufffd")
        return np.array([len(text.split()), len(text.encode())])

    total = np.zeros(2, np.int64)
    for row in starts:
        last = min(row + context, stream.n_tokens)  # the targets are the tokens row + 1 to this one
        for i in range(int(np.searchsorted(ends, row, "right")) - 1, int(np.searchsorted(ends, last))):
            begin, end = int(ends[i]) + 1, int(ends[i + 1])
            first, stop = max(begin, row + 1), min(end, last + 1)
            before = max(begin, first - 16)  # enough for whole characters, which have at most four tokens
            total += counts(before, stop, begin, end) - counts(before, first, begin, end)
    return int(total[0]), int(total[1])


@dataclass(frozen=True)
class Mixture:
    """One split of several prepared texts, each of which gives its share of the rows."""

    streams: tuple[TokenStream, ...]
    weights: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        return sum(stream.n_tokens for stream in self.streams)


def read_manifests(data: str) -> list[Manifest]:
    """The manifest of each folder that `data` names, see `read_mixture`. Raises UsageError for
    different tokenizers, and as `read_manifest` and `read_mixture` do."""
    folders = [*read_mixture(data)]
    manifests = [read_manifest(folder) for folder in folders]
    for folder, manifest in zip(folders, manifests, strict=True):
        require(manifest.tokenizer == manifests[0].tokenizer, "the data have different tokenizers",
                f"{manifests[0].tokenizer['sha256'][:12]} of {folders[0]} and {manifest.tokenizer['sha256'][:12]} of "
                f"{folder}", f"prepare {folder} with --tokenizer {folders[0]}")
    return manifests


def tokenizer_of(data: str) -> Tokenizer:
    """The tokenizer of what `data` names, see `read_mixture`."""
    folder = next(iter(read_mixture(data)))
    return load_tokenizer(local_copy(folder, read_manifest(folder)) / TOKENIZER_FILE)


def sha256_of(data: str, manifests: Sequence[Manifest]) -> str:
    """The hash of the prepared text that `data` names: its manifest's, or the hash of all hashes
    and shares. manifests: those of `data`, in order."""
    hashes, weights = [manifest.sha256 for manifest in manifests], [*read_mixture(data).values()]
    return hashes[0] if len(hashes) == 1 else json_sha256([hashes, weights])


def open_data(data: str, split: str) -> TokenStream | Mixture:
    """One split of what `data` names, see `read_mixture` and `open_split`."""
    weights = read_mixture(data)
    streams = tuple(open_split(folder, split) for folder in weights)
    return streams[0] if len(streams) == 1 else Mixture(streams, tuple(weights.values()))


def batch_rows(stream: TokenStream | Mixture, *, seed: int, step: int, rows_per_step: int, context: int,
               chosen: Sequence[int] | None = None) -> np.ndarray:
    """The rows of one training step, int64 [rows_per_step, context + 1], or those `chosen`: a pure
    function of its arguments. Row r is `stream.read(r * context, (r + 1) * context + 1)`: its last
    target is the first input of the next. An epoch reads every full row once, in an order drawn
    from (seed, epoch). Raises DataError for a stream that does not fill one row."""
    places = rows_of_step(stream, seed=seed, step=step, rows_per_step=rows_per_step, context=context, n_shared=1)
    return np.stack([own.read(row * context, (row + 1) * context + 1)
                     for own, _, row in (places if chosen is None else [places[r] for r in chosen])])


def rows_of_step(stream: TokenStream | Mixture, *, seed: int, step: int, rows_per_step: int, context: int,
                 n_shared: int) -> list[tuple[TokenStream, int, int]]:
    """Stream, epoch in it and number of each row of a step. Rows share `n_shared` tokens with the
    next. Raises DataError if a stream does not fill one row."""
    streams, weights = (stream.streams, stream.weights) if isinstance(stream, Mixture) else ((stream,), (1,))
    n_rows = [(len(each) - n_shared) // context for each in streams]
    for each, n in zip(streams, n_rows, strict=True):
        require(n > 0, f"too few tokens for a row of {context:,}", f"{each.name}, {each.split}",
                f"the largest context that works is {len(each) - n_shared:,}", DataError)
    places = places_of_step(n_rows, weights, seed=seed, step=step, rows_per_step=rows_per_step)
    return [(streams[k], epoch, row) for k, epoch, row in places]


def row_starts(n: int, context: int, max_tokens: int | None, spread: bool) -> tuple[int, ...]:
    """Where rows of `context` of n tokens begin: all of them, or those that have about `max_tokens`
    tokens, the first ones or if `spread` at equal distances."""
    n_rows = -(-n // context)
    n_read = n_rows if max_tokens is None else min(max(-(-max_tokens // context), 1), n_rows)
    return tuple(((2 * i + 1) * n_rows // (2 * n_read) if spread else i) * context for i in range(n_read))


def eval_rows(stream: TokenStream, context: int, starts: Iterable[int] | None = None) -> Iterator[np.ndarray]:
    """The rows that begin at `starts`, by default all, int64 [context + 1]; the split's last may be
    shorter. Each target is in one."""
    for start in range(0, stream.n_tokens, context) if starts is None else starts:
        yield stream.read(start, min(start + context + 1, len(stream)))


class Rows:
    """The rows of a split, as PyTorch's `DataLoader` and `transformers.Trainer` take a data set.

    Row i has the tokens i * context to (i + 1) * context of the split. "input_ids" are its tokens
    but the last, int64 [context]. "labels" are the same if `shifted` (models of `transformers`
    shift them), otherwise the next tokens. "position_ids" begin anew with each document; by them
    the classes of `lineartime.hf` keep documents apart. seed: the order is that of an epoch of our
    training; None: that of the text. Raises as `open_split` does."""

    def __init__(self, data: Name, split: str, context: int, *, seed: int | None = None, epoch: int = 0,
                 shifted: bool = True):
        require_counts(context=context)
        self.stream, self.context, self.shifted = open_split(data, split), context, shifted
        self.n_rows = (len(self.stream) - 1) // context
        require(self.n_rows > 0, "the split has no row of this context", f"{len(self.stream):,} tokens of {split}, "
                f"context = {context:,}", "take a shorter one, or more text", DataError)
        self.order = range(self.n_rows) if seed is None else orders(seed, self.n_rows)(epoch)

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, i: int) -> dict[str, Any]:
        import torch

        if not 0 <= i < self.n_rows:
            raise IndexError(i)
        row = int(self.order[i])
        ids = torch.from_numpy(self.stream.read(row * self.context, (row + 1) * self.context + 1))
        places = torch.arange(self.context)
        begins = torch.where(ids[:-1] == self.stream.end_of_document, places, 0).cummax(0).values
        return {"input_ids": ids[:-1], "labels": ids[:-1] if self.shifted else ids[1:], "position_ids": places - begins}
