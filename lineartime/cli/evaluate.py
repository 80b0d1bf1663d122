"""`lineartime evaluate`: scores of a split of prepared text or of answers to questions."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from lineartime.base.errors import UsageError
from lineartime.base.files import check_place, write_atomically, write_json
from lineartime.base.ranks import connected, launched
from lineartime.base.settings import require
from lineartime.base.stores import require_there
from lineartime.cli.options import Device, Precision
from lineartime.cli.terminal import Terminal, say, summary
from lineartime.folders import named_folder
from lineartime.tasks.qa.finetune_config import Evidence, MaxAnswerTokens, Stride

FOR_QUESTIONS = ("evidence", "stride", "max_answer_tokens", "predictions")
"""Options that need --questions."""


@dataclass(frozen=True)
class EvaluateOptions:
    """What `lineartime evaluate` takes. Raises UsageError for options that do not go together."""

    run: Annotated[str, "A run, one of its checkpoints, an exported folder, or the shipped model `small`.", "RUN"]
    data: Annotated[str | None, "Folder made by `lineartime prepare`, or its address."] = None
    split: Annotated[str, "Which part of the text: train, validation or test."] = "validation"
    context: Annotated[int | None, "Tokens in a row; by default as in training."] = None
    out: Annotated[Path | None, "JSON file for the scores."] = None
    batch_rows: Annotated[int | None, "Rows scored at once; changes only rounding, speed and memory. By default 8, and "
                          "fewer in rows of more than 8K tokens."] = None
    precision: Precision = "float32"
    as_json: Annotated[bool, "Print one JSON object.", "--json"] = False
    questions: Annotated[tuple[str, ...], "Score answers to these questions instead: TriviaQA's JSON or parquet, or "
                         "hub:mandarjoshi/trivia_qa:rc.wikipedia/train; may be given again."] = ()
    evidence: Evidence = None
    stride: Stride = None
    max_answer_tokens: MaxAnswerTokens = 30
    predictions: Annotated[Path | None, "With --questions: file for the answers, {question id: answer}."] = None
    device: Device = None

    def __post_init__(self) -> None:
        require(self.batch_rows is None or self.batch_rows >= 1, "wrong value", f"batch_rows = {self.batch_rows}",
                "it takes whole numbers from 1")
        for name in FOR_QUESTIONS:
            require(bool(self.questions) or getattr(self, name) == getattr(EvaluateOptions, name),
                    "options that do not go together", "evaluate", f"--{name.replace('_', '-')} goes with --questions")
        for name in ("data", "split"):
            require(not self.questions or getattr(self, name) == getattr(EvaluateOptions, name),
                    "options that do not go together", f"--questions and --{name}", "leave one out")
        require(self.out is None or self.out != self.predictions, "one file for scores and answers", str(self.out),
                "name two")
        for path in filter(None, (self.out, self.predictions)):
            check_place(path)


def evaluate(options: EvaluateOptions) -> None:
    """Score a model on prepared text, or on questions. On text every token is scored exactly once;
    of a model that is not causal, the masked tokens. On questions the answers of a fine-tuned model
    are scored by exact match and F1."""
    folder = named_folder(options.run)
    if options.questions:
        require_there(options.questions)
        evaluate_answers(folder, options)
        return
    if options.data is None:
        raise UsageError("evaluate needs prepared text", "evaluate",
                         "give --data DATA, or for a fine-tuned run --questions FILE")
    from lineartime.data.mixture import read_mixture
    from lineartime.data.tokens import read_manifest

    require(len(read_mixture(options.data)) == 1, "evaluate scores one text", options.data, "give one of its folders")
    read_manifest(options.data)  # refuses what is not prepared text, before torch is imported
    from lineartime.training.evaluation import evaluate, load_with_split
    from lineartime.training.runtime import pick_device

    model, stream, facts = load_with_split(folder, options.data, options.split)
    picked = pick_device(options.device)
    facts["split"] = options.split
    with connected(picked.type) as ranks, Terminal() as terminal:
        model.to(picked)
        result = evaluate(model, stream, context=options.context, batch_rows=options.batch_rows,
                          precision=options.precision, ranks=ranks,
                          progress=terminal.counting("evaluating", stream.n_tokens))
        facts["context"], scores = options.context or model.config.context, result.to_dict()
        unit = "nats per token" if result.n_read is None else "nats per masked token"
        lines = [summary(options.split, scores),
                 *(f"         position {first:>6} to {last:>6}  {loss:.4f} {unit}"
                   for first, last, loss in result.loss_by_position)]
    show_or_print(facts | scores, lines, options.out, options.as_json)


def show_or_print(scores: dict[str, Any], lines: list[str], out: Path | None, as_json: bool) -> None:
    """Write scores into the file if there is one, and print them as JSON or for a person."""
    text = json.dumps(scores)
    if out is not None and launched().is_first:
        write_atomically(out, text + "\n")
    for line in [text] if as_json else lines:
        say(line)


def evaluate_answers(run: Path, options: EvaluateOptions) -> None:
    """Score the answers of a fine-tuned run by the official rules, and print the scores."""
    from lineartime.tasks.qa.questions import read_questions
    from lineartime.tasks.qa.spans import evaluate_questions
    from lineartime.training.runtime import pick_device
    from lineartime.weights.load import load_span_model

    predictions = options.predictions
    require(launched().size == 1, "questions are answered in one process", "evaluate --questions", "leave out torchrun")
    asked = list(read_questions(options.questions, options.evidence))
    require(predictions is not None or any(question.accepted for question in asked),
            "no question has an answer to compare with", ", ".join(options.questions),
            "--predictions FILE writes answers without scoring them")
    model, tokenizer, facts = load_span_model(run)
    with Terminal() as terminal:
        scores, answers = evaluate_questions(
            model.to(pick_device(options.device)), tokenizer, asked, context=options.context, stride=options.stride,
            max_answer_tokens=options.max_answer_tokens, batch_rows=options.batch_rows or 8,
            precision=options.precision, progress=terminal.counting("answering", len(asked)))
    lines = []
    if "f1" in scores:
        without = scores["questions_without_document"]
        lines.append(f"EM {scores['exact_match']:.2f}, F1 {scores['f1']:.2f} over {scores['n_questions']:,} questions"
                     + (f"; {without:,} have no document" if without else ""))
    if predictions is not None:
        write_json(predictions, answers, ascii_only=False)
        lines.append(f"answers  {predictions}")
    show_or_print(facts | scores, lines, options.out, options.as_json)
