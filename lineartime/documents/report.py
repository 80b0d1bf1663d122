"""The report of a fine-tuning on documents: `report.md`, of labels with pictures and with `predictions.jsonl`, a line
for each document."""

import importlib
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lineartime.atomic_io import read_json_lines, replaced, write_atomically
from lineartime.config_json import Head
from lineartime.documents import metrics
from lineartime.documents.classify import NUMBER, ONE, label_json, label_losses, prediction_of, targets_of
from lineartime.documents.texts import BEFORE, TokenizedTexts
from lineartime.errors import CheckpointError, escaped
from lineartime.markdown import code_span, in_markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REPORT_FILE, PREDICTIONS_FILE = "report.md", "predictions.jsonl"
CONFUSION_FILE, CALIBRATION_FILE, NUMBERS_FILE = "confusion.png", "calibration.png", "numbers.png"
PICTURES = (CONFUSION_FILE, CALIBRATION_FILE, NUMBERS_FILE)
MOST_WRONG = 10
MOST_CLASSES = 20
"""Classes that a confusion picture has room for: the most frequent."""


def losses_of(head: Head, texts: TokenizedTexts, logits_NL: np.ndarray) -> np.ndarray:
    """The loss of each document, of several classes their sum."""
    targets = torch.from_numpy(targets_of(head, texts.labels))
    return label_losses(head, torch.from_numpy(logits_NL), targets).reshape(len(texts), -1).sum(1).numpy()


def write_predictions(out: Path, head: Head, texts: TokenizedTexts, logits_NL: np.ndarray) -> None:
    """Write what the model says of each document, in order: its place, its label, the predicted label, the loss and the
    logits."""
    lines = []
    for i, loss in enumerate(losses_of(head, texts, logits_NL).tolist()):
        row = {"where": texts.where[i], "label": texts.labels[i],
               "predicted": prediction_of(head, logits_NL[i]).label, "loss": loss, "logits": logits_NL[i].tolist()}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_atomically(out / PREDICTIONS_FILE, "".join(lines))


def read_predictions(run: Path, texts: TokenizedTexts, head: Head) -> np.ndarray:
    """The logits that `write_predictions` wrote, float64 `[N, L]`. Raises CheckpointError if they are not those of the
    documents."""
    rows = read_json_lines(run / PREDICTIONS_FILE, lambda row: [float(logit) for logit in row["logits"]],
                           "a line of predictions")
    logits_NL = np.array(rows) if len({len(row) for row in rows}) == 1 else np.empty((0, 0))
    if logits_NL.shape != (len(texts), len(head.labels)):
        raise CheckpointError("damaged", run / PREDICTIONS_FILE, f"delete {run} and run the same command again")
    return logits_NL


def write_labels_report(out: Path, head: Head, texts: TokenizedTexts, logits_NL: np.ndarray,
                        result: dict[str, Any]) -> None:
    """Write the report and its pictures into a folder of `lineartime finetune`. texts: those that the logits are of.
    result: "best", "learning_rates", "without_reading", "known" and perhaps "test"."""
    targets = targets_of(head, texts.labels)
    scores = metrics.score_labels(head, logits_NL, targets)
    names = [name for name in scores if name not in ("score", "n_documents")]
    lines = opening("Labels of documents", f"{metrics.in_words(scores)} on", len(texts), "documents", result)
    lines += [*rates_table(result, names, "documents", ["without reading", "", *row_of(result["without_reading"],
                                                                                        names)]),
              f"Without reading: {'the mean' if head.problem_type == NUMBER else 'what is most frequent'} in training "
              "is said of every document.", ""]
    if "test" in result:
        lines += ["## Test", "", *table(list(map(spaced, names)), [row_of(scores, names)]), ""]
    if head.problem_type == NUMBER:
        draw_numbers(out / NUMBERS_FILE, targets, logits_NL[:, 0])
        lines += ["## Numbers", "", f"![numbers]({NUMBERS_FILE})", ""]
    else:
        lines += class_lines(out, head, targets, logits_NL)
    losses_N = losses_of(head, texts, logits_NL)
    worst = np.argsort(-losses_N, kind="stable")[:MOST_WRONG]
    said = {i: in_markdown(label_json(prediction_of(head, logits_NL[i]).label)) for i in worst}
    lines += most_wrong(f"The {len(worst)} documents of the highest loss.", texts, {
        i: f"label {in_markdown(label_json(texts.labels[i]))}, the model says {said[i]}, loss {losses_N[i]:.3f}"
        for i in worst})
    write_atomically(out / REPORT_FILE, "\n".join(lines) + "\n")


def write_vectors_report(out: Path, texts: TokenizedTexts, words: str, scores: dict[str, Any], places: Sequence[int],
                         result: dict[str, Any]) -> None:
    """Write the report of vectors. words: the scores in words. places: the rank of each pair's second text."""
    names = ["loss", "mrr", "recall_at_1", "recall_at_10"]
    worst = np.argsort(-np.array(places), kind="stable")[:MOST_WRONG]
    lines = [*opening("Vectors of documents", f"{words}, of", len(texts), "pairs", result),
             "The partner of each text is looked for among as many others.", "",
             *table(["", *map(spaced, names)], [["fine-tuned", *row_of(scores, names)],
                                                ["before", *row_of(result["without_training"], names)]]), "",
             *rates_table(result, names, "pairs"),
             *most_wrong("The pairs whose second text is found last.", texts,
                         {i: f"found at place {places[i]:,}" for i in worst})]
    write_atomically(out / REPORT_FILE, "\n".join(lines) + "\n")


def opening(title: str, words: str, n: int, what: str, result: dict[str, Any]) -> list[str]:
    """The first lines of a report: the scores, and how fair they are. what: "documents" or "pairs"."""
    split = "test" if "test" in result else "validation"
    n_known = result["known"][split]
    also = f"{n_known:,} of them are also in {BEFORE[split]}"
    if split == "test":
        fair = f"{also}, so the scores are too good." if n_known else "No choice was made on these."
    else:
        fair = ("The learning rate and the step were chosen on these, so the scores are somewhat too good; `--test` "
                "names documents for a fair score." + (f" {also}." if n_known else ""))
    return [f"# {title}", "", f"{words} {n:,} {split} {what}. {fair}", ""]


def rates_table(result: dict[str, Any], names: list[str], what: str, *more: list[str]) -> list[str]:
    """The scores of each learning rate, then further rows."""
    rows = [[f"{name} (best)" if result["best"] == f"lr-{name}" else name,
             f"{each['best_step']:,} of {each['steps']:,}", *row_of(each["held_out"], names)]
            for name, each in result["learning_rates"].items()]
    return ["## Learning rates", "", f"On the validation {what}, at the best step of each run.", "",
            *table(["learning rate", "step", *map(spaced, names)], [*rows, *more]), ""]


def most_wrong(words: str, texts: TokenizedTexts, said: dict[int, str]) -> list[str]:
    """What a model is most wrong about. said: a remark on each of these documents."""
    lines = ["## Most wrong", "", words, ""]
    for i, remark in said.items():
        lines += [f"- {code_span(texts.where[i])}: {remark}", "", f"      {escaped(texts.excerpts[i])}", ""]
    return lines


def row_of(scores: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Scores as they are written; one document has no R^2."""
    return ["-" if name == "r2" and scores["n_documents"] < 2 else f"{scores[name]:.4g}" for name in names]


def spaced(name: str) -> str:
    return name.replace("_", " ")


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(map(in_markdown, line)) + " |" for line in lines]


def class_lines(out: Path, head: Head, targets: np.ndarray, logits_NL: np.ndarray) -> list[str]:
    """The lines about each class, and the pictures of confusion and calibration."""
    rows = metrics.by_class(head, logits_NL, targets)
    n_L = np.array([n for *_, n in rows])
    shown = np.sort(np.argsort(-n_L, kind="stable")[:MOST_CLASSES])
    share_LL = metrics.confusion(head, logits_NL, targets) / n_L[:, None].clip(min=1)
    draw_confusion(out / CONFUSION_FILE, [head.labels[i] for i in shown], share_LL[np.ix_(shown, shown)])
    p_N, right_N = metrics.confidences(head, logits_NL, targets)
    draw_calibration(out / CALIBRATION_FILE, p_N, right_N)
    is_one = head.problem_type == ONE
    of_row = "in shares of a row" if is_one else (
        "in shares of the documents that have the label; one that has two is in both rows")
    more = f" The {MOST_CLASSES} most frequent of {len(rows)} classes." if len(shown) < len(rows) else ""
    return ["## Classes", "", *([] if is_one else ["Accuracy: the share of documents with all classes right.", ""]),
            *table(["class", "precision", "recall", "F1", "documents"],
                   [[name, f"{p:.3f}", f"{r:.3f}", f"{f:.3f}", f"{n:,}"] for name, p, r, f, n in rows]), "",
            f"![confusion]({CONFUSION_FILE})", "", f"Rows are the labels, columns what the model says, {of_row}.{more}",
            "", f"![calibration]({CALIBRATION_FILE})", "",
            f"The probability of {'the class that it names' if is_one else 'that each class is there'}, in bins of a "
            f"tenth, and how often that is right; they differ by {metrics.calibration_error(p_N, right_N):.3f} on "
            "average (the expected calibration error).", ""]


def draw(path: Path, size: float, paint: Callable[["Axes"], object]) -> None:
    """Write a picture as PNG, whole or not at all. Raises ResourceError."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings(), replaced(path) as file:
        warnings.simplefilter("ignore")  # a box is drawn for a character that the font lacks
        figure = Figure(figsize=(size, size), layout="constrained")
        paint(figure.subplots())
        figure.savefig(file, format="png", dpi=150)


def draw_confusion(path: Path, names: list[str], share_LL: np.ndarray) -> None:
    short = [name if len(name) <= 24 else f"{name[:23]}…" for name in (" ".join(each.split()) for each in names)]
    shown = metrics.scikit().ConfusionMatrixDisplay(share_LL, display_labels=short)
    draw(path, 4 + 0.4 * len(names), lambda axes: shown.plot(ax=axes, values_format=".2f", xticks_rotation="vertical"))


def draw_calibration(path: Path, p_N: np.ndarray, right_N: np.ndarray) -> None:
    display = importlib.import_module("sklearn.calibration").CalibrationDisplay

    def paint(axes: "Axes") -> None:
        display.from_predictions(right_N, p_N, n_bins=metrics.N_BINS, ax=axes, name="the model")
        axes.set(xlabel="probability, by the model", ylabel="share that is right")

    draw(path, 6, paint)


def draw_numbers(path: Path, targets_N: np.ndarray, found_N: np.ndarray) -> None:
    shown = metrics.scikit().PredictionErrorDisplay(y_true=targets_N, y_pred=found_N)
    draw(path, 6, lambda axes: shown.plot(ax=axes, kind="actual_vs_predicted"))
