"""The report of a fine-tuning on labels: `report.md`, its pictures, and `predictions.jsonl`, a line a document."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lineartime.atomic_io import read_json_lines, write_atomically
from lineartime.config_json import Head
from lineartime.documents import metrics
from lineartime.documents.classify import NUMBER, ONE, label_json, label_losses, prediction_of, targets_of
from lineartime.documents.labelled import Documents
from lineartime.documents.tuning import of_scores
from lineartime.errors import CheckpointError, escaped
from lineartime.markdown import code_span, in_markdown
from lineartime.plot import COLOURS, LACKING, Line, Panel, Picture, draw, drawable

REPORT_FILE, PREDICTIONS_FILE = "report.md", "predictions.jsonl"
CONFUSION_FILE, CALIBRATION_FILE, NUMBERS_FILE = "confusion.png", "calibration.png", "numbers.png"
PICTURES = (CONFUSION_FILE, CALIBRATION_FILE, NUMBERS_FILE)
MOST_WRONG = 10
MOST_CLASSES = 20
"""Classes that a confusion picture has room for: the most frequent."""


def losses_of(head: Head, documents: Documents, logits_NL: np.ndarray) -> np.ndarray:
    """The loss of each document, of several classes their sum."""
    targets = torch.from_numpy(targets_of(head, documents.labels))
    return label_losses(head, torch.from_numpy(logits_NL), targets).reshape(len(documents), -1).sum(1).numpy()


def write_predictions(out: Path, head: Head, documents: Documents, logits_NL: np.ndarray) -> None:
    """Write what the model says of each document, in order: its place, its label, the predicted label, the loss and the
    logits."""
    lines = []
    for i, loss in enumerate(losses_of(head, documents, logits_NL).tolist()):
        row = {"where": documents.where[i], "label": documents.labels[i],
               "predicted": prediction_of(head, logits_NL[i]).label, "loss": loss, "logits": logits_NL[i].tolist()}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_atomically(out / PREDICTIONS_FILE, "".join(lines))


def read_predictions(run: Path, documents: Documents, head: Head) -> np.ndarray:
    """The logits that `write_predictions` wrote, float64 `[N, L]`. Raises CheckpointError if they are not those of the
    documents."""
    rows = read_json_lines(run / PREDICTIONS_FILE, lambda row: [float(logit) for logit in row["logits"]],
                           "a line of predictions")
    logits_NL = np.array(rows) if len({len(row) for row in rows}) == 1 else np.empty((0, 0))
    if logits_NL.shape != (len(documents), len(head.labels)):
        raise CheckpointError("damaged", run / PREDICTIONS_FILE, f"delete {run} and run the same command again")
    return logits_NL


def words(scores: dict[str, Any]) -> str:
    """The most important scores, in words."""
    if "r2" in scores:
        return f"R^2 {written(scores, 'r2', '.3f')}, mean absolute error {scores['mean_absolute_error']:.3g}"
    return f"accuracy {scores['accuracy']:.3f}, macro F1 {scores['macro_f1']:.3f}"


def written(scores: dict[str, Any], name: str, form: str = ".4g") -> str:
    """A score as it is written; one document has no R^2."""
    return "-" if name == "r2" and scores["n_documents"] < 2 else f"{scores[name]:{form}}"


def write_report(out: Path, head: Head, documents: Documents, logits_NL: np.ndarray, result: dict[str, Any]) -> None:
    """Write the report and its pictures into a folder of `lineartime finetune`. documents: those that the logits are
    of. result: "best", "learning_rates", "without_reading" and perhaps "test"."""
    targets = targets_of(head, documents.labels)
    scores = metrics.score_labels(head, logits_NL, targets)
    names = [name for name in scores if name not in ("score", "n_documents")]
    tested = "test" in result
    lines = ["# Labels of documents", "",
             f"{words(scores)} on {len(documents):,} {'test' if tested else 'validation'} documents. "
             f"{of_scores(result)}", "",
             "## Learning rates", "", "On the validation documents, at the best step of each run.", "",
             *table(["learning rate", "step", *map(spaced, names)],
                    [[f"{name} (best)" if result["best"] == f"lr-{name}" else name, f"{each['best_step']:,} of "
                      f"{each['steps']:,}", *(written(each["held_out"], score) for score in names)]
                     for name, each in result["learning_rates"].items()]
                    + [["without reading", "", *(written(result["without_reading"], score) for score in names)]]), "",
             f"Without reading: {'the mean' if head.problem_type == NUMBER else 'what is most frequent'} in training "
             "is said of every document.", ""]
    if tested:
        lines += ["## Test", "", *table(list(map(spaced, names)), [[written(scores, name) for name in names]]), ""]
    lines += of_numbers(out, targets, logits_NL) if head.problem_type == NUMBER else (
        of_classes(out, head, targets, logits_NL))
    lines += most_wrong(head, documents, logits_NL)
    write_atomically(out / REPORT_FILE, "\n".join(lines) + "\n")


def spaced(name: str) -> str:
    return name.replace("_", " ")


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(map(in_markdown, line)) + " |" for line in lines]


def of_classes(out: Path, head: Head, targets: np.ndarray, logits_NL: np.ndarray) -> list[str]:
    """The lines about each class, and the pictures of confusion and calibration."""
    rows = metrics.by_class(head, logits_NL, targets)
    several = [] if head.problem_type == ONE else ["Accuracy: the share of documents with all classes right.", ""]
    lines = ["## Classes", "", *several, *table(["class", "precision", "recall", "F1", "documents"], [
        [name, f"{p:.3f}", f"{r:.3f}", f"{f:.3f}", f"{n:,}"] for name, p, r, f, n in rows]), ""]
    n_L = np.array([n for *_, n in rows])
    shown = np.sort(np.argsort(-n_L, kind="stable")[:MOST_CLASSES])
    cut = [in_picture(head.labels[i]) for i in shown]
    share_LL = (metrics.confusion(head, logits_NL, targets) / n_L[:, None].clip(min=1))[np.ix_(shown, shown)]
    draw(Picture("Share of each class's documents (rows) by what the model calls them (columns)", (
        Panel("confusion", "the model says", "", heat=tuple(
            (name, tuple(row)) for name, row in zip(cut, share_LL.tolist(), strict=True)),
            heat_columns=tuple(cut)),)), out / CONFUSION_FILE)
    of_row = "in shares of a row" if head.problem_type == ONE else (
        "in shares of the documents that have the label; one that has two is in both rows")
    more = f" The {MOST_CLASSES} most frequent of {len(head.labels)} classes." if len(cut) < len(rows) else ""
    lacks = f" {LACKING}: a character that the picture's font lacks." if any(LACKING in name for name in cut) else ""
    lines += [f"![confusion]({CONFUSION_FILE})", "",
              f"Rows are the labels, columns what the model says, {of_row}.{more}{lacks}", ""]
    p, right = metrics.confidences(head, logits_NL, targets)
    bins = metrics.bins_of(p, right)
    draw(Picture("How often the model is right, by how sure it is; the dashed line is what it should be", (Panel(
        "calibration", "probability, by the model", "share that is right", (
            Line("the model", tuple((x, y) for x, y, _ in bins), {"color": COLOURS[0]}),
            Line("what it should be", ((0.0, 0.0), (1.0, 1.0)),
                 {"color": COLOURS[-1], "marker": "", "linestyle": "--"}))),)), out / CALIBRATION_FILE)
    what = "the class that it names" if head.problem_type == ONE else "each class's being there"
    return [*lines, f"![calibration]({CALIBRATION_FILE})", "",
            f"The probability of {what}, in bins of a tenth; they differ by {metrics.calibration_error(p, right):.3f} "
            "on average (the expected calibration error).", ""]


def in_picture(name: str) -> str:
    """A class's name as matplotlib writes it: on one line, not too long, without formulas, in characters that it has.
    """
    name = " ".join(name.split())
    return drawable(name if len(name) <= 24 else f"{name[:23]}…").replace("$", r"\$")


def of_numbers(out: Path, targets: np.ndarray, logits_NL: np.ndarray) -> list[str]:
    """The lines about numbers, and their picture."""
    low, high = float(min(targets.min(), logits_NL.min())), float(max(targets.max(), logits_NL.max()))
    draw(Picture("What the model says over the label; the dashed line is where they agree", (
        Panel("numbers", "label", "the model says", (
            Line("documents", tuple(zip(targets.tolist(), logits_NL[:, 0].tolist(), strict=True)),
                 {"color": COLOURS[0], "linestyle": ""}),
            Line("agreement", ((low, low), (high, high)),
                 {"color": COLOURS[-1], "marker": "", "linestyle": "--"}))),)), out / NUMBERS_FILE)
    return ["## Numbers", "", f"![numbers]({NUMBERS_FILE})", ""]


def most_wrong(head: Head, documents: Documents, logits_NL: np.ndarray) -> list[str]:
    """The lines about the documents of the highest loss."""
    losses_N = losses_of(head, documents, logits_NL)
    lines = ["## Most wrong", "", f"The {min(MOST_WRONG, len(documents))} documents of the highest loss.", ""]
    for i in np.argsort(-losses_N, kind="stable")[:MOST_WRONG]:
        said = label_json(prediction_of(head, logits_NL[i]).label)
        lines += [f"- {code_span(documents.where[i])}: label {in_markdown(label_json(documents.labels[i]))}, the model "
                  f"says {in_markdown(said)}, loss {losses_N[i]:.3f}", "",
                  f"      {escaped(documents.excerpts[i])}", ""]
    return lines
