"""Answers as spans of tokens: windows over documents, what training aims at, and the best span of all windows.

A window is `[CLS] question [SEP] part of a document [SEP]`. [CLS] is the end-of-document token, which begins every text
in training, [SEP] the tokenizer's. Every token has two logits, for the first and for the last token of the answer; a
window without an answer has both at [CLS]."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime.data.tokenizer import Tokenizer
from lineartime.errors import UsageError
from lineartime.model import SpanModel
from lineartime.qa.metrics import occurrences, score_answers, words_of
from lineartime.qa.questions import Question
from lineartime.settings import require, require_precision

SMALLEST_CONTEXT = 16
TOKEN, CANDIDATE, START, END = 1, 2, 4, 8
"""Roles of a place in a row: a token and no padding; [CLS] or a token of the document; the answer's first, its last."""


@dataclass(frozen=True)
class Windows:
    """How documents are cut into windows."""

    context: int
    """Most tokens in a window."""
    stride: int | None = None
    """Tokens of the document from one window's first to the next one's; None: three quarters of the context.

    It is less where windows would overlap by less than `max_answer_tokens` (or half their room, if that is less), so
    that every answer of that length is whole in some window."""
    max_answer_tokens: int = 30
    """Longest answer of a prediction."""

    def __post_init__(self) -> None:
        require(self.context >= SMALLEST_CONTEXT, "context is too short for a question and a document",
                f"context = {self.context}", f"it takes {SMALLEST_CONTEXT} or more")
        for name in ("stride", "max_answer_tokens"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1", f"{name} = {value}")

    def question(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """A question's ids; of one that is longer than a quarter of the context, its beginning."""
        return tokenizer.encode(text)[: self.context // 4]

    def cut(self, n_question: int, n_document: int) -> list[tuple[int, int]]:
        """The parts [first, stop) of a document's tokens, in order: all tokens are in one; none for an empty one."""
        room = self.context - n_question - 3
        overlap = min(self.max_answer_tokens, room // 2)
        stride = max(min(self.stride or 3 * self.context // 4, room - overlap), 1)
        parts = []
        for first in range(0, n_document, stride):
            parts.append((first, min(first + room, n_document)))
            if first + room >= n_document:
                break
        return parts


@dataclass(frozen=True)
class Passage:
    """A document as tokens."""

    text: str
    ids: np.ndarray
    """int64 [N]"""
    offsets: np.ndarray
    """Characters [start, stop) of each token, int64 [N, 2]."""

    def tokens(self, start: int, stop: int) -> tuple[int, int]:
        """The first and the last token of the characters [start, stop), which may reach beyond them."""
        first = int(np.searchsorted(self.offsets[:, 1], start, side="right"))
        last = int(np.searchsorted(self.offsets[:, 0], stop, side="left")) - 1
        return first, last

    def characters(self, first: int, last: int) -> tuple[int, int]:
        """The characters of the tokens first to last, without white space around them."""
        start, stop = int(self.offsets[first, 0]), int(self.offsets[last, 1])
        text = self.text[start:stop]
        return start + len(text) - len(text.lstrip()), stop - len(text) + len(text.rstrip())

    def is_blank(self, first: int, stop: int) -> np.ndarray:
        """Which of the tokens [first, stop) are white space, or nothing: no answer begins or ends there."""
        return np.array([not self.text[a:b].strip() for a, b in self.offsets[first:stop]], dtype=bool)


class Window(NamedTuple):
    """One row for the model, and where its tokens come from."""

    ids: np.ndarray
    """int64 [T]"""
    roles: np.ndarray
    """uint8 [T], bits of TOKEN, CANDIDATE, START and END."""
    document: int
    """Number of the document among the question's."""
    first: int
    """The document's token that stands at `offset`, the first one in the window."""
    offset: int
    stop: int
    """Where the window's part of the document ends."""
    answered: bool

    @property
    def passage_slice(self) -> slice:
        """The places of the document's tokens in the row."""
        return slice(self.offset, self.offset + self.stop - self.first)


def separator_of(tokenizer: Tokenizer) -> int:
    """The id of [SEP]. Raises UsageError where the tokenizer has none."""
    if tokenizer.separator is None:
        raise UsageError("the run's tokenizer has no [SEP]", "questions need one",
                         "pretrain on data from `lineartime prepare --mlm`")
    return tokenizer.separator


def read_passage(tokenizer: Tokenizer, text: str) -> Passage:
    """Tokenise a document."""
    return Passage(text, *tokenizer.encode_with_offsets(text))


def find_spans(question: Question, passage: Passage) -> list[tuple[int, int]]:
    """The answer's first and last tokens, wherever it stands in a document: SQuAD's gold spans, else every occurrence
    of one of its names as `answers.occurrences` finds them, widened to whole tokens."""
    spans = question.spans
    if spans is None:
        spans = tuple(occurrences(words_of(passage.text), question.answers)) if question.answers else ()
    return [passage.tokens(start, stop) for start, stop in spans]


def windows_of(tokenizer: Tokenizer, question: Question, windows: Windows) -> Iterator[tuple[Window, Passage]]:
    """All windows of a question, in the order of its documents. An answer counts where it is whole in the window."""
    separator = separator_of(tokenizer)
    asked = windows.question(tokenizer, question.text)
    head = np.array([tokenizer.end_of_document, *asked, separator], np.int64)
    for number, document in enumerate(question.documents):
        passage = read_passage(tokenizer, document.text())
        spans = np.array(find_spans(question, passage), np.int64).reshape(-1, 2)
        for first, stop in windows.cut(len(asked), len(passage.ids)):
            ids = np.concatenate([head, passage.ids[first:stop], [separator]])
            roles = np.full(len(ids), TOKEN, np.uint8)
            roles[0] |= CANDIDATE
            roles[len(head) : -1] |= CANDIDATE
            inside = spans[(spans[:, 0] >= first) & (spans[:, 1] < stop)] - first + len(head)
            answered = len(inside) > 0
            if not answered:
                inside = np.zeros((1, 2), np.int64)
            roles[inside[:, 0]] |= START
            roles[inside[:, 1]] |= END
            yield Window(ids, roles, number, first, len(head), stop, answered), passage


@dataclass
class Counts:
    """What a set of training questions came to."""

    questions: int = 0
    unlabelled: int = 0
    """Left out: they have no answer."""
    without_document: int = 0
    """Left out: they have no document, or only empty ones."""
    answer_not_found: int = 0
    """The answer stands in none of its documents, or only where no window holds it whole."""
    windows: int = 0
    windows_with_answer: int = 0
    windows_left_out: int = 0


@dataclass
class Rows:
    """The windows that training uses, in the order of the questions."""

    ids: list[np.ndarray] = field(default_factory=list)
    roles: list[np.ndarray] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)

    def __len__(self) -> int:
        return len(self.ids)

    def sha256(self) -> str:
        """What identifies them."""
        digest = hashlib.sha256()
        for ids, roles in zip(self.ids, self.roles, strict=True):
            digest.update(len(ids).to_bytes(8, "little") + ids.astype("<u4").tobytes() + roles.tobytes())
        return digest.hexdigest()


def training_rows(tokenizer: Tokenizer, questions: Iterable[Question], windows: Windows, *, negatives: float,
                  seed: int, progress: Callable[[int], None] | None = None) -> Rows:
    """The windows to train on: all that hold an answer, and of those without one the share `negatives`.

    Which ones is a function of (seed, question id, document, place) alone. progress is called with the number of
    questions read."""
    require(0 <= negatives <= 1, "negatives is a share", f"negatives = {negatives}", "it lies between 0 and 1")
    rows = Rows()
    counts, small = rows.counts, np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    for question in questions:
        counts.questions += 1
        counts.unlabelled += not question.answers
        if progress is not None:
            progress(counts.questions)
        if not question.answers:
            continue
        found, n_windows = False, 0
        for window, _ in windows_of(tokenizer, question, windows):
            n_windows += 1
            found = found or window.answered
            key = f"{seed}/{question.id}/{window.document}/{window.first}".encode()
            drawn = int.from_bytes(hashlib.sha256(key).digest()[:8], "little") / 2**64
            if window.answered or drawn < negatives:
                rows.ids.append(window.ids.astype(small))
                rows.roles.append(window.roles)
                counts.windows_with_answer += window.answered
            else:
                counts.windows_left_out += 1
        counts.without_document += n_windows == 0
        counts.answer_not_found += n_windows > 0 and not found
    counts.windows = len(rows)
    return rows


def stack_rows(ids: Sequence[np.ndarray], roles: Sequence[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of different lengths with padding behind them: ids_BT int64 and roles_BT uint8."""
    ids_BT, roles_BT = np.zeros((len(ids), length), np.int64), np.zeros((len(ids), length), np.uint8)
    for row, (row_ids, row_roles) in enumerate(zip(ids, roles, strict=True)):
        ids_BT[row, : len(row_ids)], roles_BT[row, : len(row_roles)] = row_ids, row_roles
    return ids_BT, roles_BT


def span_logits(model: nn.Module, ids_BT: Tensor, roles_BT: Tensor) -> Tensor:
    """logits_BT2, -inf where no answer may begin or end, float32 at least; columns that are padding in every row are
    cut off first."""
    longest = int((roles_BT > 0).sum(1).max())
    ids_BT, roles_BT = ids_BT[:, :longest], roles_BT[:, :longest]
    logits_BT2 = model(ids_BT, padding_mask_BT=roles_BT > 0)
    logits_BT2 = logits_BT2 if logits_BT2.dtype == torch.float64 else logits_BT2.float()
    return logits_BT2.masked_fill((roles_BT & CANDIDATE == 0)[..., None], -torch.inf)


def span_losses(logits_BT2: Tensor, roles_BT: Tensor) -> Tensor:
    """-ln p of the answer's first token and of its last, in nats: `[B, 2]`.

    p is a softmax over [CLS] and the document's tokens; where the answer stands in several places, the sum of theirs
    (the marginal likelihood), of firsts and of lasts each by itself."""
    roles_BT = roles_BT[:, : logits_BT2.shape[1]]
    targets_BT2 = torch.stack([roles_BT & START, roles_BT & END], dim=-1) > 0
    return -F.log_softmax(logits_BT2, dim=1).masked_fill(~targets_BT2, -torch.inf).logsumexp(1)


class Span(NamedTuple):
    """A stretch of a document, and how much likelier than no answer the model holds it."""

    score: float
    """Logits of its first and its last token, less the window's own [CLS] logits."""
    document: int
    start: int
    stop: int
    """Characters of the document."""
    text: str


class Prediction(NamedTuple):
    question: Question
    span: Span | None
    """None where no document holds anything but white space."""
    loss: float
    """Sum over its windows of the mean of the two losses in nats; 0 without a label."""
    n_windows: int

    @property
    def answer(self) -> str:
        return "" if self.span is None else self.span.text


@dataclass
class _Open:
    """A question whose windows have not all been scored."""

    question: Question
    best: Span | None = None
    loss: float = 0.0
    n_windows: int = 0
    n_waiting: int = 0
    all_cut: bool = False


@torch.inference_mode()
def predict(model: nn.Module, tokenizer: Tokenizer, questions: Iterable[Question], windows: Windows, *,
            batch_rows: int = 8, precision: str = "float32",
            progress: Callable[[int], None] | None = None) -> Iterator[Prediction]:
    """The best span of each question over all its windows, in the order of the questions.

    Of equal scores the earliest document counts, then the earliest window, the earliest start, the shortest. Windows
    are scored `batch_rows` at a time, which changes nothing but rounding, and are cut as they are needed. progress is
    called with the number of windows scored. The model is in evaluation mode."""
    device = next(model.parameters()).device
    opened: deque[_Open] = deque()
    waiting: list[tuple[_Open, Window, Passage]] = []
    n_scored = 0

    def score() -> None:
        nonlocal n_scored
        arrays = stack_rows([window.ids for _, window, _ in waiting], [window.roles for _, window, _ in waiting],
                            max(len(window.ids) for _, window, _ in waiting))
        ids_BT, roles_BT = (torch.from_numpy(array).to(device) for array in arrays)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            logits_BT2 = span_logits(model, ids_BT, roles_BT)
        losses_B = span_losses(logits_BT2, roles_BT).double().mean(1).tolist()
        for (entry, window, passage), logits_T2, loss in zip(waiting, logits_BT2.double().cpu().numpy(), losses_B,
                                                             strict=True):
            span = best_span(logits_T2, window, passage, windows.max_answer_tokens)
            if span is not None and (entry.best is None or span.score > entry.best.score):
                entry.best = span
            entry.loss += loss if entry.question.answers else 0.0
            entry.n_waiting -= 1
        n_scored += len(waiting)
        waiting.clear()
        if progress is not None:
            progress(n_scored)

    def finished() -> Iterator[Prediction]:
        while opened and opened[0].all_cut and not opened[0].n_waiting:
            entry = opened.popleft()
            yield Prediction(entry.question, entry.best, entry.loss, entry.n_windows)

    for question in questions:
        entry = _Open(question)
        opened.append(entry)
        for window, passage in windows_of(tokenizer, question, windows):
            entry.n_windows += 1
            entry.n_waiting += 1
            waiting.append((entry, window, passage))
            if len(waiting) == batch_rows:
                score()
        entry.all_cut = True
        yield from finished()
    if waiting:
        score()
    yield from finished()


def answer_questions(model: nn.Module, tokenizer: Tokenizer, questions: Iterable[Question], windows: Windows, *,
                     batch_rows: int = 8, precision: str = "float32", max_tokens: int | None = None,
                     progress: Callable[[int], None] | None = None) -> tuple[dict[str, str], float, int]:
    """What `predict` finds: the answers by question id ("" where there is none), nats per window of the questions that
    have a label, and the number of windows.

    max_tokens: stop after the question whose windows reach so many. progress is called with the number of questions
    answered, each time that windows were read."""
    was_training = model.training
    model.eval()
    answers: dict[str, str] = {}
    loss, n_windows, n_labelled = 0.0, 0, 0

    def read(_: int) -> None:
        if progress is not None:
            progress(len(answers))

    for prediction in predict(model, tokenizer, questions, windows, precision=precision, batch_rows=batch_rows,
                              progress=read):
        answers[prediction.question.id] = prediction.answer
        loss, n_windows = loss + prediction.loss, n_windows + prediction.n_windows
        n_labelled += prediction.n_windows if prediction.question.answers else 0
        if max_tokens is not None and n_windows * windows.context >= max_tokens:
            break
    model.train(was_training)
    return answers, loss / max(n_labelled, 1), n_windows


def evaluate_questions(model: SpanModel, tokenizer: Tokenizer, questions: Sequence[Question], *,
                       context: int | None = None, stride: int | None = None, max_answer_tokens: int = 30,
                       batch_rows: int = 8, precision: str = "float32",
                       progress: Callable[[int], None] | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """What a fine-tuned model answers, scored by the official rules and beside word overlap: the scores, and the
    answers by question id.

    context: tokens in a window, by default as in training; stride and max_answer_tokens as in `Windows`. batch_rows:
    windows read at once. precision: "float32" or "bfloat16". progress is called with the number of questions answered.
    The scores are "context", "windows", "loss" (nats per labelled window), and those of `metrics.score_answers`. Raises
    UsageError for wrong values and a context that is too long, DataError for documents that cannot be read."""
    require_precision(precision)
    windows = Windows(model.config.context if context is None else context, stride, max_answer_tokens)
    model.check_length(windows.context)
    answers, loss, n_windows = answer_questions(model, tokenizer, questions, windows, batch_rows=batch_rows,
                                                precision=precision, progress=progress)
    return {"context": windows.context, "windows": n_windows, "loss": loss} | score_answers(questions, answers), answers


def best_span(logits_T2: np.ndarray, window: Window, passage: Passage, max_tokens: int) -> Span | None:
    """The best span of at most `max_tokens` tokens in one window; None where the window is white space.

    The earliest of equals, then the shortest."""
    places = window.passage_slice
    logits_N2 = np.where(passage.is_blank(window.first, window.stop)[:, None], -np.inf, logits_T2[places])
    n = len(logits_N2)
    if n == 0 or not np.isfinite(logits_N2).any():
        return None
    width = min(max_tokens, n)
    ends = np.concatenate([logits_N2[:, 1], np.full(width - 1, -np.inf)])
    table = logits_N2[:, :1] + np.lib.stride_tricks.sliding_window_view(ends, width)
    first, more = divmod(int(table.argmax()), width)
    start, stop = passage.characters(window.first + first, window.first + first + more)
    return Span(float(table[first, more] - logits_T2[0].sum()), window.document, start, stop, passage.text[start:stop])
