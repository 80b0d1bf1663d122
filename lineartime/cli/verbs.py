"""The command line: each verb is a function. Arguments are checked before heavy modules are imported."""

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lineartime.atomic_io import MAX_BYTES, read_bytes, read_toml
from lineartime.cli import benchmark as cli_speed
from lineartime.cli import describe
from lineartime.cli import recall as cli_recall
from lineartime.cli import report as cli_report
from lineartime.cli import reproduce as cli_reproduce
from lineartime.cli.arguments import (
    Device,
    Setting,
    ShippedModel,
    Strict,
    Task,
    complete_from,
    numbers,
    pick_device,
    whole_numbers,
)
from lineartime.cli.examples import add_examples
from lineartime.cli.outlook import Pace, say_plan, sized_config
from lineartime.cli.terminal import (
    Terminal,
    TextStreamer,
    prompt_progress,
    results_are_files,
    say,
    say_stopping,
    screens,
    shown_log,
    summary,
)
from lineartime.cli.tracking import TRACKERS, require_tracker, tracked
from lineartime.config import PRESETS, SIZES, TASKS, model_config, parse_setting, run_config
from lineartime.distributed.ranks import TIMEOUT_S, WITH_RANKS, connected, launched, speaks_first
from lineartime.errors import CheckpointError, DataError, LineartimeError, ResourceError, Stopped, UsageError
from lineartime.release.pretrained import model_folder
from lineartime.settings import require_precision

if TYPE_CHECKING:
    from lineartime.data.tokens import Manifest
    from lineartime.training import TrainResult

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
                  help="Train, evaluate and run FLASH and the models of 'Transformer Quality in Linear Time'.")
app.add_typer(cli_speed.benchmark, name="benchmark")
app.command("recall")(cli_recall.recall)
app.command("reproduce")(cli_reproduce.reproduce)
app.command("report")(cli_report.report)
app.command("models")(describe.models)
app.command("config")(describe.config)

QuestionFiles = Annotated[list[Path] | None, typer.Option(
    help="Questions: SQuAD or TriviaQA JSON, TriviaQA parquet, or hub:rc.wikipedia/train; may be given again.")]
Evidence = Annotated[Path | None, typer.Option(
    help="Folder with wikipedia/ and web/ of TriviaQA; by default ../evidence beside the questions' folder.")]
Stride = Annotated[int | None, typer.Option(
    help="Tokens from one window of a document to the next; by default three quarters of the context.")]
RankTimeout = Annotated[float, typer.Option(
    help="Under torchrun: seconds after which a process that does not answer is lost.")]
MaxAnswerTokens = Annotated[int, typer.Option(help="Longest answer.")]


def say_version(asked: bool) -> None:
    """Print the version and exit."""
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            say(f"lineartime {version('lineartime')}")
        except PackageNotFoundError:
            say("lineartime, not installed")
        raise typer.Exit


@app.callback()
def options(context: typer.Context,
            debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")] = False,
            version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True,
                                                  callback=say_version)] = False) -> None:
    """The options before the verb."""
    if launched().size > 1 and context.invoked_subcommand not in (*WITH_RANKS, "benchmark"):
        raise UsageError("this verb runs in one process", context.invoked_subcommand, "leave out torchrun")


@app.command()
def prepare(
    given: typer.Context,
    inputs: Annotated[list[Path] | None, typer.Argument(
        help="Text: .txt, .md, .txt.gz, .jsonl(.gz), .json.gz, .parquet, folders of them, or `-`, one document on "
             "stdin.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the prepared tokens.")] = ...,  # type: ignore[assignment]
    sample: Annotated[bool, typer.Option("--sample", help="Prepare the book that ships with the package.")] = False,
    tokenizer: Annotated[str, typer.Option(
        help="train, bytes, the path of a tokenizer.json, or what has one: a run, an export, small.")] = "train",
    add_tokens: Annotated[Path | None, typer.Option(
        help="Further tokens for this tokenizer, one in each line of a file.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Size of a trained tokenizer's vocabulary.")] = 32_000,
    held_out: Annotated[float | None, typer.Option(
        help="Fraction of the text, at least, that is kept for validation: whole documents at equal distances, or the "
             "end of a single one.")] = None,
    validation: Annotated[list[Path] | None, typer.Option(help="Text for validation.")] = None,
    test: Annotated[list[Path] | None, typer.Option(help="Text for test.")] = None,
    text_field: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    task: Annotated[str | None, typer.Option(help="Read the text as c4, wiki40b or pg19.")] = None,
    hub: Annotated[bool, typer.Option("--hub", help="Read the task's data set from the hub, with `datasets`.")] = False,
    documents: Annotated[int | None, typer.Option(help="With --hub: number of documents of each split.")] = None,
    mlm: Annotated[bool, typer.Option("--mlm", help="For masked language modelling: add [MASK] and [SEP].")] = False,
    jobs: Annotated[int | None, typer.Option(help="Processes that tokenise; by default one per core.")] = None,
    part: Annotated[str | None, typer.Option(
        metavar="K/N", help="Prepare share K of N of the files, on one of N machines; needs --tokenizer.")] = None,
    joined: Annotated[bool, typer.Option(
        "--join", help="The inputs are the folders of all parts: check and join them.")] = False,
) -> None:
    """Tokenise text once into shards that training reads. The same command goes on where it was cut off.

    On N machines: the same command with --part 1/N, --part 2/N, ... and --tokenizer FILE on each; then on one,
    `lineartime prepare --join PART1 PART2 ... --out DATA`, which makes what one machine would have made."""
    results_are_files()
    if joined:
        more = [name.replace("_", "-") for name in given.params if name not in ("inputs", "out", "joined")
                and getattr(given.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"]
        if more:
            raise UsageError("--join takes the folders of the parts and --out", f"--{', --'.join(more)}",
                             "leave it out: the parts know it")
    from lineartime.data.prepare import join, prepare

    with Terminal(stay=True) as terminal, saved_stdin(inputs or [], out) as inputs:
        if joined:
            manifest = join(inputs, out, progress=terminal.count)
            say_prepared(manifest, out)
            return
        manifest = prepare(inputs, out, sample=sample, tokenizer=tokenizer, add_tokens=add_tokens,
                           vocab_size=vocab_size,
                           held_out=held_out, validation=validation or [], test=test or [], field=text_field, task=task,
                           hub=hub, documents=documents, mlm=mlm, jobs=jobs, part=part, progress=terminal.count)
    say_prepared(manifest, out, part)


@contextmanager
def saved_stdin(inputs: list[Path], out: Path) -> Iterator[list[Path]]:
    """The inputs, with a file beside `out` in the place of `-`: text is read several times. It goes with the block."""
    if Path("-") not in inputs:
        yield inputs
        return
    if inputs.count(Path("-")) > 1:
        raise UsageError("stdin is read once", "-", "name it once")
    parent = Path(os.path.realpath(out)).parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".lineartime-stdin-", dir=parent) as folder:
        path = Path(folder) / "stdin.txt"
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield [path if each == Path("-") else each for each in inputs]


def say_counts(manifest: "Manifest") -> None:
    """Print a line of counts for each split of prepared text."""
    for name, split in manifest.splits.items():
        say(f"{name:<11} {split.documents:>7,} documents  {split.tokens:>12,} tokens  "
            f"{split.words:>12,} words  {split.bytes:>13,} bytes")


def say_prepared(manifest: "Manifest", out: Path, part: str | None = None) -> None:
    """Print the counts and notes of prepared text, and what comes next."""
    if manifest.already_prepared:
        say(f"already prepared: {out} holds this text with these settings; nothing to do.")
        return
    say_counts(manifest)
    for line in manifest.notes:
        say(f"note: {line}")
    if part is not None:
        say("next        lineartime prepare --join PART1 PART2 ... --out DATA, when all parts are there")
        return
    if "validation" not in manifest.splits:
        say(f"note: {out} has nothing held out, which training needs: prepare with --held-out 0.05 or --validation")
        return
    task, mlm = manifest.settings.get("task"), manifest.settings.get("mlm")
    named = task or ("c4" if mlm else None)
    how = (f"--task {named} " if named else "") + ("--set causal=false " if mlm and named != "c4" else "")
    say(f"next        lineartime train flash {how}--data {out} --out RUN")


@app.command()
def train(
    model: Annotated[str | None, typer.Argument(
        help=f"A model ({', '.join(PRESETS)}) or a TOML file of settings.",
        autocompletion=complete_from(PRESETS))] = None,
    data: Annotated[str | None, typer.Option(
        help="Folder made by `lineartime prepare`, or several with their shares: books:0.7,wiki:0.3.")] = None,
    weights: Annotated[str | None, typer.Option(
        "--from", metavar="RUN", help="Begin with the weights of a run, a checkpoint, an exported folder, or small.")
        ] = None,
    out: Annotated[str | None, typer.Option(help="Folder for the run; an unfinished run there is continued.")] = None,
    size: Annotated[str | None, typer.Option(
        autocompletion=complete_from(SIZES), help=f"{', '.join(SIZES)}; by default what fits the machine, but paper "
        "for a file of settings and where layers or a width are set.")] = None,
    task: Annotated[str | None, typer.Option(
        autocompletion=complete_from(TASKS), help="Use the specification of c4, wiki40b or pg19.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens in a row.")] = None,
    tokens_per_step: Annotated[int | None, typer.Option(help="Tokens in a batch.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps.")] = None,
    log: Annotated[str | None, typer.Option(
        help=f"Write the metrics by a library too, in files: {', '.join(TRACKERS)}.")] = None,
    settings: Setting = None,
    device: Device = None,
    rank_timeout: RankTimeout = TIMEOUT_S,
) -> None:
    """Train a model, continue a run, or begin anew with its weights; then evaluate it, write a sample and a plot."""
    results_are_files()
    if log is not None:
        require_tracker(log)
    given: dict[str, Any] = read_toml(Path(model)) if model and model.endswith(".toml") else {}
    if model and not given:
        given["model"] = model
    for name, value in (("from", weights), ("data", data), ("out", out), ("size", size), ("task", task),
                        ("context", context),
                        ("tokens_per_step", tokens_per_step), ("steps", steps)):
        if value is not None:
            given[name] = value
    given.update(parse_setting(text) for text in settings or [])
    config, size_words = sized_config(given, is_whole=bool(model and model.endswith(".toml")), device=device)
    from lineartime.data.tokens import read_manifests
    from lineartime.training import StopSignal, train

    manifests = read_manifests(config.data)
    say_plan(config, manifests, size_words, device)
    with StopSignal().listening(say_stopping) as stop, Terminal() as terminal, (
            tracked(log, config) if log is not None and launched().is_first else nullcontext()) as track:
        def on_step(record: dict[str, Any]) -> None:
            terminal.step(record)
            if track is not None:
                track(record)

        done = train(config, device=device, stop=stop, on_step=on_step, progress=terminal.count,
                     on_micro_batch=Pace(config, manifests, terminal), rank_timeout=rank_timeout)
    if done.already:
        say(f"complete: {done.out} was trained to step {config.train.steps}; nothing to do.")
        say(f"another run: the same command with another --out, and --set seed={config.train.seed + 1} "
            "or any other setting.")
        return
    say_trained(done)


def say_trained(done: "TrainResult") -> None:
    """Print the scores, the sample and the files of a run."""
    from lineartime.data.mixture import read_mixture
    from lineartime.data.tokens import read_manifests

    config, out, scores = done.config, done.out, done.scores["held_out"]
    tasks = [manifest.settings.get("task") for manifest in read_manifests(config.data)]
    say(summary("held-out", scores, tasks[0] if len(set(tasks)) == 1 else None))
    for folder, each in done.scores.get("by_source", {}).items():
        say(f"         {folder}: {each['loss']:.3f} nats per {'masked ' * ('masked' in each)}token")
    if "xz_bits_per_byte" in done.scores:
        xz = done.scores["xz_bits_per_byte"]
        say(f"         xz -9e, which has seen the training text: {xz:.3f} bits per byte; the model is "
            f"{'better' if scores['bits_per_byte'] < xz else 'worse'}")
    if not done.sample:
        say("sample   none is written of a sharded model: see `lineartime generate`")
    elif not config.model.causal:
        say(f"sample   {out / 'sample.txt'}, with masks, with what the model puts there, and as it is:\n"
            + "".join(f"         {line[:200]}\n" for line in done.sample.splitlines()[:3]).rstrip())
    else:
        say(f"sample   {' '.join(done.sample.split())[:600]}")
    say(f"\nrun      {out}")
    say(f"weights  {out / 'latest'}  (open with lineartime.load_model or transformers)")
    say(f"plot     {out / 'loss.png'}")
    say(f"metrics  {out / 'metrics.jsonl'}, {out / 'result.json'}")
    generate = f"lineartime generate {out} \"Once more\" --temperature 0.8\n         " if config.model.causal else ""
    say(f"next     {generate}lineartime evaluate {out} --data {read_mixture(config.data)[0].folder} --split validation")


@app.command()
def evaluate(
    run: Annotated[Path | None, typer.Argument(help="A run, or one of its checkpoints.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder made by `lineartime prepare`.")] = None,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "validation",
    context: Annotated[int | None, typer.Option(help="Tokens in a row; by default as in training.")] = None,
    contexts: Annotated[str | None, typer.Option(
        help="Score the same tokens at each of these contexts, with commas: does the model use its context?")] = None,
    document_tokens: Annotated[int | None, typer.Option(
        help="With --contexts: only the first so many tokens of each document, at least the longest context.")] = None,
    recurrence: Annotated[bool, typer.Option(
        "--recurrence", help="Score by whether a token or a bigram was in its row before: what is recalled?")] = False,
    chunk: Annotated[int | None, typer.Option(
        help="With --recurrence: tokens of a chunk; by default the model's.")] = None,
    out: Annotated[Path | None, typer.Option(
        help="With --contexts or --recurrence: JSON file; `lineartime plot` draws that of --contexts.")] = None,
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
    for option, value in (("batch_rows", batch_rows), ("context", context), ("chunk", chunk),
                          ("document_tokens", document_tokens)):
        if value is not None and value < 1:
            raise UsageError("wrong value", f"{option} = {value}", "it takes whole numbers from 1")
    if contexts is None and not recurrence and out is not None:
        raise UsageError("nothing is written without --contexts or --recurrence", out, "--json prints the scores")
    if contexts is not None and (questions or context is not None or batch_rows is not None or recurrence):
        raise UsageError("too much is named", "evaluate --contexts",
                         "leave out --questions, --context, --batch-rows and --recurrence")
    if document_tokens is not None and contexts is None:
        raise UsageError("too much is named", "evaluate", "--document-tokens goes with --contexts")
    if (recurrence and questions) or (chunk is not None and not recurrence):
        raise UsageError("too much is named", "evaluate", "--chunk goes with --recurrence, and --questions does not")
    if out is not None and not out.parent.is_dir():
        raise ResourceError("cannot write", out, "there is no such folder")
    lengths = whole_numbers(contexts) if contexts is not None else []
    if shipped is not None and run is not None:
        raise UsageError("two models are named", f"{run} and --model {shipped}", "leave one out")
    if shipped is not None:
        run = model_folder(shipped)
    require_precision(precision)
    if questions:
        if data is not None or (run is None) == (score is None) or (score is not None and predictions is not None):
            raise UsageError("too much or too little is named", "evaluate --questions",
                             "name a run, or a file of answers with --score")
        options = {"context": context, "stride": stride, "max_answer_tokens": max_answer_tokens,
                   "batch_rows": batch_rows or 8, "precision": precision}
        evaluate_questions(run, questions, evidence, options, predictions, score, as_json, strict, device)
    elif run is None or data is None or score is not None or predictions is not None:
        raise UsageError("too much or too little is named", "evaluate",
                         "name a run and --data, or --questions for a fine-tuned run")
    elif lengths:
        evaluate_contexts(run, data, split, lengths, document_tokens, precision, out, as_json, strict, device)
    elif recurrence:
        options = {"chunk": chunk, "context": context, "batch_rows": batch_rows, "precision": precision}
        evaluate_recurrence(run, data, split, options, out, as_json, strict, device)
    else:
        evaluate_text(run, data, split, context, batch_rows, precision, as_json, strict, device)


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


def evaluate_recurrence(run: Path, data: Path, split: str, options: dict[str, Any], out: Path | None, as_json: bool,
                        strict: bool, device: str | None) -> None:
    """Score a split by what was in a token's row before and print the losses."""
    from lineartime.data.tokens import open_split
    from lineartime.evaluation import load_with_split
    from lineartime.recurrence import describe, measure_recurrence

    model, stream, facts = load_with_split(run, data, split, strict=strict)
    picked = pick_device(device)
    with connected(picked.type) as ranks, Terminal() as terminal:
        found = measure_recurrence(model.to(picked), stream, open_split(data, "train"), **options, ranks=ranks,
                                   progress=terminal.count)
    show_or_print({**facts, "split": split, **found.to_dict()}, describe(found), out, as_json)


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
    if scored is not None:
        result = score_answers(asked, check_predictions(read_json(scored), str(scored)))
    else:
        from lineartime.qa.spans import evaluate_questions
        from lineartime.run import load_span_model

        assert run is not None
        model, tokenizer, facts = load_span_model(run, strict=strict)
        with Terminal() as terminal:
            scores, answers = evaluate_questions(model.to(pick_device(device)), tokenizer, asked, **options,
                                                 progress=terminal.counting("answering", len(asked)))
        result = facts | scores
        if predictions is not None:
            write_json(predictions, answers, ascii_only=False)
    if "f1" not in result and predictions is None:
        raise UsageError("no question has an answer to compare with", ", ".join(map(str, questions)),
                         "--predictions FILE writes answers without scoring them")
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


@app.command()
def finetune(
    run: Annotated[Path, typer.Argument(help="A run of masked language modelling, or one of its checkpoints.")],
    questions: QuestionFiles = None,
    validation: Annotated[list[Path] | None, typer.Option(
        help="Questions that the learning rate is chosen on; may be given again.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs; unfinished runs there are continued.")] = None,
    evidence: Evidence = None,
    learning_rates: Annotated[str, typer.Option(help="One run each, with commas.")] = "1e-4,7e-5,5e-5",
    context: Annotated[int, typer.Option(help="Tokens in a window.")] = 4096,
    epochs: Annotated[float, typer.Option(help="How often each window is read.")] = 5,
    negatives: Annotated[float, typer.Option(
        help="Share of the windows without an answer that is trained on.")] = 0.25,
    stride: Stride = None,
    max_answer_tokens: MaxAnswerTokens = 30,
    settings: Setting = None,
    strict: Strict = False,
    device: Device = None,
    rank_timeout: RankTimeout = TIMEOUT_S,
) -> None:
    """Teach a masked model to find answers in documents, once per learning rate; keep the best by F1.
    To teach a causal model more text: `lineartime train --from RUN`."""
    results_are_files()
    if not questions or not validation or out is None:
        raise UsageError("too little is named", "finetune", "it takes --questions, --validation and --out")
    given = dict(parse_setting(text) for text in settings or [])
    rates = numbers(learning_rates)
    from lineartime.qa.finetune import FineTuning, finetune
    from lineartime.training import StopSignal

    plan = FineTuning(run, tuple(questions), tuple(validation), out, evidence, rates, context, stride,
                      max_answer_tokens, negatives, epochs, given, strict)
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


@app.command()
def answer(
    run: Annotated[Path, typer.Argument(help="A run of `lineartime finetune`, or one of its checkpoints.")],
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
        raise UsageError("too little is named", "answer", 'it takes --question "..." and --document FILE')
    if batch_rows < 1 or document.count("-") > 1:
        raise UsageError("wrong value", f"batch_rows = {batch_rows}, document = {', '.join(document)}",
                         "batch_rows takes whole numbers from 1, and stdin is read once")
    from lineartime.data.read_text import check_text
    from lineartime.errors import DataError
    from lineartime.qa.questions import Document, Question, read_utf8

    check_text(question, "the question", "--question")
    documents = tuple(Document("stdin", read_prompts(["-"], [])[0]) if name == "-" else
                      Document(name, read_utf8(Path(name))) for name in document)
    if not any(each.text().strip() for each in documents):
        raise DataError("nothing but white space", ", ".join(document))
    from lineartime.qa.spans import Windows, predict
    from lineartime.run import load_span_model

    model, tokenizer, facts = load_span_model(run, strict=strict)
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


@app.command()
def generate(
    arguments: Annotated[list[str] | None, typer.Argument(
        metavar="RUN|PROMPT", show_default=False,
        help="A run, one of its checkpoints or an exported folder, unless --model names a model; then prompts: `-` "
             "reads one from stdin, none begins a document.")] = None,
    shipped: ShippedModel = None,
    prompt_file: Annotated[list[Path] | None, typer.Option(help="File with a prompt; may be given again.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to add.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from the likeliest k tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(
        help="Draw from the likeliest tokens that together reach probability p.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End where this text comes; may be given again.")] = None,
    precision: Annotated[str, typer.Option(help="Type of the weights: float32, or bfloat16, which is faster.")
                         ] = "float32",
    capture: Annotated[bool, typer.Option("--capture", help="Each token is one CUDA graph.")] = False,
    strict: Strict = False,
    device: Device = None,
) -> None:
    """Continue prompts.
    One prompt streams to the terminal; several are decoded together and printed one after another."""
    if seed < 0:
        raise UsageError("seed must not be negative", f"{seed}")
    require_precision(precision)
    arguments = arguments or []
    if shipped is None and not arguments:
        raise UsageError("no model is named", "generate", "name a run, or a model that ships: --model small")
    run, prompts = (Path(arguments[0]), arguments[1:]) if shipped is None else (model_folder(shipped), arguments)
    texts = read_prompts(prompts, prompt_file or [])
    import torch

    from lineartime.generation.generate import check_sampling, generate
    from lineartime.run import load_model

    check_sampling(max_new_tokens, temperature, top_k, top_p)
    model, tokenizer, _ = load_model(run, strict=strict)
    if not model.config.causal:
        raise UsageError("only a causal model continues text", run, "this one fills in masks; open it in transformers"
                         if type(model).__name__ == "LanguageModel" else "this one answers: see `lineartime answer`")
    first = tokenizer.end_of_document
    ids = [[first, *tokenizer.encode(text)] for text in texts]
    stream = TextStreamer(tokenizer, texts, stop or [])
    with Terminal() as terminal:
        generate(model.to(pick_device(device), getattr(torch, precision)), ids, max_new_tokens=max_new_tokens,
                 temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stream.is_over, capture=capture,
                 on_prompt=prompt_progress(terminal, max(len(row) for row in ids)))
    stream.finish()


def read_prompts(prompts: list[str], files: list[Path]) -> list[str]:
    """The prompts of a command line, in order: arguments (`-` for stdin), then files; without any, one empty prompt."""
    def decode(data: bytes, name: str) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as e:
            raise UsageError("the prompt is not UTF-8", f"{name}, byte {e.start}") from None

    texts = [decode(sys.stdin.buffer.read(MAX_BYTES + 1), "stdin") if text == "-" else
             decode(os.fsencode(text), "the command line") for text in prompts]
    if any(len(text) > MAX_BYTES for text in texts):
        raise UsageError("the prompt is too long", "stdin", f"it takes {MAX_BYTES:,} bytes")
    for path in files:
        try:
            texts.append(decode(read_bytes(path), str(path)))
        except OSError as e:
            raise UsageError("cannot read the prompt", path, e.strerror) from None
    return texts or [""]


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run of `lineartime train`.")],
    out: Annotated[Path, typer.Option(help="New folder for the model.")] = ...,  # type: ignore[assignment]
    data: Annotated[Path | None, typer.Option(
        help="Folder of the prepared text that the run was trained on; by default the run's.")] = None,
    about: Annotated[Path | None, typer.Option(help="Markdown file that the model card begins with.")] = None,
    prompt: Annotated[str, typer.Option(
        help="Prompt of the card's sample; by default it begins a document.")] = "",
    strict: Strict = False,
    device: Device = None,
) -> None:
    """Export a run to a folder for sharing: weights in bfloat16, and a model card with held-out scores."""
    results_are_files()
    from lineartime.qa.questions import read_utf8
    from lineartime.release.export import export

    text = read_utf8(about) if about is not None else ""
    with Terminal() as terminal:
        made = export(run, out, data=data, about=text, prompt=prompt, device=pick_device(device),
                      strict=strict, progress=terminal.count)
    for split, evaluation in made.scores.items():
        say(summary(split, evaluation.to_dict(), made.task))
    say(f"weights  {out / 'model.safetensors'} ({made.n_bytes / 1e6:.1f} MB; open with lineartime.load_model or "
        "transformers)")
    say(f"card     {out / 'README.md'}")


@app.command()
def info(
    model: Annotated[str, typer.Argument(
        metavar="MODEL|DATA", help=f"A model: {', '.join(PRESETS)}. Or a folder made by `lineartime prepare`.",
        autocompletion=complete_from(PRESETS))],
    task: Task = "wiki40b",
    settings: Setting = None,
    verify: Annotated[bool, typer.Option(
        "--verify", help="Read all files of prepared data and compare their SHA-256.")] = False,
    processes: Annotated[int | None, typer.Option(
        "--plan", min=1, max=2**16, metavar="N", help="Print the memory of each of N processes that train it.")] = None,
) -> None:
    """Print a model's specification, parameters by part, training FLOPs per token and decoding state; or the memory
    that its training needs; or what prepared data hold."""
    if model not in PRESETS and Path(model).is_dir():
        if processes is not None:
            raise UsageError("a plan is of a model", model, f"name one of {', '.join(PRESETS)}")
        from lineartime.data.tokens import read_manifest, verify_data

        manifest = verify_data(Path(model)) if verify else read_manifest(Path(model))
        say_counts(manifest)
        say(f"tokenizer   {manifest.vocab_size:,} tokens, SHA-256 {manifest.tokenizer['sha256']}")
        say(f"manifest    SHA-256 {manifest.sha256}")
        size = sum(file["bytes"] for file in manifest.files.values())
        say(f"files       {len(manifest.files):,}, {size:,} bytes, "
            + ("verified by SHA-256" if verify else "not read; --verify compares their SHA-256"))
        return
    if verify:
        raise UsageError("no folder of prepared data", model, "name one to --verify")
    chosen = dict(parse_setting(text) for text in settings or [])
    if processes is not None:
        from lineartime.benchmark.plan import print_plan

        print_plan(run_config({"model": model, "task": task, "data": "-", "out": "-", **chosen}), processes)
        return
    config = model_config(model, task, **chosen)
    from lineartime.info import print_description

    print_description(config, f"{model} ({task})")


@app.command()
def plot(
    runs: Annotated[list[str], typer.Argument(
        help="A run, or several as LABEL=RUN, which are drawn side by side; or LABEL=FILE of `evaluate --contexts`.")],
    out: Annotated[Path | None, typer.Option(help="PNG to write; needed for several runs, and for files.")] = None,
) -> None:
    """Draw a run's curves, or the curves of several runs in one picture, or what models gain from context."""
    split = [text.partition("=") for text in runs]
    named = {label if equals else Path(label).name: Path(run or label) for label, equals, run in split}
    files = [path for path in named.values() if path.suffix == ".json"]
    if out is None and (len(runs) > 1 or files):
        raise UsageError("no file is named for the picture", "--out", "give a .png")
    if files and len(files) < len(named):
        raise UsageError("runs and files of `evaluate --contexts` side by side", str(files[0]), "draw them apart")
    from lineartime.plot import plot_comparison, plot_context_use, plot_run

    if out is None:
        say(str(plot_run(Path(runs[0]))))
        return
    say(str((plot_context_use if files else plot_comparison)(named, out)))


add_examples(app)


def main() -> None:
    """Run the command line; errors become one line on stderr and an exit code, see `errors`."""
    arguments = sys.argv[1:] or ["--help"]
    if not launched().is_first:  # rank 0 speaks for all, but for errors
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")
    with screens():
        code = run_verb(arguments, debug=arguments[0] == "--debug")
    sys.exit(code)


def run_verb(arguments: list[str], *, debug: bool) -> int:
    """The exit code of a command line. debug: show a traceback with an error."""
    try:
        with shown_log():
            code = typer.main.get_command(app).main(arguments, prog_name="lineartime", standalone_mode=False)
            sys.stdout.flush()
        return fail(KeyboardInterrupt(), 130, debug, "interrupted") if code == 130 else code or 0
    except LineartimeError as e:
        return fail(e, e.exit_code, debug)
    except KeyboardInterrupt as e:
        return fail(e, 130, debug, "interrupted")
    except (BrokenPipeError, SystemExit):  # the reader of stdout has what it wants; rich makes it a SystemExit
        return 0
    except MemoryError as e:
        return fail(e, 6, debug, "out of memory")
    except OSError as e:
        what = e.strerror or f"{type(e).__name__}: {e}"
        return fail(e, 6, debug, f"{what}: {e.filename!r}" if e.filename is not None else what)
    except Exception as e:
        if isinstance(e, RuntimeError):
            from lineartime.training import out_of_memory  # it imports torch, which raised this or was imported anyway

            if out_of_memory(e):
                return fail(e, 6, debug, "out of memory")
        refused = getattr(e, "format_message", None)
        what = refused() if refused else f"internal: {type(e).__name__}: {e}; run again with --debug and report it"
        return fail(e, 2 if refused else 1, debug, what)


LONGEST_ERROR = 700
"""Characters; less than ten lines of a terminal."""


def fail(error: BaseException, code: int, debug: bool, message: str | None = None) -> int:
    if debug:
        import traceback

        traceback.print_exception(error)
    ranks = launched()
    if not (ranks.is_first if isinstance(error, Stopped) else speaks_first(ranks)):
        return code
    line = " ".join((message or str(error)).split())
    if ranks.size > 1 and isinstance(error, DataError | CheckpointError | ResourceError):
        line += f" (rank {ranks.rank} on {socket.gethostname()})"
    if len(line) > LONGEST_ERROR:
        line = f"{line[:LONGEST_ERROR // 2]} ... {line[-LONGEST_ERROR // 2:]}"
    print(f"error: {line}", file=sys.stderr if ranks.is_first else sys.__stderr__)
    return code
