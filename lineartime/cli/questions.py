"""`lineartime finetune` and `lineartime answer`: questions over long documents."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

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
from lineartime.cli.documents import MaxTokens, PairField, TextField
from lineartime.cli.generate import read_prompts
from lineartime.cli.terminal import (
    Terminal,
    counted_documents,
    interrupted_at_once,
    results_are_files,
    say,
    say_stopping,
)
from lineartime.data.pretrained import named_folder
from lineartime.distributed.ranks import TIMEOUT_S, launched
from lineartime.errors import UsageError
from lineartime.finetune_config import Fields, FineTuning, Labels, TaskName
from lineartime.run_config import parse_setting
from lineartime.settings import require_name

if TYPE_CHECKING:
    from lineartime.cli.evaluate import EvaluateOptions
    from lineartime.qa.spans import AnswerPrediction

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
    for name in TASKS[task]:
        if getattr(asked.get_parameter_source(name), "name", "") == "COMMANDLINE":
            raise UsageError("this option is for another task", f"--{name.replace('_', '-')}",
                             f"leave it out with --task {task}")
    data = questions if task == "questions" else documents
    if not data or not validation or out is None:
        raise UsageError("options are missing", f"--task {task}", "it takes "
                         f"--{'questions' if task == 'questions' else 'documents'}, --validation and --out")
    plan = FineTuning(
        named_folder(run), tuple(data), tuple(validation), out, cast("TaskName", task), tuple(test or ()),
        evidence, None if learning_rates is None else numbers(learning_rates), context, epochs, cast("Labels", labels),
        Fields(text_field, pair_field, label_field), balance, patience, max_tokens, negatives, stride,
        max_answer_tokens, dict(parse_setting(text) for text in settings or []), strict)
    with interrupted_at_once():
        from lineartime.finetuning import finetune
        from lineartime.training import StopSignal

    with StopSignal().listening(say_stopping) as stop, Terminal() as terminal:
        result = finetune(plan, device=device, stop=stop, on_step=terminal.step, progress=terminal.count,
                          rank_timeout=rank_timeout)
    say_fine_tuning(plan, result)


def say_fine_tuning(plan: FineTuning, result: dict[str, Any]) -> None:
    """Say the scores of each learning rate, of a baseline and of the test, and where all is."""
    from lineartime.documents import metrics, vectors
    from lineartime.qa.metrics import in_words

    out = plan.out
    if "already" in result:
        say(f"complete: {out} was fine-tuned with these settings; nothing to do.")
    words, baseline = {"questions": (in_words, "word_overlap"), "classify": (metrics.in_words, "without_reading"),
                       "embed": (vectors.in_words, "without_training")}[plan.task]
    say("")
    for name, scores in result["learning_rates"].items():
        say(f"lr {name:<9} {words(scores.get('held_out', scores))}"
            + ("  <- best" if result["best"] == f"lr-{name}" else ""))
    say(f"{baseline.replace('_', ' ')} {words(result[baseline])}")
    if "test" in result:
        say(f"test         {words(result['test'])} on {counted_documents(result['test']['n_documents'])}")
    say(f"\nweights  {out / 'best'}  (open with lineartime.load_model or transformers)")
    if plan.task == "questions":
        say(f"answers  {out / 'predictions.json'}")
        say(f"metrics  {out / result['best'] / 'metrics.jsonl'}, {out / 'result.json'}")
        say(f"next     lineartime answer {out} --question \"Who wrote it?\" --document FILE")
    else:
        say(f"report   {out / 'report.md'}")
        say(f"next     lineartime {plan.task} {out} FILES")


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
    from lineartime.qa.spans import WindowConfig, predict

    model, tokenizer, facts = load_span_model(folder, strict=strict)
    windows = WindowConfig(model.config.context if context is None else context, stride, max_answer_tokens)
    model.check_length(windows.context)
    with Terminal() as terminal:
        asked = [Question("", question, documents, (), ())]
        (found,) = predict(model.to(pick_device(device)), tokenizer, asked, windows, batch_rows=batch_rows,
                           progress=terminal.counting("windows read"))
    if found.span is None:
        raise DataError("the tokenizer finds nothing in the document", ", ".join(document))
    say_answer(found, facts if as_json else None)


def say_answer(found: "AnswerPrediction", facts: dict[str, Any] | None) -> None:
    """Say an answer and where it stands, or with `facts` print it as one JSON object beside them."""
    span = found.span
    assert span is not None
    document = found.question.documents[span.document]
    text = document.text()
    before, after = (" ".join(part.split()) for part in (text[max(span.start - 120, 0) : span.start],
                                                         text[span.stop : span.stop + 120]))
    if facts is not None:
        print(json.dumps({**facts, "answer": span.text, "score": span.score, "document": document.name,
                          "start": span.start, "stop": span.stop, "before": before, "after": after,
                          "windows": found.n_windows}))
        return
    say(f"answer   {' '.join(span.text.split())}")
    say(f"score    {span.score:.2f}  (below 0 the model holds it likelier that the answer is not there)")
    say(f"where    characters {span.start:,} to {span.stop:,} of {document.name} ({found.n_windows:,} windows read)")
    say(f"         ... {before} [{' '.join(span.text.split())}] {after} ...")


def evaluate_questions(run: Path | None, options: "EvaluateOptions") -> None:
    """Score the answers of a fine-tuned run, or of a file, by the official rules, and print the scores."""
    from lineartime.atomic_io import write_json
    from lineartime.qa.metrics import check_predictions, score_answers
    from lineartime.qa.questions import read_json, read_questions

    questions, predictions = options.questions or [], options.predictions
    if launched().size > 1:
        raise UsageError("questions are answered in one process", "evaluate --questions", "leave out torchrun")
    asked = list(read_questions(questions, options.evidence))
    if predictions is None and not any(question.accepted for question in asked):
        raise UsageError("no question has an answer to compare with", ", ".join(map(str, questions)),
                         "--predictions FILE writes answers without scoring them")
    if options.score is not None:
        result = score_answers(asked, check_predictions(read_json(options.score), str(options.score)))
    else:
        from lineartime.load import load_span_model
        from lineartime.qa.spans import evaluate_questions

        assert run is not None
        model, tokenizer, facts = load_span_model(run, strict=options.strict)
        with Terminal() as terminal:
            scores, answers = evaluate_questions(model.to(pick_device(options.device)), tokenizer, asked,
                                                 context=options.context, stride=options.stride,
                                                 max_answer_tokens=options.max_answer_tokens,
                                                 batch_rows=options.batch_rows or 8, precision=options.precision,
                                                 progress=terminal.counting("answering", len(asked)))
        result = facts | scores
        if predictions is not None:
            write_json(predictions, answers, ascii_only=False)
    if options.as_json:
        print(json.dumps(result))
        return
    say_question_scores(result)
    if predictions is not None:
        say(f"answers  {predictions}")


def say_question_scores(result: dict[str, Any]) -> None:
    """Say exact match and F1, where there are answers to compare with."""
    if "f1" not in result:
        return
    overlap, without = result["word_overlap"], result["questions_without_document"]
    say(f"EM {result['exact_match']:.2f}, F1 {result['f1']:.2f} over {result['n_questions']:,} questions"
        + (f", {result['n_missing']:,} of them without a prediction" if result["n_missing"] else "")
        + (f"; {without:,} have no document" if without else ""))
    say(f"EM {overlap['exact_match']:.2f}, F1 {overlap['f1']:.2f} by word overlap, without a model")
