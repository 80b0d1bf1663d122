"""Text prepared once into token shards, and rows of tokens read back by index.

A prepared folder holds `manifest.json`, `tokenizer.json`, and for each split numbered shards of little-endian uint16 or
uint32 ids (`train-00000.bin`) and the positions of its end-of-document tokens as uint64 (`train-documents.bin`).
A split is one stream

    [EOD] document 1 [EOD] document 2 [EOD] ... document n [EOD]

in which every token but the first is a target exactly once; document i lies between the positions i and i + 1."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lineartime.atomic_io import hash_of, hashed_file, written_aside
from lineartime.config import TASKS
from lineartime.data import corpora
from lineartime.data.read_text import MAX_LINE_BYTES, PIECE, Piece, read_pieces
from lineartime.data.splits import Part, Reader, Source, check_source, divide, find_sources, pieces_of
from lineartime.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, require_vocab_size, train_tokenizer
from lineartime.errors import DataError, ResourceError
from lineartime.settings import require, require_name

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
SAMPLE = Path(__file__).parents[1] / "text" / "jane_eyre.txt"
"""The book that ships with the package."""


@dataclass
class Split:
    """What a split holds. `tokens` counts targets: each document's tokens and the end-of-document token after it.
    `words` are separated by white space, `bytes` are of UTF-8; neither counts the end-of-document tokens."""

    documents: int = 0
    tokens: int = 0
    words: int = 0
    bytes: int = 0


@dataclass
class Manifest:
    """What a prepared folder holds: manifest.json, which ends with the SHA-256 of the rest of it."""

    version: int
    settings: dict[str, Any]
    sources: list[dict[str, Any]]
    """Split, name, bytes and SHA-256 of every file of text, in the order of their documents."""
    tokenizer: dict[str, Any]
    """SHA-256, vocab_size and end_of_document; with a "[MASK]" token also mask, separator and `Tokenizer.special`."""
    dtype: str
    shard_tokens: int
    splits: dict[str, Split]
    blank_documents: int
    """Documents of white space only, which were left out."""
    notes: list[str]
    """What a person should know."""
    files: dict[str, dict[str, Any]]
    """Bytes and SHA-256 of every other file in the folder."""
    already_prepared: bool = False
    """Whether `prepare` found the folder as it should be; not written."""

    @property
    def vocab_size(self) -> int:
        return self.tokenizer["vocab_size"]

    @property
    def end_of_document(self) -> int:
        return self.tokenizer["end_of_document"]

    @property
    def mask(self) -> int | None:
        return self.tokenizer.get("mask")

    @property
    def tokenizer_sha256(self) -> str:
        return self.tokenizer["sha256"]

    @property
    def sha256(self) -> str:
        """What identifies the folder's content: of all fields, and so of every file."""
        return _digest(self._fields())

    def to_json(self) -> str:
        return json.dumps(self._fields() | {"manifest_sha256": self.sha256}, indent=1) + "\n"

    def _fields(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        del fields["already_prepared"]
        return fields


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared folder.

    Raises UsageError where there is no such folder, DataError for a missing, damaged or newer manifest."""
    folder = Path(folder)
    path = folder / MANIFEST
    require(folder.is_dir(), "no such folder", str(folder), "make one with `lineartime prepare`")
    try:
        fields = json.loads(path.read_bytes())
        digest, version = fields.pop("manifest_sha256"), fields["version"]
    except FileNotFoundError:
        raise DataError("no manifest: not a prepared folder", path, "make one with `lineartime prepare`") from None
    except OSError as e:
        raise DataError("cannot read", path, e.strerror) from None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise DataError("damaged manifest", path, "prepare the data again") from None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise DataError("prepared by a newer lineartime", path, f"it has format {version}, this reads {FORMAT_VERSION}")
    if digest != _digest(fields):
        raise DataError("damaged manifest", path, "prepare the data again")
    return Manifest(**fields | {"splits": {name: Split(**split) for name, split in fields["splits"].items()}})


def prepare(inputs: Iterable[Path], out: Path, *, sample: bool = False, tokenizer: str | Path = "train",
            vocab_size: int = 32_000, held_out: float | None = None, validation: Iterable[Path] = (),
            test: Iterable[Path] = (), field: str = "text", task: str | None = None, hub: bool = False,
            documents: int | None = None, mlm: bool = False, jobs: int | None = None, train_characters: int = 1 << 28,
            shard_tokens: int = 1 << 27, max_line_bytes: int = MAX_LINE_BYTES, progress: bool = False) -> Manifest:
    """Read text, train or load a tokenizer, and write the token shards of every split to the new folder `out`.

    `find_sources` says which file belongs to which split; `sample` is the book that ships with the package, instead of
    inputs. `held_out` makes the last fraction of the documents the validation split, rounded, at least one; of a single
    document the last fraction of its characters, from the next line on where one begins within 65,536 characters.
    `tokenizer` is "train" (byte-level BPE of `vocab_size`, on evenly spread pieces of the train split where it has more
    than `train_characters`), "bytes", or the path of a tokenizer.json. `field` is the JSON field or parquet column.
    `task` says which of the paper's data sets it is, and so what its text looks like and what counts (`corpora`); with
    `hub` it is read from the hub instead of inputs, of each split the first `documents`. `mlm`, which the task "c4"
    implies, gives the tokenizer the tokens "[MASK]" and "[SEP]" of masked language modelling.
    `jobs` threads tokenise, by default one per core; the result does not depend on them.
    `out` is whole or not there. Where it was prepared from the same text and settings it is verified and left alone;
    the hub is not asked again whether its text is the same.
    Raises UsageError, DataError (with file and line or byte) or ResourceError (disk)."""
    jobs = len(os.sched_getaffinity(0)) if jobs is None else jobs
    require(held_out is None or 0 < held_out < 1, "wrong value", f"held_out = {held_out}", "it lies between 0 and 1")
    for name, value in (("jobs", jobs), ("train_characters", train_characters), ("shard_tokens", shard_tokens),
                        ("max_line_bytes", max_line_bytes), ("documents", 1 if documents is None else documents)):
        require(value >= 1, "wrong value", f"{name} = {value}", "it takes 1 or more")
    inputs, validation, test, mlm = list(inputs), list(validation), list(test), mlm or task == "c4"
    settings: dict[str, Any] = {"held_out": held_out, "field": field, "shard_tokens": shard_tokens}
    settings |= {"mlm": True} if mlm else {}
    sources: list[Source] = []
    if task is not None:
        require_name("task", task, TASKS)
        settings["task"] = task
    if hub:
        require(task is not None, "no data set is named", "hub", f"name the task: {', '.join(corpora.HUB)}")
        require(not (inputs or sample or validation or test or held_out), "wrong inputs", "the hub and others",
                "a data set of the hub comes with its splits")
        settings |= {"hub": corpora.HUB[settings["task"]][0], "documents": documents}
    else:
        require(documents is None, "only the hub is read in part", f"documents = {documents}", "leave it out")
        require(sample != bool(inputs), "wrong inputs", f"{len(inputs)} and the sample" if sample else "there are none",
                "name files or folders, or ask for the sample")
        sources = find_sources([SAMPLE] if sample else inputs, validation, test,
                               preferred=corpora.PREFERRED.get(task or ""))
        require(held_out is None or all(source.split != "validation" for source in sources), "two validation splits",
                f"held_out = {held_out}", "the inputs have one already; leave out held_out")
    notes = corpora.check_kinds(task, sources)
    ready = None
    if tokenizer == "train":
        require_vocab_size(vocab_size, mlm=mlm)
        settings |= {"tokenizer": "train", "vocab_size": vocab_size, "train_characters": train_characters}
    else:
        ready = byte_tokenizer(mlm=mlm) if tokenizer == "bytes" else load_tokenizer(Path(tokenizer), mlm=mlm)
        settings["tokenizer"] = ready.sha256
    out = Path(os.path.realpath(out))
    reader = functools.partial(read_pieces, field="text" if hub else field, max_line_bytes=max_line_bytes,
                               convert=None if hub else corpora.converter(task))
    try:
        exists = out.exists() and not (out.is_dir() and not any(out.iterdir()))
        if hub and exists:
            return _already_prepared(out, settings, None)
        with contextlib.ExitStack() as stack:
            show = stack.enter_context(_progress(progress))
            if hub:
                asked = corpora.hub_files(settings["task"], out, documents=documents, field=field, show=show)
                sources = find_sources(stack.enter_context(asked))
            hashed = [{"split": source.split, "name": source.name} | hash_of(source.path)
                      for source in show("hashing", sources, len(sources), _one)]
            if exists:
                return _already_prepared(out, settings, hashed)
            _refuse_shared_text(hashed)
            files = [check_source(reader, source) for source in show("checking", sources, len(sources), _one)]
            parts = divide(reader, files, held_out)
            n_characters = sum(file.characters for file in files)
            with written_aside(out, MANIFEST) as (folder, manifest_file):
                manifest = Manifest(FORMAT_VERSION, settings, hashed, {}, "", shard_tokens, {}, 0, notes, {})
                manifest.blank_documents = sum(file.blank for file in files)
                if ready is None:
                    n_train = sum(file.characters for file in parts["train"].files)
                    every = -(-n_train // train_characters)
                    sampled = itertools.islice(pieces_of(reader, parts["train"]), 0, None, every)
                    shown = show("training the tokenizer", sampled, n_train // every, lambda piece: len(piece.text))
                    ready = train_tokenizer((piece.text for piece in shown), vocab_size, mlm=mlm)
                _write_folder(folder, manifest, reader, parts, ready, jobs, n_characters, show)
                _add_notes(manifest, ready, next(pieces_of(reader, parts["train"])).text)
                manifest_file.write(manifest.to_json().encode())
    except OSError as e:
        raise ResourceError("cannot write", e.filename or out, e.strerror or str(e)) from None
    return manifest


def _add_notes(manifest: Manifest, tokenizer: Tokenizer, text: str) -> None:
    asked = manifest.settings.get("vocab_size", 0)
    if tokenizer.vocab_size < asked:
        manifest.notes.append(f"the text gave a vocabulary of {tokenizer.vocab_size:,} of the {asked:,} asked for")
    if manifest.blank_documents:
        manifest.notes.append(f"{manifest.blank_documents:,} documents are white space only and were left out")
    if tokenizer.decode(tokenizer.encode(text)) != text:
        manifest.notes.append("this tokenizer does not keep the text exactly: scores per byte leave out what it drops")


def _refuse_shared_text(sources: list[dict[str, Any]]) -> None:
    seen: dict[str, dict[str, Any]] = {}
    for source in sources:
        first = seen.setdefault(source["sha256"], source)
        if first["split"] != source["split"]:
            where = f"{first['name']} of {first['split']} and {source['name']} of {source['split']}"
            raise DataError("the same text in two splits", where, "take it out of one")


def _already_prepared(out: Path, settings: dict[str, Any], sources: list[dict[str, Any]] | None) -> Manifest:
    require((out / MANIFEST).is_file(), "the output exists and is not a prepared folder", str(out), "choose another")
    manifest = read_manifest(out)
    old, new = manifest.settings | {"text": manifest.sources}, settings | {"text": sources or manifest.sources}
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    how = [name if name == "text" else f"{name} {old.get(name)} -> {new.get(name)}" for name in changed]
    require(not how, "the output was prepared differently", f"{out} ({', '.join(how)})", "choose another or delete it")
    for name in manifest.files:
        _verify(out, manifest, name)
    return dataclasses.replace(manifest, already_prepared=True)


def _verify(folder: Path, manifest: Manifest, name: str, by_hash: bool = True) -> None:
    expected = manifest.files[name]
    with contextlib.suppress(OSError, DataError):
        if (hash_of(folder / name) == expected) if by_hash else ((folder / name).stat().st_size == expected["bytes"]):
            return
    raise DataError("damaged or missing file", folder / name, "delete the folder and prepare it again")


def _write_folder(folder: Path, manifest: Manifest, reader: Reader, parts: dict[str, Part], tokenizer: Tokenizer,
                  jobs: int, n_characters: int, show: "_Show") -> None:
    """Write everything but the manifest, and fill it in."""
    manifest.tokenizer = {"sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size,
                          "end_of_document": tokenizer.end_of_document}
    if tokenizer.mask is not None:
        manifest.tokenizer |= {"mask": tokenizer.mask, "separator": tokenizer.separator, "special": tokenizer.special}
    manifest.dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    with hashed_file(folder / TOKENIZER, manifest.files) as write:
        write(tokenizer.json.encode())
    all_pieces = ((name, piece) for name, part in parts.items() for piece in pieces_of(reader, part))
    shown = show("tokenising", all_pieces, n_characters, lambda item: len(item[1].text))
    for name, group in itertools.groupby(shown, key=lambda item: item[0]):
        split = manifest.splits[name] = Split()
        pieces = _counted((piece for _, piece in group), split)
        ids = _encode(pieces, tokenizer, manifest.dtype, jobs)
        split.tokens = _write_split(folder, name, ids, manifest)


def _counted(pieces: Iterable[Piece], split: Split) -> Iterator[Piece]:
    in_word = False
    for text, last in pieces:
        split.documents += last
        split.words += len(text.split()) - (in_word and not text[0].isspace())
        split.bytes += len(text.encode())
        in_word = not last and not text[-1].isspace()
        yield Piece(text, last)


def _encode(pieces: Iterable[Piece], tokenizer: Tokenizer, dtype: str, jobs: int) -> Iterator[np.ndarray]:
    """The ids of all pieces in order, an end-of-document token after each document, by `jobs` threads.

    Threads and not processes: the tokenizer works without the interpreter's lock, and a killed run leaves none."""

    def encode(batch: list[Piece]) -> np.ndarray:
        ids: list[int] = []
        for text, last in batch:
            ids += tokenizer.encode(text)
            if last:
                ids.append(tokenizer.end_of_document)
        if ids.count(tokenizer.end_of_document) != sum(last for _, last in batch):
            raise DataError("the tokenizer reads its end-of-document token out of text", repr(batch[0].text[:40]))
        if tokenizer.mask is not None and (tokenizer.mask in ids or tokenizer.separator in ids):
            raise DataError("the tokenizer reads [MASK] or [SEP] out of text", repr(batch[0].text[:40]))
        return np.array(ids, dtype=dtype)

    with ThreadPoolExecutor(jobs) as pool:
        waiting: deque[Future[np.ndarray]] = deque()
        try:
            for batch in _batches(pieces):
                waiting.append(pool.submit(encode, batch))
                if len(waiting) > 2 * jobs:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Small documents together, about a full piece at a time."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= PIECE // 2:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _write_split(folder: Path, name: str, arrays: Iterable[np.ndarray], manifest: Manifest) -> int:
    """Write one split's shards and document positions; the number of targets."""
    end_of_document = manifest.tokenizer["end_of_document"]
    n_ids = 0
    documents = folder / f"{name}-documents.bin"
    with contextlib.ExitStack() as shard, hashed_file(documents, manifest.files) as write_positions:
        for ids in itertools.chain([np.array([end_of_document], manifest.dtype)], arrays):
            write_positions((np.flatnonzero(ids == end_of_document) + n_ids).astype("<u8").tobytes())
            while len(ids):
                if n_ids % manifest.shard_tokens == 0:
                    shard.close()
                    path = folder / _shard(name, n_ids // manifest.shard_tokens)
                    write = shard.enter_context(hashed_file(path, manifest.files))
                fitting = ids[:manifest.shard_tokens - n_ids % manifest.shard_tokens]
                write(fitting.tobytes())
                n_ids += len(fitting)
                ids = ids[len(fitting):]
    return n_ids - 1


def _shard(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


_Show = Callable[[str, Iterable[Any], int | None, Callable[[Any], int]], Iterator[Any]]


def _one(_: object) -> int:
    return 1


@contextlib.contextmanager
def _progress(enabled: bool) -> Iterator[_Show]:
    """A function (what, items, total, amount of an item) that passes items on and moves a bar on stderr."""
    if not enabled:
        yield lambda what, items, total, amount: iter(items)
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:

        def show(what: str, items: Iterable[Any], total: int | None, amount: Callable[[Any], int]) -> Iterator[Any]:
            task = bar.add_task(what, total=total)
            for item in items:
                yield item
                bar.advance(task, amount(item))
            bar.update(task, completed=total)

        yield show


class TokenStream:
    """One split's tokens, memory-mapped: an end-of-document token, then `n_tokens` targets.

    `task` is the data set that it was prepared as. `n_words` is the number to divide by: for a published split of PG-19
    the published one, and `word_count` then is "published"; else "counted", between white space.
    `mask` and `separator` are the ids of "[MASK]" and "[SEP]", None where the data was prepared without them; `special`
    holds all ids that no text has and `ordinary` all others. `document_positions` says where the end-of-document tokens
    are: document i is `read(document_positions[i] + 1, document_positions[i + 1])`."""

    def __init__(self, folder: Path, split: str, manifest: Manifest):
        counts = manifest.splits[split]
        self.folder, self.split = folder, split
        self.n_documents, self.n_tokens = counts.documents, counts.tokens
        self.task: str | None = manifest.settings.get("task")
        published = corpora.published_words(counts.documents, counts.words) if self.task == "pg19" else None
        self.n_words, self.n_bytes = published or counts.words, counts.bytes
        self.word_count = "published" if published else "counted"
        self.vocab_size, self.end_of_document = manifest.vocab_size, manifest.end_of_document
        self.mask = manifest.mask
        self.separator: int | None = manifest.tokenizer.get("separator")
        self.special: list[int] = manifest.tokenizer.get("special", [self.end_of_document])
        self.ordinary = np.setdiff1d(np.arange(self.vocab_size), self.special)
        self.tokenizer_sha256 = manifest.tokenizer_sha256
        self.shard_tokens = manifest.shard_tokens
        n_shards = -(-len(self) // self.shard_tokens)
        self._shards = [np.memmap(folder / _shard(split, i), manifest.dtype, "r") for i in range(n_shards)]
        self.document_positions = np.memmap(folder / f"{split}-documents.bin", "<u8", "r")

    def __len__(self) -> int:
        """Tokens in the stream, the first end-of-document token included."""
        return self.n_tokens + 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """The int64 ids [start, stop), across shards.

        Raises IndexError outside the stream, DataError for an id outside the vocabulary."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"[{start}, {stop}) of {len(self)} tokens")
        ids = np.empty(stop - start, np.int64)
        at = start
        while at < stop:
            number, offset = divmod(at, self.shard_tokens)
            part = self._shards[number][offset:offset + stop - at]
            if part.max() >= self.vocab_size:
                raise DataError("a token outside the vocabulary", f"{self.folder / _shard(self.split, number)}, token "
                                f"{offset + int(np.argmax(part >= self.vocab_size))}", "prepare the data again")
            ids[at - start:at - start + len(part)] = part
            at += len(part)
        return ids


def require_mask(mask: int | None, data_dir: Path | str) -> None:
    """Raise UsageError where the data was prepared without [MASK]."""
    require(mask is not None, "the tokenizer has no [MASK]", str(data_dir), "prepare with --mlm")


def open_split(data_dir: Path, split: str, *, verify: bool = True) -> TokenStream:
    """The tokens of one split, after its files and the tokenizer have been compared with the manifest: by SHA-256,
    about a second per GB, or without `verify` by size.

    Raises UsageError where there is no such folder, DataError for a missing split and for what is damaged or newer."""
    folder = Path(data_dir)
    manifest = read_manifest(folder)
    if split not in manifest.splits:
        raise DataError(f"no {split} split", folder, f"it has {', '.join(manifest.splits)}; "
                        "prepare with --held-out 0.05, --validation or --test for more")
    for name in manifest.files:
        if name == TOKENIZER or name.startswith(f"{split}-"):
            _verify(folder, manifest, name, by_hash=verify)
    return TokenStream(folder, split, manifest)


def batch_rows(stream: TokenStream, *, seed: int, step: int, rows_per_step: int, context: int) -> np.ndarray:
    """The rows of one training step, int64 [rows_per_step, context + 1]: a pure function of its arguments.

    Row r is `stream.read(r * context, (r + 1) * context + 1)`: the last target of a row is the first input of the next.
    An epoch reads every full row once, in an order drawn from (seed, epoch); tokens at the end that do not fill a row
    are left out.
    Raises DataError where the stream does not fill one row."""
    rows_IT = np.empty((rows_per_step, context + 1), np.int64)
    places = rows_of_step(stream, len(stream) - 1, seed=seed, step=step, rows_per_step=rows_per_step, context=context)
    for i, (_, row) in enumerate(places):
        rows_IT[i] = stream.read(row * context, (row + 1) * context + 1)
    return rows_IT


def rows_of_step(stream: TokenStream, n_tokens: int, *, seed: int, step: int, rows_per_step: int,
                 context: int) -> list[tuple[int, int]]:
    """Epoch and number of the rows of one step, where rows of `context` are cut from `n_tokens`.

    Raises DataError where these do not fill one row."""
    n_rows = n_tokens // context
    if n_rows == 0:
        raise DataError(f"too few tokens for a row of {context:,}", f"{stream.folder}, {stream.split}",
                        f"the largest context that works is {n_tokens:,}")
    return places_of_step(n_rows, seed=seed, step=step, rows_per_step=rows_per_step)


def places_of_step(n_rows: int, *, seed: int, step: int, rows_per_step: int) -> list[tuple[int, int]]:
    """Epoch and row of each row of a training step; every epoch takes each row once, in an order of its own."""
    places = (divmod(step * rows_per_step + i, n_rows) for i in range(rows_per_step))
    return [(epoch, int(epoch_order(seed, epoch, n_rows)[index])) for epoch, index in places]


@functools.lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, n_rows: int) -> np.ndarray:
    """A permutation, by sorting raw Philox numbers: numpy promises these, and not `permutation`, to stay the same."""
    key = np.array([seed % 2**64, epoch], np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(n_rows), kind="stable")


def eval_rows(stream: TokenStream, context: int) -> Iterator[np.ndarray]:
    """All rows in order, int64 [context + 1], the last one shorter: every token but the first is a target once."""
    for start in range(0, len(stream) - 1, context):
        yield stream.read(start, min(start + context + 1, len(stream)))
