"""`lineartime evaluate`: a split of prepared text, by context, or questions."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lineartime.cli.arguments import (
    Device,
    Evidence,
    MaxAnswerTokens,
    QuestionFiles,
    ShippedModel,
    Strict,
    Stride,
    pick_device,
    whole_numbers,
)
from lineartime.cli.terminal import Terminal, say, summary
from lineartime.data.pretrained import model_folder, named_folder
from lineartime.distributed.ranks import connected, launched
from lineartime.errors import ResourceError, UsageError
from lineartime.settings import require_precision


def evaluate(
    run: Annotated[str | None, typer.Argument(
        help="A run, one of its checkpoints, an exported folder, or a shipped model: small.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder made by `lineartime prepare`.")] = None,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "validation",
    context: Annotated[int | None, typer.Option(help="Tokens in a row; by default as in training.")] = None,
    contexts: Annotated[str | None, typer.Option(
        help="Score the same tokens at each of these contexts, with commas: does the model use its context?")] = None,
    document_tokens: Annotated[int | None, typer.Option(
        help="With --contexts: only the first so many tokens of each document, at least the longest context.")] = None,
    out: Annotated[Path | None, typer.Option(
        help="With --contexts: JSON file, which `lineartime plot` draws.")] = None,
    batch_rows: Annotated[int | None, typer.Option(
        help="Rows scored at once; changes nothing but speed and memory. By default 8, fewer from 16K on.")] = None,
    precision: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    questions: QuestionFiles = None,
    evidence: Evidence = None,
    stride: Stride = None,
    max_answer_tokens: MaxAnswerTokens = 30,
    predictions: Annotated[Path | None, typer.Option(help="File for the answers, {question id: answer}.")] = None,
    score: Annotated[Path | None, typer.Option(help="Score this file of answers; no run is needed.")] = None,
    shipped: ShippedModel = None,
    strict: Strict = False,
    device: Device = None,
) -> None:
    """Score a split: every token exactly once, or the masked tokens of a model that is not causal.
    With --questions: exact match and F1 of a fine-tuned model's answers."""
    for option, value in (("batch_rows", batch_rows), ("context", context),
                          ("document_tokens", document_tokens), ("max_answer_tokens", max_answer_tokens)):
        if value is not None and value < 1:
            raise UsageError("wrong value", f"{option} = {value}", "it takes whole numbers from 1")
    if contexts is None and out is not None:
        raise UsageError("nothing is written without --contexts", out, "--json prints the scores")
    if contexts is not None and (questions or context is not None or batch_rows is not None):
        raise UsageError("options that do not go together", "evaluate --contexts",
                         "leave out --questions, --context and --batch-rows")
    if document_tokens is not None and contexts is None:
        raise UsageError("options that do not go together", "evaluate", "--document-tokens goes with --contexts")
    for path in (out, predictions):
        if path is not None and not path.parent.is_dir():
            raise ResourceError("cannot write", path, "there is no such folder")
    lengths = whole_numbers(contexts) if contexts is not None else []
    if shipped is not None and run is not None:
        raise UsageError("two models are given", f"{run} and --model {shipped}", "leave one out")
    folder = named_folder(run) if run is not None else model_folder(shipped) if shipped is not None else None
    require_precision(precision)
    if questions:
        if data is not None or (folder is None) == (score is None) or (score is not None and predictions is not None):
            raise UsageError("--questions scores either a run or a file of answers", "evaluate",
                             "give RUN, or --score FILE; leave out --data")
        if score is not None and (context is not None or stride is not None or batch_rows is not None):
            raise UsageError("options that do not go together", "evaluate --score",
                             "leave out --context, --stride and --batch-rows: no model reads")
        options = {"context": context, "stride": stride, "max_answer_tokens": max_answer_tokens,
                   "batch_rows": batch_rows or 8, "precision": precision}
        evaluate_questions(folder, questions, evidence, options, predictions, score, as_json, strict, device)
    elif any(option is not None for option in (score, predictions, evidence, stride)):
        raise UsageError("options that do not go together", "evaluate",
                         "--score, --predictions, --evidence and --stride are for --questions")
    elif folder is None or data is None:
        raise UsageError("evaluate needs a run and prepared text", "evaluate",
                         "give RUN --data DATA, or for a fine-tuned run --questions FILE")
    elif lengths:
        evaluate_contexts(folder, data, split, lengths, document_tokens, precision, out, as_json, strict, device)
    else:
        evaluate_text(folder, data, split, context, batch_rows, precision, as_json, strict, device)


def evaluate_text(run: Path, data: Path, split: str, context: int | None, batch_rows: int | None, precision: str,
                  as_json: bool, strict: bool, device: str | None) -> None:
    """Score a split and print the scores."""
    from lineartime.evaluation import evaluate, load_with_split

    model, stream, facts = load_with_split(run, data, split, strict=strict)
    picked = pick_device(device)
    with connected(picked.type) as ranks, Terminal() as terminal:
        result = evaluate(model.to(picked), stream, context=context, batch_rows=batch_rows, precision=precision,
                          ranks=ranks, progress=terminal.counting("evaluating", stream.n_tokens))
    if as_json:
        print(json.dumps({**facts, "split": split, "context": context or model.config.context, **result.to_dict()}))
        return
    say(summary(split, result.to_dict(), stream.task))
    unit = "nats per token" if result.n_read is None else "nats per masked token"
    for first, last, loss in result.loss_by_position:
        say(f"         position {first:>6} to {last:>6}  {loss:.4f} {unit}")


def evaluate_contexts(run: Path, data: Path, split: str, contexts: list[int], document_tokens: int | None,
                      precision: str, out: Path | None, as_json: bool, strict: bool, device: str | None) -> None:
    """Score the same tokens at several contexts and print the losses."""
    from lineartime.context_use import describe, measure_context_use
    from lineartime.evaluation import load_with_split

    model, stream, facts = load_with_split(run, data, split, strict=strict)
    picked = pick_device(device)
    with connected(picked.type) as ranks, Terminal() as terminal:
        use = measure_context_use(model.to(picked), stream, contexts, document_tokens=document_tokens,
                                  precision=precision, ranks=ranks,
                                  progress=terminal.counting("tokens read"))
    scores = {**facts, "split": split, "trained_context": model.config.context, **use.to_dict()}
    show_or_print(scores, describe(use), out, as_json)
    if out is not None and not as_json:
        say(f"next     lineartime plot LABEL={out} --out {out.with_suffix('.png')}")


def show_or_print(scores: dict[str, Any], lines: list[str], out: Path | None, as_json: bool) -> None:
    """Write scores into the file if there is one, and print them as JSON or for a person."""
    from lineartime.atomic_io import write_atomically

    text = json.dumps(scores)
    if out is not None and launched().is_first:
        write_atomically(out, text + "\n")
    for line in [text] if as_json else lines:
        say(line)


def evaluate_questions(run: Path | None, questions: list[Path], evidence: Path | None, options: dict[str, Any],
                       predictions: Path | None, scored: Path | None, as_json: bool, strict: bool,
                       device: str | None) -> None:
    """Score the answers of a fine-tuned run, or of a file, by the official rules, and print the scores."""
    from lineartime.atomic_io import write_json
    from lineartime.qa.metrics import check_predictions, score_answers
    from lineartime.qa.questions import read_json, read_questions

    if launched().size > 1:
        raise UsageError("questions are answered in one process", "evaluate --questions", "leave out torchrun")
    asked = list(read_questions(questions, evidence))
    if predictions is None and not any(question.accepted for question in asked):
        raise UsageError("no question has an answer to compare with", ", ".join(map(str, questions)),
                         "--predictions FILE writes answers without scoring them")
    if scored is not None:
        result = score_answers(asked, check_predictions(read_json(scored), str(scored)))
    else:
        from lineartime.load import load_span_model
        from lineartime.qa.spans import evaluate_questions

        assert run is not None
        model, tokenizer, facts = load_span_model(run, strict=strict)
        with Terminal() as terminal:
            scores, answers = evaluate_questions(model.to(pick_device(device)), tokenizer, asked, **options,
                                                 progress=terminal.counting("answering", len(asked)))
        result = facts | scores
        if predictions is not None:
            write_json(predictions, answers, ascii_only=False)
    if as_json:
        print(json.dumps(result))
        return
    if "f1" in result:
        overlap, without = result["word_overlap"], result["questions_without_document"]
        say(f"EM {result['exact_match']:.2f}, F1 {result['f1']:.2f} over {result['n_questions']:,} questions"
            + (f", {result['n_missing']:,} of them without a prediction" if result["n_missing"] else "")
            + (f"; {without:,} have no document" if without else ""))
        say(f"EM {overlap['exact_match']:.2f}, F1 {overlap['f1']:.2f} by word overlap, without a model")
    if predictions is not None:
        say(f"answers  {predictions}")
