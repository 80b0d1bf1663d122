"""Answers as spans of tokens: windows over documents, the loss, and the best span of all windows.

A window is `[CLS] question [SEP] part of a document [SEP]`. [CLS] is the end-of-document token,
which begins every text in training. Every token has two logits: one for the answer's first token,
one for its last. In a window without an answer both targets are [CLS]."""

import collections
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime.base.settings import PRECISIONS, require, require_counts, require_name
from lineartime.config import check_bounds
from lineartime.data.tokenizer import Tokenizer
from lineartime.model.language_model import SpanModel
from lineartime.ops.dtypes import at_least_float32
from lineartime.tasks.pooling import padded_rows
from lineartime.tasks.qa.questions import Question, occurrences, score_answers, words_of

SMALLEST_CONTEXT = 16
TOKEN, CANDIDATE, START, END = 1, 2, 4, 8
"""Bits of a place: no padding; [CLS] or a document's token; the answer's first token; its last."""


@dataclass(frozen=True)
class WindowConfig:
    """How documents are cut into windows. Raises UsageError for wrong values.

    stride: tokens from the start of a window to the next; None: three quarters of the context. It
    is shortened until windows overlap by `max_answer_tokens`, or by half of their room if that is
    less, so that every answer of that length is whole in some window."""

    context: int  # most tokens in a window
    stride: int | None = None
    max_answer_tokens: int = 30  # most tokens in a predicted answer

    def __post_init__(self) -> None:
        require(self.context >= SMALLEST_CONTEXT, "context is too short for a question and a document",
                f"context = {self.context}", f"it takes {SMALLEST_CONTEXT} or more")
        check_bounds(self)

    def cut(self, n_question: int, n_document: int) -> list[tuple[int, int]]:
        """The parts [first, stop) of a document's tokens, in order, with every token in one."""
        room = self.context - n_question - 3  # [CLS], and [SEP] twice
        overlap = min(self.max_answer_tokens, room // 2)
        stride = max(min(self.stride or 3 * self.context // 4, room - overlap), 1)
        firsts = [at for at in range(0, n_document, stride) if at == 0 or at - stride + room < n_document]
        return [(first, min(first + room, n_document)) for first in firsts]


@dataclass(frozen=True)
class Passage:
    """A tokenised document."""

    text: str
    ids: np.ndarray  # int64 [N]
    offsets: np.ndarray  # characters [start, stop) of each token, int64 [N, 2]

    def tokens(self, start: int, stop: int) -> tuple[int, int]:
        """The first and the last token that overlap the characters [start, stop)."""
        first = int(np.searchsorted(self.offsets[:, 1], start, side="right"))
        last = int(np.searchsorted(self.offsets[:, 0], stop, side="left")) - 1
        return first, last

    def characters(self, first: int, last: int) -> tuple[int, int]:
        """The characters of the tokens first to last, without white space around them."""
        start, stop = int(self.offsets[first, 0]), int(self.offsets[last, 1])
        text = self.text[start:stop]
        return start + len(text) - len(text.lstrip()), stop - len(text) + len(text.rstrip())


class Window(NamedTuple):
    """One row for the model. From place `offset` on it holds a document's tokens [first, stop)."""

    ids: np.ndarray  # int64 [T]
    roles: np.ndarray  # uint8 [T], bits of TOKEN, CANDIDATE, START and END
    document: int  # its number among the question's
    passage: Passage  # the whole document
    first: int
    offset: int
    stop: int
    answered: bool


def question_windows(tokenizer: Tokenizer, question: Question, windows: WindowConfig) -> Iterator[Window]:
    """All windows of a question, in the order of its documents. The question is cut to a quarter of
    the context. An answer counts only if the window holds all of it. Every place that
    `occurrences` finds is an answer, widened to whole tokens."""
    separator = tokenizer.separator
    assert separator is not None, "the tokenizer has no [SEP]"
    asked = tokenizer.encode(question.text)[: windows.context // 4]
    head = np.array([tokenizer.end_of_document, *asked, separator], np.int64)
    for number, document in enumerate(question.documents):
        text = document.text()
        passage = Passage(text, *tokenizer.encode_with_offsets(text))
        found = occurrences(words_of(text), question.answers) if question.answers else []
        spans = np.array([passage.tokens(*characters) for characters in found], np.int64).reshape(-1, 2)
        spans = spans[spans[:, 0] <= spans[:, 1]]  # not where the tokenizer drops every character
        for first, stop in windows.cut(len(asked), len(passage.ids)):
            ids = np.concatenate([head, passage.ids[first:stop], [separator]])
            # An answer may be [CLS] (there is none) or lie in the document, never in the question.
            roles = np.full(len(ids), TOKEN, np.uint8)
            roles[0] |= CANDIDATE
            roles[len(head) : -1] |= CANDIDATE
            # The targets are all answers that are whole in this window, or [CLS].
            inside = spans[(spans[:, 0] >= first) & (spans[:, 1] < stop)] - first + len(head)
            answered = len(inside) > 0
            if not answered:
                inside = np.zeros((1, 2), np.int64)
            roles[inside[:, 0]] |= START
            roles[inside[:, 1]] |= END
            yield Window(ids, roles, number, passage, first, len(head), stop, answered)


COUNTS = ("questions", "unlabelled", "without_document", "answer_not_found", "windows", "windows_with_answer")


@dataclass
class TrainingWindows:
    """The training windows, in the order of the questions. counts, by `COUNTS`: those without an
    answer or without text are left out; "answer_not_found" is one that no window holds whole."""

    ids: list[np.ndarray] = field(default_factory=list)
    roles: list[np.ndarray] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))

    def __len__(self) -> int:
        return len(self.ids)

    def sha256(self) -> str:
        """The hash of all ids and roles."""
        digest = hashlib.sha256()
        for ids, roles in zip(self.ids, self.roles, strict=True):
            digest.update(len(ids).to_bytes(8, "little") + ids.astype("<u4").tobytes() + roles.tobytes())
        return digest.hexdigest()


def training_windows(tokenizer: Tokenizer, questions: Iterable[Question], windows: WindowConfig, negatives: float,
                     seed: int, progress: Callable[[int], None] | None = None) -> TrainingWindows:
    """The windows to train on: all with an answer, and the share `negatives` of the others, drawn
    by (seed, question id, document, place). progress gets the number of questions read."""
    rows = TrainingWindows()
    counts = rows.counts
    for question in questions:
        counts["questions"] += 1
        if progress is not None:
            progress(counts["questions"])
        if not question.answers:
            counts["unlabelled"] += 1
            continue
        found, n_windows = False, 0
        for window in question_windows(tokenizer, question, windows):
            n_windows += 1
            found = found or window.answered
            # A hash in place of a generator: whether a window is taken depends on no other window.
            key = f"{seed}/{question.id}/{window.document}/{window.first}".encode()
            drawn = int.from_bytes(hashlib.sha256(key).digest()[:8], "little") / 2**64
            if window.answered or drawn < negatives:
                rows.ids.append(window.ids.astype(tokenizer.dtype))
                rows.roles.append(window.roles)
                counts["windows_with_answer"] += window.answered
        counts["without_document"] += n_windows == 0
        counts["answer_not_found"] += n_windows > 0 and not found
    counts["windows"] = len(rows)
    return rows


def span_logits(model: nn.Module, ids_BT: Tensor, roles_BT: Tensor) -> Tensor:
    """logits_BT2, float32 at least, -inf where no answer may begin or end; without padding."""
    longest = int((roles_BT > 0).sum(1).max())  # padding is at the end of a row
    ids_BT, roles_BT = ids_BT[:, :longest], roles_BT[:, :longest]
    logits_BT2 = at_least_float32(model(ids_BT, token_mask_BT=roles_BT > 0))
    return logits_BT2.masked_fill((roles_BT & CANDIDATE == 0)[..., None], -torch.inf)


def span_losses(logits_BT2: Tensor, roles_BT: Tensor) -> Tensor:
    """-ln p of the answer's first token and of its last, in nats: `[B, 2]`.

    p is a softmax over [CLS] and the document's tokens. If the answer occurs several times, p is
    summed over its first tokens, and separately over its last (the marginal likelihood)."""
    roles_BT = roles_BT[:, : logits_BT2.shape[1]]
    targets_BT2 = torch.stack([roles_BT & START, roles_BT & END], dim=-1) > 0
    return -F.log_softmax(logits_BT2, dim=1).masked_fill(~targets_BT2, -torch.inf).logsumexp(1)


class Span(NamedTuple):
    """The characters [start, stop) of a document as an answer. score: the logits of its first and
    last token, less the window's [CLS] logits: the log odds against no answer."""

    score: float
    document: int
    start: int
    stop: int
    text: str


@dataclass
class AnswerPrediction:
    """The answer to a question, from the windows that have been scored."""

    question: Question
    span: Span | None = None  # None if all documents are white space
    loss: float = 0.0  # nats, the sum of the windows' losses; 0 without a label
    n_windows: int = 0

    @property
    def answer(self) -> str:
        return "" if self.span is None else self.span.text


@torch.inference_mode()
def predict(model: nn.Module, tokenizer: Tokenizer, questions: Iterable[Question], windows: WindowConfig, *,
            batch_rows: int = 8, precision: str = "float32",
            progress: Callable[[int], None] | None = None) -> Iterator[AnswerPrediction]:
    """The best span of each question over all its windows, in the order of the questions. Among
    equal scores the earliest document wins, then the earliest window, the earliest start, the
    shortest span. Windows are scored `batch_rows` at a time, which changes only rounding. progress
    gets the number of questions answered. The model must be in evaluation mode."""
    begun: collections.deque[AnswerPrediction] = collections.deque()

    def rows() -> Iterator[tuple[AnswerPrediction, Window]]:
        for question in questions:
            begun.append(AnswerPrediction(question))
            for window in question_windows(tokenizer, question, windows):
                yield begun[-1], window

    waiting, n_answered, device = rows(), 0, next(model.parameters()).device
    while batch := list(itertools.islice(waiting, batch_rows)):
        ids_BT, roles_BT = (torch.from_numpy(padded_rows(part, fill=0)).to(device) for part in (
            [window.ids for _, window in batch], [window.roles for _, window in batch]))
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            logits_BT2 = span_logits(model, ids_BT, roles_BT)
        losses_B = span_losses(logits_BT2, roles_BT).double().mean(1).tolist()  # of the first and the last token
        found = zip(batch, logits_BT2.double().cpu().numpy(), losses_B, strict=True)
        for (prediction, window), logits_T2, loss in found:
            span = best_span(logits_T2, window, windows.max_answer_tokens)
            if span is not None and (prediction.span is None or span.score > prediction.span.score):
                prediction.span = span
            prediction.loss += loss if prediction.question.answers else 0.0
            prediction.n_windows += 1
        finished = [begun.popleft() for _ in range(len(begun) - 1)]  # the last question may have more windows
        n_answered += len(finished)
        if progress is not None:
            progress(n_answered)
        yield from finished
    if progress is not None:
        progress(n_answered + len(begun))
    yield from begun


def answer_questions(model: nn.Module, tokenizer: Tokenizer, questions: Iterable[Question], windows: WindowConfig, *,
                     batch_rows: int = 8, precision: str = "float32", max_tokens: int | None = None,
                     progress: Callable[[int], None] | None = None) -> tuple[dict[str, str], float, int]:
    """The answers of `predict` by question id ("" without an answer), nats per window of the
    labelled questions, and the number of windows. max_tokens: stop after the question whose windows
    reach this many."""
    answers, loss, n_windows, n_labelled = dict[str, str](), 0.0, 0, 0
    for prediction in predict(model, tokenizer, questions, windows, precision=precision, batch_rows=batch_rows,
                              progress=progress):
        answers[prediction.question.id] = prediction.answer
        loss, n_windows = loss + prediction.loss, n_windows + prediction.n_windows
        n_labelled += prediction.n_windows if prediction.question.answers else 0
        if max_tokens is not None and n_windows * windows.context >= max_tokens:
            break
    return answers, loss / max(n_labelled, 1), n_windows


def evaluate_questions(model: SpanModel, tokenizer: Tokenizer, questions: Sequence[Question], *,
                       context: int | None = None, stride: int | None = None, max_answer_tokens: int = 30,
                       batch_rows: int = 8, precision: str = "float32",
                       progress: Callable[[int], None] | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """The scores of a fine-tuned model in evaluation mode, by the official rules of TriviaQA, and
    its answers by question id.

    context: tokens in a window, by default as in training; stride and max_answer_tokens as in
    `WindowConfig`; batch_rows and progress as in `predict`. precision: "float32" or "bfloat16". The
    scores are "context", "windows", "loss" (nats per labelled window), "questions",
    "questions_without_document" and, if any question has an accepted answer, what `score_answers`
    gives. Raises UsageError for wrong values, DataError for documents that cannot be read."""
    require_name("precision", precision, PRECISIONS)
    require_counts(batch_rows=batch_rows)
    windows = WindowConfig(model.config.context if context is None else context, stride, max_answer_tokens)
    model.check_length(windows.context)
    answers, loss, n_windows = answer_questions(model, tokenizer, questions, windows, batch_rows=batch_rows,
                                                precision=precision, progress=progress)
    scores = score_answers(questions, answers) if any(question.accepted for question in questions) else {}
    return {"context": windows.context, "windows": n_windows, "loss": loss, "questions": len(questions),
            "questions_without_document": sum(not each.documents for each in questions), **scores}, answers


def best_span(logits_T2: np.ndarray, window: Window, max_tokens: int) -> Span | None:
    """The best span of at most `max_tokens` tokens in one window; None for a window of white space.
    It neither begins nor ends with a token that is white space. For equal scores see `predict`."""
    n, passage = window.stop - window.first, window.passage
    is_blank_N = np.array([not passage.text[a:b].strip() for a, b in passage.offsets[window.first : window.stop]], bool)
    logits_N2 = np.where(is_blank_N[:, None], -np.inf, logits_T2[window.offset : window.offset + n])
    if not np.isfinite(logits_N2).any():
        return None
    width = min(max_tokens, n)
    # table[i, k] scores the tokens i to i + k as a span; argmax takes the first of equal ones.
    ends = np.concatenate([logits_N2[:, 1], np.full(width - 1, -np.inf)])
    table = logits_N2[:, :1] + np.lib.stride_tricks.sliding_window_view(ends, width)
    first, more = divmod(int(table.argmax()), width)
    start, stop = passage.characters(window.first + first, window.first + first + more)
    return Span(float(table[first, more] - logits_T2[0].sum()), window.document, start, stop, passage.text[start:stop])
