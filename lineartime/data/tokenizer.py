"""Text to token ids and back: byte-level BPE trained here, plain bytes, any tokenizer.json, or
another model's. The first two give back every text exactly."""

import contextlib
import functools
import hashlib
import json as json_module
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from lineartime.base.errors import DataError, UsageError, raised_as
from lineartime.base.files import read_bytes
from lineartime.base.settings import require
from lineartime.base.stores import is_address
from lineartime.config import LARGEST
from lineartime.data.read_text import pieces_of
from lineartime.folders import copied, shipped_models, weights_folder

TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
END_OF_DOCUMENT = "<|endoftext|>"
MASK, SEPARATOR = "[MASK]", "[SEP]"
"""Further tokens for masked language modelling; the end-of-document token serves as [CLS]."""
PAD = "<|pad|>"
"""The padding of a causal model: the id behind its vocabulary. It is not the end-of-document token,
for collators take padding out of what is learned."""
KNOWN = r"(?![\x1c-\x1f\x80-\U0010ffff])"
"""The next character is of ASCII, but not \\x1c to \\x1f, which are white space to Python alone."""
SIGN, SPACE = r"\x00-\x08\x0e-\x1b!-/:-@\[-`{-\x7f", r"\t-\r "
WORDS = re.compile(rf" ?[A-Za-z]++{KNOWN}"
                   rf"|'(?:[stmd]|re|ve|ll)| ?[{SIGN}]++{KNOWN}"
                   rf"| ?[0-9]++{KNOWN}"
                   rf"|[{SPACE}]+(?=[{SPACE}][{SIGN}A-Za-z0-9])|[\t-\r](?=[{SIGN}A-Za-z0-9])"
                   r"|(?s:.)[^ \n]*(?:[ \n](?!\S)[^ \n]*)*")
"""Cuts text where GPT-2's expression does: each part has its own tokens. Within ASCII these are all
of its cuts. The last alternative takes other characters, up to a space before a word."""
STDERR = threading.Lock()  # who has it may point the process's stderr elsewhere
LONGEST_WHOLE = 1 << 22  # characters of the longest document that a tokenizer sees whole
CACHED_WORDS, LONGEST_CACHED = 1 << 17, 64
"""Most words whose ids an encoder keeps, about 25 MB, and their most characters."""
VOCABULARY_FILES = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""What `transformers` makes a tokenizer of where there is no tokenizer.json."""
PROBES = ("Hello, World's  3.14!\r\n\t\x0bThe  end ", " Ça va? Größe \ufb01ne e\u0301\u00a0\u2028 ",
          "Съешь ещё булок. Ξένη", "東京は今日も雨だ。한국어 ไทย हिन्दी",
          "שלום مرحبا\u200d\U0001f600 \u0000", "▁a Ġb ##c <0x0A>")
"""Texts of several scripts, with white space and signs that tokenizers treat in their own ways."""


class Tokenizer:
    """A `tokenizers.Tokenizer` that neither truncates nor pads text, nor reads special tokens from
    it.

    `json` is the text of the tokenizer.json, `sha256` its hash, without what `json_with_beginning`
    adds. `vocab_size` is the largest id plus one, `dtype` the smallest type that holds every id.
    `end_of_document`, `mask` and `separator` are ids; a missing "<|endoftext|>" is added, and with
    `mlm` "[MASK]" and "[SEP]". `special` are the ids that no text has: special tokens and unused
    ids (`has_gaps`). `unknown` is the id of what it has no token for, or None. `reads_pieces`: the
    ids of the pieces of a text are those of the whole; `is_lossless`: every text is given back.
    Raises DataError if `json` is not a tokenizer, or has no room for a token that is added."""

    def __init__(self, json: str, name: str = "tokenizer.json", *, mlm: bool = False):
        self.name = name
        with self._refused("not a tokenizer.json"), _quiet_stderr():
            inner = self._inner = tokenizers.Tokenizer.from_str(json)
        # What it needs. A file that has all of it is kept as it is, for the hash is of its text.
        needed, has_dropout = needed_tokens(mlm), bool(getattr(inner.model, "dropout", None))
        if has_dropout:  # of training: each call would give other tokens
            inner.model.dropout = None
        missing = [token for token in needed if token not in _special_tokens(inner)]
        inner.add_special_tokens([_mask_token(inner) if token == MASK else token for token in missing])
        self.json = inner.to_str() if has_dropout or missing else json
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True  # "<|endoftext|>" inside a document is encoded as plain text
        # Its ids.
        vocabulary, special = inner.get_vocab(), _special_tokens(inner)
        used = Counter(vocabulary.values())
        self.vocab_size = max(used) + 1
        self.dtype = "<u2" if self.vocab_size <= 1 << 16 else "<u4"
        if self.vocab_size > LARGEST["vocab_size"]:
            raise DataError("a token's id is too large", name, f"the largest is {LARGEST['vocab_size'] - 1:,}")
        for token in needed:
            if used[vocabulary[token]] > 1:  # the library counts entries to find a new id
                raise DataError(f"its vocabulary has no room for {token}", name, "add the token to the file")
        self.end_of_document = special[END_OF_DOCUMENT]
        self.mask, self.separator = special.get(MASK), special.get(SEPARATOR)
        self.has_gaps, self.has_pad = len(used) < self.vocab_size, PAD in vocabulary
        self.special = sorted({*range(self.vocab_size)} - used.keys() | {*special.values()})
        self.sha256 = hashlib.sha256(self.json.replace(self._beginning(), "null").encode()).hexdigest()
        # How it reads.
        content = json_module.loads(self.json)
        unknown = content["model"].get("unk_id", content["model"].get("unk_token"))
        self.unknown = inner.token_to_id(unknown) if isinstance(unknown, str) else unknown
        reads_bytes = _reads_bytes(content)
        self._cuts_as_gpt2 = reads_bytes and _cuts_as_gpt2(content)
        self.reads_pieces = self._cuts_as_gpt2 or (reads_bytes and content["model"].get("merges") == [])
        self.is_lossless = self.reads_pieces and {*pre_tokenizers.ByteLevel.alphabet()} <= vocabulary.keys()

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process, which keeps it with the words that it remembers."""
        return _received, (self.json, self.name)

    @contextlib.contextmanager
    def _refused(self, what: str) -> Iterator[None]:
        """Turn the library's errors, a bare Exception or a panic, into DataErrors."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:
            raise DataError(what, self.name, " ".join(str(e).split())) from None

    def json_with_beginning(self) -> str | None:
        """The tokenizer.json with which other programs begin a text as training does, with the
        end-of-document token. None for a tokenizer that adds something of its own."""
        beginning = self._beginning()
        changed = re.sub(r'("post_processor":\s*)null', lambda found: found[1] + beginning, self.json)
        return changed if beginning in changed else None

    def _beginning(self) -> str:
        """The post-processor that does so."""
        token, first, second = ({kind: {"id": name, "type_id": 0}} for kind, name in (
            ("SpecialToken", END_OF_DOCUMENT), ("Sequence", "A"), ("Sequence", "B")))
        ids = {"id": END_OF_DOCUMENT, "ids": [self.end_of_document], "tokens": [END_OF_DOCUMENT]}
        template = {"type": "TemplateProcessing", "single": [token, first], "pair": [token, first, second]}
        return json_module.dumps(template | {"special_tokens": {END_OF_DOCUMENT: ids}}, separators=(",", ":"))

    def parts_of(self, pieces: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
        """The parts in which the pieces of documents are encoded: the pieces, or whole documents
        for a tokenizer that has to see them; those above `LONGEST_WHOLE` are cut at line ends."""
        if self.reads_pieces:
            yield from pieces
            return
        text = ""
        for piece, last in pieces:
            text += piece
            if not last and len(text) >= LONGEST_WHOLE and (end := text.rfind("\n") + 1):
                yield text[:end], False
                text = text[end:]
            if last:
                yield text, True
                text = ""

    def parts(self, text: str) -> Iterator[str]:
        """The parts in which a text is encoded."""
        return (part for part, _ in self.parts_of(pieces_of(text)))

    def encode_part(self, text: str) -> list[int]:
        """The ids of one of a text's `parts`. Raises DataError for what the tokenizer lacks."""
        with self._refused("the tokenizer cannot encode this text"):
            # Only the batch methods release the interpreter's lock, for threads in parallel.
            return self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without an end-of-document token. Raises as `encode_part` does."""
        return [i for part in self.parts(text) for i in self.encode_part(part)]

    @functools.cached_property
    def pack(self) -> Callable[[str], bytes]:
        """`encode_part` as bytes of `dtype`. It remembers the ids of words, with which a byte-level
        tokenizer takes a third of the time."""
        tokenizer, dtype = self, self.dtype
        if not self._cuts_as_gpt2:
            return lambda text: np.array(self.encode_part(text), dtype).tobytes()

        class Cache(dict[str, bytes]):
            def __missing__(self, word: str) -> bytes:
                with tokenizer._refused("the tokenizer cannot encode this text"):
                    ids = tokenizer._inner.encode(word, add_special_tokens=False).ids  # no other thread
                packed = np.array(ids, dtype).tobytes()
                if len(word) <= LONGEST_CACHED:
                    if len(self) >= CACHED_WORDS:
                        self.clear()
                    self[word] = packed
                return packed

        find_ids = Cache().__getitem__
        return lambda text: b"".join(map(find_ids, WORDS.findall(text)))

    def require_ordinary(self, ids: np.ndarray, where: str) -> None:
        """Raise DataError for a special token that this tokenizer has read out of text."""
        if (ids == self.end_of_document).any():
            raise DataError("the tokenizer reads its end-of-document token out of text", where)
        if self.mask is not None and ((ids == self.mask) | (ids == self.separator)).any():
            raise DataError("the tokenizer reads [MASK] or [SEP] out of text", where)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a text and the characters [start, stop) of each token, int64 [N] and [N, 2].
        Tokens of one character share its place; a word's token has the space before it."""
        ids, offsets, at = [np.empty(0, np.int64)], [np.empty((0, 2), np.int64)], 0
        for part in self.parts(text):
            with self._refused("the tokenizer cannot encode this text"):
                encoding = self._inner.encode_batch([part], add_special_tokens=False)[0]
            ids.append(np.array(encoding.ids, np.int64))
            offsets.append(np.array(encoding.offsets, np.int64).reshape(-1, 2) + at)
            at += len(part)
        return np.concatenate(ids), np.concatenate(offsets)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        return self._inner.decode(list(ids), skip_special_tokens=False)

    def stream(self, before: str = "") -> Callable[[int], str]:
        """A function that takes ids one by one and returns the text that each completes after
        `before`, whose end the decoder sees: some drop the space before the first token of all."""
        stream = decoders.DecodeStream(self.encode(before[-64:]), skip_special_tokens=False)
        return lambda token: stream.step(self._inner, token) or ""


@functools.lru_cache(1)
def _received(json: str, name: str) -> Tokenizer:
    return Tokenizer(json, name)


def _special_tokens(inner: tokenizers.Tokenizer) -> dict[str, int]:
    return {token.content: i for i, token in inner.get_added_tokens_decoder().items() if token.special}


def _reads_bytes(content: dict[str, Any]) -> bool:
    """Whether a tokenizer.json is byte-level, and changes nothing of a text before that."""
    cuts = content.get("pre_tokenizer") or {}
    return (content.get("normalizer") is None
            and cuts.get("type") == "ByteLevel" and cuts.get("add_prefix_space") is False
            and all(token["special"] for token in content.get("added_tokens", [])))


def _cuts_as_gpt2(content: dict[str, Any]) -> bool:
    """Whether a byte-level tokenizer.json is plain BPE of the parts of GPT-2's expression."""
    model, more = content["model"], ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                                     "fuse_unk", "byte_fallback")
    return (model.get("type") == "BPE" and not any(model.get(name) for name in more)
            and content["pre_tokenizer"].get("use_regex", True) is True)


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Drop what the library writes to stderr: the stack of a panic, whose error is raised too."""
    with STDERR, open(os.devnull, "wb") as nowhere:
        whole = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(whole, 2)
            os.close(whole)


def needed_tokens(mlm: bool) -> list[str]:
    """The special tokens that data needs, in the order of their ids."""
    return [END_OF_DOCUMENT, MASK, SEPARATOR] if mlm else [END_OF_DOCUMENT]


def byte_tokenizer(*, mlm: bool = False) -> Tokenizer:
    """A tokenizer of bytes: id 256 ends a document, with `mlm` 257 is "[MASK]", 258 "[SEP]"."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # of printable Latin-1, and others in place of the rest
    others = (character for character in alphabet if character > "\xff")
    vocabulary = {chr(byte) if chr(byte) in alphabet else next(others): byte for byte in range(256)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(inner.to_str(), mlm=mlm)


def _mask_token(inner: tokenizers.Tokenizer) -> AddedToken:
    """"[MASK]", with the space before it if words have theirs: "I [MASK] him" is three tokens."""
    spaced = any(len(entry) > 1 and entry[0] in "\u0120\u2581" for entry in inner.get_vocab())
    return AddedToken(MASK, lstrip=spaced, normalized=False, special=True)


def _short_words(text: str) -> list[str]:
    """Parts with words short enough to learn from; of longer ones every fourth 1,024 characters."""
    if max(map(len, text.split()), default=0) <= 1024:
        return [text]
    parts = re.split(r"(\S{1024})(?=\S)", text)
    return [part for i, part in enumerate(parts) if i % 2 == 0 or i % 8 == 1]


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, mlm: bool = False) -> Tokenizer:
    """Byte-level BPE trained on `texts`; its first ids are "<|endoftext|>" and with `mlm` "[MASK]"
    and "[SEP]". It has fewer than `vocab_size` entries if no further pair occurs twice."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, min_frequency=2, special_tokens=needed_tokens(mlm),
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    inner.train_from_iterator((part for text in texts for part in _short_words(text)), trainer)
    if mlm:
        inner.add_special_tokens([_mask_token(inner)])
    return Tokenizer(inner.to_str())


def named_tokenizer(name: str, *, mlm: bool = False) -> Tokenizer:
    """The tokenizer that `prepare --tokenizer` names, see `PrepareSettings`. Raises as
    `load_tokenizer`, `auto_tokenizer` and `folders.weights_folder` do."""
    if name == "bytes":
        return byte_tokenizer(mlm=mlm)
    path = copied(name, (".json",), TOKENIZER_FILE) if is_address(name) else Path(name)
    files = (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, *VOCABULARY_FILES)
    if name in shipped_models() or (path.is_dir() and not any((path / each).is_file() for each in files)):
        path = weights_folder(name)
    if path.is_dir() and is_saved_elsewhere(path):
        return auto_tokenizer(path, mlm=mlm)
    return load_tokenizer(path / TOKENIZER_FILE if path.is_dir() else path, mlm=mlm)


def load_tokenizer(path: Path, *, mlm: bool = False) -> Tokenizer:
    """The tokenizer of any tokenizer.json, see `Tokenizer`. Raises UsageError for a file that
    cannot be read, DataError for a file that is not a tokenizer."""
    with (raised_as(UsageError, "cannot read the tokenizer", path, OSError),
          raised_as(DataError, "not a tokenizer.json", path, UnicodeDecodeError, todo="it is not valid UTF-8")):
        json = read_bytes(path).decode()
    return Tokenizer(as_saved(json, path.parent), str(path), mlm=mlm)


def as_saved(json: str, folder: Path) -> str:
    """The tokenizer.json of a folder. Special tokens that a user has added under transformers
    become ordinary ones, which `hf.LineartimeTokenizer` reads from text. Raises DataError."""
    saved = saved_settings(folder)
    if saved.get("tokenizer_class") != "LineartimeTokenizer" or saved.get("split_special_tokens") is not False:
        return json
    ours = {END_OF_DOCUMENT, MASK, SEPARATOR, PAD, str(saved.get("pad_token"))}
    try:
        content = json_module.loads(json)
        for token in content["added_tokens"]:
            token["special"] = token["special"] and token["content"] in ours
    except (ValueError, LookupError, TypeError, RecursionError):
        return json  # of which `Tokenizer` says what is wrong
    return json_module.dumps(content, ensure_ascii=False, separators=(",", ":"))


def saved_settings(folder: Path) -> dict[str, Any]:
    """A folder's tokenizer_config.json; empty without one. Raises DataError for damage."""
    path = folder / TOKENIZER_CONFIG_FILE
    with raised_as(DataError, "not a tokenizer_config.json", path, OSError, ValueError, TypeError, RecursionError):
        return dict(json_module.loads(read_bytes(path))) if path.exists() else {}


def is_saved_elsewhere(folder: Path) -> bool:
    """Whether a folder has a tokenizer of `transformers` that is not ours, or its vocabulary."""
    if saved := saved_settings(folder):
        return saved.get("tokenizer_class") != "LineartimeTokenizer"
    return not (folder / TOKENIZER_FILE).is_file() and any((folder / name).is_file() for name in VOCABULARY_FILES)


def auto_tokenizer(folder: Path, *, mlm: bool = False) -> Tokenizer:
    """The tokenizer that `transformers.AutoTokenizer` opens from a folder, with what
    tokenizer_config.json changes; a vocabulary without tokenizer.json is converted. Raises
    UsageError if there is none, and if it does more than its tokenizer.json says."""
    from transformers import AutoTokenizer

    try:
        saved = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as e:  # it raises whatever its many readers raise
        raise UsageError("transformers cannot open this tokenizer", folder, " ".join(str(e).split())[:300]) from None
    inner, where = getattr(saved, "backend_tokenizer", None), f"{folder}: {type(saved).__name__}"
    if not isinstance(inner, tokenizers.Tokenizer):
        raise UsageError("this tokenizer cannot be a tokenizer.json", where, "take another")
    json, file = inner.to_str(), folder / TOKENIZER_FILE
    is_kept = file.is_file() and as_the_library_writes(file.read_text("utf-8")) == as_the_library_writes(json)
    made = load_tokenizer(file, mlm=mlm) if is_kept else Tokenizer(json, str(folder), mlm=mlm)
    for text in (*PROBES, "".join(saved.all_special_tokens)):
        ids = made.encode(text)  # first: the other one raises a bare Exception for what it has no token for
        theirs = saved(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        require(ids == theirs, "this tokenizer does more than its tokenizer.json says",
                where, f"it reads {text!r} otherwise; name a tokenizer.json file in place of the folder")
    return made


def same_tokens(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers give the same tokens, however their files were written."""
    return one.sha256 == other.sha256 or as_the_library_writes(one.json) == as_the_library_writes(other.json)


def as_the_library_writes(json: str) -> dict[str, Any]:
    """The content of a tokenizer.json, however it was written, without what `Tokenizer` ignores."""
    content = json_module.loads(tokenizers.Tokenizer.from_str(json).to_str())
    return {name: value for name, value in content.items() if name not in ("truncation", "padding", "post_processor")}
