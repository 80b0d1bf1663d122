"""`lineartime finetune` and `lineartime answer`: questions over long documents."""

import json
from pathlib import Path
from typing import Annotated

import typer

from lineartime.cli.arguments import (
    Device,
    Evidence,
    MaxAnswerTokens,
    QuestionFiles,
    RankTimeout,
    Setting,
    Strict,
    Stride,
    complete_from,
    numbers,
    pick_device,
)
from lineartime.cli.documents import MaxTokens, PairField, TextField, finetune_on_documents
from lineartime.cli.generate import read_prompts
from lineartime.cli.terminal import Terminal, interrupted_at_once, results_are_files, say, say_stopping
from lineartime.data.pretrained import named_folder
from lineartime.distributed.ranks import TIMEOUT_S
from lineartime.errors import UsageError
from lineartime.run_config import parse_setting
from lineartime.settings import require_name

FOR_QUESTIONS = ("questions", "evidence", "negatives", "stride", "max_answer_tokens")
FOR_LABELS = ("labels", "label_field", "balance")
FOR_DOCUMENTS = ("documents", "test", "text_field", "pair_field", "patience", "max_tokens")
TASKS = {"questions": (*FOR_LABELS, *FOR_DOCUMENTS), "classify": FOR_QUESTIONS, "embed": (*FOR_QUESTIONS, *FOR_LABELS)}
"""What can be fine-tuned on, and the arguments of `finetune` that it does not take."""


def finetune(
    asked: typer.Context,
    run: Annotated[str, typer.Argument(
        help="A run of masked language modelling, or one of its checkpoints; for other tasks than questions any model, "
             "`small` included.")],
    task: Annotated[str, typer.Option(help=f"{', '.join(TASKS)}.", autocompletion=complete_from(TASKS))] = "questions",
    questions: QuestionFiles = None,
    documents: Annotated[list[str] | None, typer.Option(
        help="classify: labelled documents; embed: any (.csv, .jsonl, .parquet, a folder of folders by label, "
             "hub:NAME/SPLIT); may be given again.")] = None,
    validation: Annotated[list[str] | None, typer.Option(
        help="Questions or documents that the learning rate is chosen on; may be given again.")] = None,
    test: Annotated[list[str] | None, typer.Option(
        help="classify, embed: documents that the best model is scored on; may be given again.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs; unfinished runs there are continued.")] = None,
    evidence: Evidence = None,
    learning_rates: Annotated[str | None, typer.Option(
        help="One run each, with commas; by default 1e-4,7e-5,5e-5, for other tasks than questions 1e-3,3e-4,1e-4.")
        ] = None,
    context: Annotated[int | None, typer.Option(
        help="Tokens in a window; by default 4096, for other tasks than questions as in pretraining.")] = None,
    epochs: Annotated[float, typer.Option(help="How often each window, or document, is read.")] = 5,
    labels: Annotated[str, typer.Option(
        help="classify: one label a document, several (a list, or text with `;`), or a number.")] = "one",
    text_field: TextField = "text",
    pair_field: PairField = None,
    label_field: Annotated[str, typer.Option(help="classify: field or column of the label.")] = "label",
    balance: Annotated[bool, typer.Option("--balance", help="classify: every class counts the same.")] = False,
    patience: Annotated[int, typer.Option(
        help="classify, embed: end a run after so many scorings without a better score or a lower loss.")] = 3,
    max_tokens: MaxTokens = None,
    negatives: Annotated[float, typer.Option(
        help="Share of the windows without an answer that is trained on.")] = 0.25,
    stride: Stride = None,
    max_answer_tokens: MaxAnswerTokens = 30,
    settings: Setting = None,
    strict: Strict = False,
    device: Device = None,
    rank_timeout: RankTimeout = TIMEOUT_S,
) -> None:
    """Teach a model a task, once per learning rate; keep the best.
    questions: a masked model finds answers in documents. classify: any model labels documents of any length.
    embed: it gives them vectors that are near for the two texts of a pair.
    To teach a causal model more text: `lineartime train --from RUN`."""
    results_are_files()
    require_name("task", task, TASKS)
    given = dict(parse_setting(text) for text in settings or [])
    rates = None if learning_rates is None else numbers(learning_rates)
    for name in TASKS[task]:
        if getattr(asked.get_parameter_source(name), "name", "") == "COMMANDLINE":
            raise UsageError("this option is for another task", f"--{name.replace('_', '-')}",
                             f"leave it out with --task {task}")
    folder = named_folder(run)
    if task != "questions":
        finetune_on_documents(folder, task, documents, validation, test, out, rates, given, rank_timeout, device, {
            "labels": labels, "fields": (text_field, pair_field, label_field), "context": context, "epochs": epochs,
            "balance": balance, "patience": patience, "max_tokens": max_tokens, "strict": strict})
        return
    if not questions or not validation or out is None:
        raise UsageError("options are missing", "finetune", "it takes --questions, --validation and --out")
    with interrupted_at_once():
        from lineartime.finetuning import LEARNING_RATES
        from lineartime.qa.finetune import CONTEXT, FineTuning, finetune
        from lineartime.training import StopSignal

    plan = FineTuning(folder, tuple(questions), tuple(map(Path, validation)), out, evidence, rates or LEARNING_RATES,
                      CONTEXT if context is None else context, stride, max_answer_tokens, negatives, epochs, given,
                      strict)
    with StopSignal().listening(say_stopping) as stop, Terminal() as terminal:
        result = finetune(plan, device=device, stop=stop, on_step=terminal.step, progress=terminal.count,
                          rank_timeout=rank_timeout)
    if "already" in result:
        say(f"complete: {out} was fine-tuned with these settings; nothing to do.")
    best, overlap = result["best"], result["word_overlap"]
    say("")
    for name, scores in result["learning_rates"].items():
        say(f"lr {name:<9} EM {scores['exact_match']:6.2f}  F1 {scores['f1']:6.2f}"
            + ("  <- best" if best == f"lr-{name}" else ""))
    say(f"word overlap EM {overlap['exact_match']:6.2f}  F1 {overlap['f1']:6.2f}  "
        f"({overlap['n_questions']:,} validation questions)")
    say(f"\nweights  {out / best / 'latest'}  (open with lineartime.load_model or transformers)")
    say(f"answers  {out / 'predictions.json'}")
    say(f"metrics  {out / best / 'metrics.jsonl'}, {out / 'result.json'}")
    say(f"next     lineartime answer {out} --question \"Who wrote it?\" --document FILE")


def answer(
    run: Annotated[str, typer.Argument(help="A run of `lineartime finetune`, or one of its checkpoints.")],
    question: Annotated[str, typer.Option(help="The question.")] = "",
    document: Annotated[list[str] | None, typer.Option(
        help="Text file in which the answer is searched, `-` for stdin; may be given again.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens in a window; by default as in training.")] = None,
    stride: Stride = None,
    max_answer_tokens: MaxAnswerTokens = 30,
    batch_rows: Annotated[int, typer.Option(help="Windows read at once; changes nothing but speed and memory.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    strict: Strict = False,
    device: Device = None,
) -> None:
    """Answer one question from documents of any length."""
    if not question.strip() or not document:
        raise UsageError("options are missing", "answer", 'it takes --question "..." and --document FILE')
    if batch_rows < 1 or document.count("-") > 1:
        raise UsageError("wrong value", f"batch_rows = {batch_rows}, document = {', '.join(document)}",
                         "batch_rows takes whole numbers from 1, and stdin is read once")
    folder = named_folder(run)
    from lineartime.data.read_text import check_text
    from lineartime.errors import DataError
    from lineartime.qa.questions import Document, Question, read_utf8

    check_text(question, "the question", "--question")
    documents = tuple(Document("stdin", read_prompts(["-"], [])[0]) if name == "-" else
                      Document(name, read_utf8(Path(name))) for name in document)
    if not any(each.text().strip() for each in documents):
        raise DataError("nothing but white space", ", ".join(document))
    from lineartime.load import load_span_model
    from lineartime.qa.spans import Windows, predict

    model, tokenizer, facts = load_span_model(folder, strict=strict)
    windows = Windows(model.config.context if context is None else context, stride, max_answer_tokens)
    model.check_length(windows.context)
    with Terminal() as terminal:
        asked = [Question("", question, documents, (), ())]
        (found,) = predict(model.to(pick_device(device)), tokenizer, asked, windows, batch_rows=batch_rows,
                           progress=terminal.counting("windows read"))
    span = found.span
    if span is None:
        raise DataError("the tokenizer finds nothing in the document", ", ".join(document))
    text = documents[span.document].text()
    around = [" ".join(part.split()) for part in (text[max(span.start - 120, 0) : span.start],
                                                  text[span.stop : span.stop + 120])]
    if as_json:
        print(json.dumps({**facts, "answer": span.text, "score": span.score, "document": documents[span.document].name,
                          "start": span.start, "stop": span.stop, "before": around[0], "after": around[1],
                          "windows": found.n_windows}))
        return
    say(f"answer   {' '.join(span.text.split())}")
    say(f"score    {span.score:.2f}  (below 0 the model holds it likelier that the answer is not there)")
    say(f"where    characters {span.start:,} to {span.stop:,} of {documents[span.document].name} "
        f"({found.n_windows:,} windows read)")
    say(f"         ... {around[0]} [{' '.join(span.text.split())}] {around[1]} ...")
