"""The report of a fine-tuning on documents."""

from pathlib import Path
from typing import Any

import numpy as np

from lineartime.atomic_io import write_atomically
from lineartime.config_json import Head
from lineartime.documents import metrics
from lineartime.documents.classify import NUMBER
from lineartime.markdown import in_markdown, markdown

REPORT_FILE = "report.md"


def write_report(out: Path, words: str, result: dict[str, Any], scores: dict[str, Any], baselines: list[str],
                 more: list[str]) -> None:
    """Write the report into a folder of `lineartime finetune`.

    words: the scores in words, and of what they are. result: "task", "learning_rates", "best", perhaps "test", and the
    scores of baselines under their names. scores: of the best model, on the test or else on the validation. more:
    further lines."""
    names = [name for name in scores if name not in ("score", "n_documents")]

    def row(scores: dict[str, Any]) -> list[str]:
        return [f"{scores[name]:.4g}" if name in scores else "" for name in names]

    fair = ("No choice was made on these." if "test" in result else
            "The learning rate and the step were chosen on these, so the scores are somewhat too good; `--test` names "
            "others for a fair score.")
    rates = [[f"{name} (best)" if result["best"] == f"lr-{name}" else name, f"{each['best_step']:,} of "
              f"{each['steps']:,}", *row(each["held_out"])] for name, each in result["learning_rates"].items()]
    spaced = [name.replace("_", " ") for name in names]
    title = "Labels of documents" if result["task"] == "classify" else "Vectors of documents"
    lines = [f"# {title}", "", f"{words}. {fair}", "",
             markdown(["", *spaced], [["fine-tuned", *row(scores)], *([name.replace("_", " "), *row(result[name])]
                                                                      for name in baselines)], 1), "",
             "## Learning rates", "", "On the validation, at the best step of each run.", "",
             markdown(["learning rate", "step", *spaced], rates, 2), "", *more]
    write_atomically(out / REPORT_FILE, "\n".join(lines) + "\n")


def class_lines(head: Head, targets: np.ndarray, logits_NL: np.ndarray) -> list[str]:
    """The lines of the report about each class; none for numbers."""
    if head.problem_type == NUMBER:
        return []
    *scores, n_L = metrics.scikit().precision_recall_fscore_support(
        *metrics.had_and_said(head, logits_NL, targets), labels=range(len(head.labels)), zero_division=0)
    rows = [[in_markdown(name), *(f"{score:.3f}" for score in each), f"{n:,}"]
            for name, n, *each in zip(head.labels, n_L, *scores, strict=True)]
    return ["## Classes", "", markdown(["class", "precision", "recall", "F1", "documents"], rows, 1), "",
            "Accuracy is the share of documents with all classes right."]
