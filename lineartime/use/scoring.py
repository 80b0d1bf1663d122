"""The bits of a text as it comes, by line, by token or of the whole. A model whose decoding state
has a constant size reads an endless text in constant memory.

All is one document, and every token is scored given all before it. The text is tokenised in parts,
each from the end of one line's last word to the end of the next line's, so a line is scored as soon
as its end has come. Byte-level tokenizers cut there too (`Tokenizer.reads_pieces`): they give the
whole text's tokens. White space before a line's first word is its own; a blank line has 0 bits."""

import dataclasses
import itertools
import math
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from lineartime.base.errors import CheckpointError, DataError, NumericsError
from lineartime.base.settings import PRECISIONS, require, require_name
from lineartime.base.stores import Name
from lineartime.data.read_text import LAST_WORD, cut_pieces, decode_next
from lineartime.data.tokenizer import Tokenizer
from lineartime.model.decoding.state import DecodingState, load_state
from lineartime.model.language_model import LanguageModel

SHOWN_CHARACTERS = 80  # a score has at most so many of its line
READ_TOKENS = 2048  # the model reads about so many at once, in whole chunks
LONG_LINE = 1 << 12  # characters; parts of a longer line are scored before its end comes


class Score(NamedTuple):
    """The number of a line or token, from 1, its bits and bytes, and its first characters."""

    number: int
    bits: float
    n_bytes: int
    text: str


@dataclasses.dataclass
class ScoringState:
    """How far a text is scored, and all that is needed to go on."""

    decoding: DecodingState
    last: int  # the newest token that was scored; the model reads it together with the next ones
    tail: str = ""  # the first bytes of a character whose others have not come, in hexadecimal
    text: str = ""  # text that is not scored yet: white space and a line without its end
    shown: str = ""  # how that line begins
    line_bits: float = 0.0  # what is scored of that line, if it is a long one
    line_bytes: int = 0
    n_read: int = 0  # bytes
    n_lines: int = 0  # lines, tokens, bytes and bits that are scored
    n_tokens: int = 0
    n_bytes: int = 0
    bits: float = 0.0
    crc32: int | None = 0  # of the bytes that were read; None where an older version began
    precision: str = ""
    of_model: str = ""  # the hash of the model, from the first save on: it takes seconds for a large one

    def facts(self) -> dict[str, Any]:
        """What a file has beside the decoding state."""
        return {name: value for name, value in vars(self).items() if name not in ("decoding", "of_model")}

    def save(self, path: Path) -> None:
        """Replace a file by this state, which comes from `open_state`. Raises ResourceError."""
        self.of_model = self.decoding.save(path, self.facts(), self.of_model)


def open_state(model: LanguageModel, tokenizer: Tokenizer, path: Path | None = None) -> ScoringState:
    """The state in a file, or before the first token. Raises UsageError for a model that cannot
    score a text as it comes, CheckpointError for a file that is damaged or of another model."""
    require(type(model) is LanguageModel and model.config.causal, "only a causal language model scores a text as it "
            "comes", "score", "see evaluate for masked models")
    require(tokenizer.vocab_size <= model.config.vocab_size, "this tokenizer is another model's", tokenizer.name)
    state = ScoringState(model.decoding_state(1), tokenizer.end_of_document)
    state.decoding.tokenizer_sha256 = tokenizer.sha256
    if path is None or not path.exists():
        return state
    decoding, facts = load_state(path, model, state.facts())
    if decoding.tokenizer_sha256 != tokenizer.sha256:
        raise CheckpointError("the state of another tokenizer", path, "name another file")
    return dataclasses.replace(state, decoding=decoding, **{"crc32": None} | facts)


def unread(blocks: Iterable[bytes], state: ScoringState, name: Name) -> Iterator[bytes]:
    """The blocks of a file behind what the state has read. Raises DataError for another text."""
    blocks, block, crc32, n_left = iter(blocks), b"", 0, state.n_read
    while n_left and (block := next(blocks, b"")):
        crc32, n_left, block = zlib.crc32(block[:n_left], crc32), max(n_left - len(block), 0), block[n_left:]
    if n_left or state.crc32 not in (None, crc32):
        raise DataError("the state has read another text, or more of it", name, "name another file for the state")
    state.crc32 = crc32
    return itertools.chain(filter(None, [block]), blocks)


TextPart = tuple[str, tuple[int, str] | None]
"""What is tokenised at once, and the number and beginning of the line that it ends, if any."""


def next_parts(state: ScoringState, new: str, is_end: bool) -> Iterator[TextPart]:
    """The next parts of a text, as far as they are known. Moves the state on."""
    *lines, rest = new.split("\n")
    for line, ended in [*((line, True) for line in lines), (rest, False)]:
        state.shown = (state.shown + line)[:SHOWN_CHARACTERS]
        # Where a long line is cut does not depend on the blocks in which it comes.
        *pieces, (state.text, _) = cut_pieces([state.text + line + "\n" * ended], LONG_LINE)
        yield from ((piece.text, None) for piece in pieces)
        if ended or (is_end and state.shown):
            end = len(state.text)
            if ended or state.text.isspace():  # up to its last word; in blank lines the search would be slow
                found = LAST_WORD.match(state.text) if state.shown and not state.text.isspace() else None
                end = found.end() if found else 0
            state.n_lines += 1
            yield state.text[:end], (state.n_lines, state.shown)
            state.text, state.shown = state.text[end:], ""
    if is_end:  # white space behind the last line
        yield state.text, None
        state.text = ""


@torch.inference_mode()
def next_bits(model: LanguageModel, ids_N: np.ndarray, state: ScoringState, precision: str) -> np.ndarray:
    """The bits of the next tokens, float64 `[N]`. Raises NumericsError unless they are finite."""
    device, chunk = model.embed.weight.device, model.config.chunk_size or 1
    window, bits = max(READ_TOKENS // chunk, 1) * chunk, [np.empty(0)]
    while len(ids_N):
        next_N, ids_N = np.split(ids_N, [window - state.n_tokens % window])
        read_N = np.concatenate([[state.last], next_N[:-1]])
        ids_1N, targets_N = torch.from_numpy(read_N).to(device)[None], torch.from_numpy(next_N).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            x_1ND = model.extend(ids_1N, torch.tensor([len(read_N)], device=device), state.decoding)[0]
            bits.append(model.losses(x_1ND[0], targets_N).double().cpu().numpy() / math.log(2))
        state.last, state.n_tokens = int(next_N[-1]), state.n_tokens + len(next_N)
    if not np.isfinite(np.concatenate(bits)).all():
        raise NumericsError("the bits are not finite", "score", "the weights are damaged or have diverged")
    return np.concatenate(bits)


def score(model: LanguageModel, tokenizer: Tokenizer, blocks: Iterable[str | bytes], *,
          per: Literal["line", "token", "document"] = "line", precision: str = "float32",
          state: ScoringState | None = None, keep: bool = False, name: Name = "the text") -> Iterator[Score]:
    """The scores of a text in UTF-8 that comes in blocks of any length. A block is asked for when
    the scores before it are taken. Larger blocks are faster, and change only rounding.

    per: "document" gives one score at the end. state: goes on from there, and is moved on; it may
    be saved whenever a block is asked for. keep: leave a last line without its end in the state,
    for more to come; else it is scored. Raises DataError for what is no text in UTF-8, after the
    scores before it, NumericsError for bits that are not finite, UsageError for a state that was
    made in another precision, and as `open_state` does."""
    require_name("precision", precision, PRECISIONS)
    require_name("row", per, ("line", "token", "document"))
    state = open_state(model, tokenizer) if state is None else state
    require(state.precision in ("", precision), "another precision", precision, f"the state has {state.precision}")
    state.precision = precision
    for block in itertools.chain(blocks, () if keep else (None,)):
        data = block.encode("utf-8", "surrogatepass") if isinstance(block, str) else block
        text, state.tail, error = decode_next(data, state.tail, state.n_read, name)
        state.n_read += len(data or b"")
        state.crc32 = None if state.crc32 is None else zlib.crc32(data or b"", state.crc32)
        yield from scores_of(model, tokenizer, [*next_parts(state, text, block is None)], state, per, precision)
        if error is not None:
            raise error
    if per == "document" and state.n_tokens:
        yield Score(1, state.bits, state.n_bytes, str(name))


def scores_of(model: LanguageModel, tokenizer: Tokenizer, parts: list[TextPart], state: ScoringState, per: str,
              precision: str) -> Iterator[Score]:
    """Scores of the tokens in these parts, or of the lines that end there. Moves the state on."""
    number, no_places = state.n_tokens, np.empty((0, 2), np.int64)
    encoded = [tokenizer.encode_with_offsets(text) if per == "token" else
               (np.frombuffer(tokenizer.pack(text), tokenizer.dtype), no_places) for text, _ in parts]
    bits_N = next_bits(model, np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in encoded)]), state, precision)
    for (text, line), (ids, places) in zip(parts, encoded, strict=True):
        own_N, bits_N = np.split(bits_N, [len(ids)])
        bits, n_bytes = float(own_N.sum()), len(text.encode())
        state.bits, state.n_bytes = state.bits + bits, state.n_bytes + n_bytes
        state.line_bits, state.line_bytes = state.line_bits + bits, state.line_bytes + n_bytes
        begins = [0, *places[1:, 0].tolist(), len(text)]  # a token's text goes on to where the next one begins
        for token_bits, begin, end in zip(own_N[: len(places)].tolist(), begins, begins[1:], strict=False):
            number += 1
            yield Score(number, token_bits, len(text[begin:end].encode()), text[begin:end])
        if line is not None:
            if per == "line":
                yield Score(line[0], state.line_bits, state.line_bytes, line[1].rstrip())
            state.line_bits, state.line_bytes = 0.0, 0
