"""What is done with a run: `lineartime evaluate`, `score`, `generate`, `read`, `export`, `plot`."""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from lineartime.base.errors import DataError, UsageError, raised_as
from lineartime.base.files import check_new, check_place, write_json
from lineartime.base.ranks import connected, launched
from lineartime.base.settings import require, require_counts
from lineartime.base.stores import file_blocks, packing_of, require_there, size_of, stdin_blocks
from lineartime.cli.options import Device, Precision
from lineartime.cli.terminal import Terminal, note, results_are_files, say, say_stopping, summary
from lineartime.data.read_text import kind_of, read_small, text_of
from lineartime.folders import named_folder, require_run
from lineartime.tasks.qa.finetune_config import Evidence, MaxAnswerTokens, Stride

if TYPE_CHECKING:
    from lineartime.data.tokenizer import Tokenizer
    from lineartime.model.language_model import LanguageModel
    from lineartime.use import scoring

SAVE_SECONDS = 30.0  # between two saves of the state
LONG_PROMPT = 20_000  # tokens, at least, that are read with a progress bar


@dataclass(frozen=True)
class EvaluateOptions:
    """What `lineartime evaluate` takes. Raises UsageError for options that do not go together."""

    run: Annotated[str, "A run, one of its checkpoints, an exported folder, or the shipped model `small`.", "RUN"]
    data: Annotated[str | None, "Folder made by `lineartime prepare`, or its address."] = None
    split: Annotated[str, "Which part of the text: train, validation or test."] = "validation"
    context: Annotated[int | None, "Tokens in a row; by default as in training."] = None
    batch_rows: Annotated[int | None, "Rows scored at once, by default up to 8; changes only rounding."] = None
    precision: Precision = "float32"
    as_json: Annotated[bool, "Print one JSON object.", "--json"] = False
    questions: Annotated[tuple[str, ...], "Score answers instead: TriviaQA's questions, as finetune takes them."] = ()
    evidence: Evidence = None
    stride: Stride = None
    max_answer_tokens: MaxAnswerTokens = 30
    predictions: Annotated[Path | None, "With --questions: file for the answers, {question id: answer}."] = None
    device: Device = None

    def __post_init__(self) -> None:
        require_counts(batch_rows=self.batch_rows)
        for name in ("data", "split") if self.questions else ("evidence", "stride", "max_answer_tokens", "predictions"):
            require(getattr(self, name) == getattr(EvaluateOptions, name), "options that do not go together",
                    f"--{name.replace('_', '-')}", f"it goes {'without' if self.questions else 'with'} --questions")
        if self.predictions is not None:
            check_new(self.predictions)


def evaluate(options: EvaluateOptions) -> None:
    """Score a model on prepared text, or on questions. On text every token is scored exactly once;
    of a model that is not causal, the masked tokens. On questions the answers of a fine-tuned model
    are scored by exact match and F1."""
    folder = named_folder(options.run)
    if options.questions:
        scores, lines = scored_answers(folder, options)
    elif options.data is not None:
        scores, lines = scored_text(folder, options.data, options)
    else:
        raise UsageError("evaluate needs prepared text", "evaluate",
                         "give --data DATA, or for a fine-tuned run --questions FILE")
    for line in [json.dumps(scores)] if options.as_json else lines:
        say(line)


def scored_text(run: Path, data: str, options: EvaluateOptions) -> tuple[dict[str, Any], list[str]]:
    """The scores of a split of prepared text, and lines that tell a person."""
    from lineartime.data.mixture import read_mixture
    from lineartime.data.tokens import read_manifest

    require(len(read_mixture(data)) == 1, "evaluate scores one text", data, "give one of its folders")
    read_manifest(data)  # refuses what is not prepared text, before torch is imported
    from lineartime.training.evaluation import evaluate, load_with_split
    from lineartime.training.runtime import pick_device

    model, stream, facts = load_with_split(run, data, options.split)
    picked = pick_device(options.device)
    with connected(picked.type) as ranks, Terminal() as terminal:
        result = evaluate(model.to(picked), stream, context=options.context, batch_rows=options.batch_rows,
                          precision=options.precision, ranks=ranks,
                          progress=lambda n: terminal.count("evaluating", n, stream.n_tokens))
    unit = "nats per token" if result.n_read is None else "nats per masked token"
    lines = [f"         position {first:>6} to {last:>6}  {loss:.4f} {unit}"
             for first, last, loss in result.loss_by_position]
    scores = result.to_dict()
    about = {"split": options.split, "context": options.context or model.config.context}
    return facts | about | scores, [summary(options.split, scores), *lines]


def scored_answers(run: Path, options: EvaluateOptions) -> tuple[dict[str, Any], list[str]]:
    """The same of a fine-tuned run's answers, by the official rules of TriviaQA."""
    predictions = options.predictions
    require_there(options.questions)
    require(launched().size == 1, "questions are answered in one process", "evaluate --questions", "leave out torchrun")
    from lineartime.tasks.qa.questions import read_questions
    from lineartime.tasks.qa.spans import evaluate_questions
    from lineartime.training.runtime import pick_device
    from lineartime.weights.load import load_span_model

    asked = list(read_questions(options.questions, options.evidence))
    require(predictions is not None or any(question.accepted for question in asked),
            "no question has an answer to compare with", ", ".join(options.questions),
            "--predictions FILE writes answers without scoring them")
    model, tokenizer, facts = load_span_model(run)
    with Terminal() as terminal:
        scores, answers = evaluate_questions(
            model.to(pick_device(options.device)), tokenizer, asked, context=options.context, stride=options.stride,
            max_answer_tokens=options.max_answer_tokens, batch_rows=options.batch_rows or 8,
            precision=options.precision, progress=lambda n: terminal.count("answering", n, len(asked)))
    lines = []
    if "f1" in scores:
        without = scores["questions_without_document"]
        lines.append(f"EM {scores['exact_match']:.2f}, F1 {scores['f1']:.2f} over {scores['n_questions']:,} questions"
                     + (f"; {without:,} have no document" if without else ""))
    if predictions is not None:
        write_json(predictions, answers, ascii_only=False)
        lines.append(f"answers  {predictions}")
    return facts | scores, lines


def score(
    model: Annotated[str, "A run, one of its checkpoints, an exported folder, or the shipped model `small`.", "MODEL"],
    file: Annotated[str, "A file of text or its address, which may be packed, or `-` for stdin.", "FILE"], *,
    per: Annotated[Literal["line", "token", "document"], "What a row scores; a document is the whole text."] = "line",
    state: Annotated[Path | None, "File for the state; the same command goes on after what it has read."] = None,
    as_json: Annotated[bool, "Print rows of JSON.", "--json"] = False,
    precision: Precision = "float32",
    device: Device = None,
) -> None:
    """Score a text as it comes, in bits. Every line is scored given all before it; what is
    unexpected has many bits. A row has a number, the bits, the bytes, the bits per byte, and how
    the line begins. FLASH reads an endless stream in constant memory."""
    if state is not None:
        check_place(state)
    require_there([file])
    folder = named_folder(model)
    from lineartime.training.runtime import StopSignal, pick_device
    from lineartime.use import scoring
    from lineartime.weights.load import load_model

    loaded, tokenizer, _ = load_model(folder)
    loaded.to(pick_device(device))
    now, size = scoring.open_state(loaded, tokenizer, state), block_bytes(loaded)
    came = stdin_blocks(size, ticks=True) if file == "-" else scoring.unread(file_blocks(file, size), now, file)
    begun = saved = time.monotonic()
    n_before = now.n_tokens

    def blocks() -> Iterator[bytes]:
        """The text. The next block is asked for when all rows before it are printed."""
        nonlocal saved
        for block in came:
            yield block
            sys.stdout.flush()
            if state is not None and time.monotonic() - saved >= SAVE_SECONDS:
                now.save(state)
                saved = time.monotonic()
            if stop.number is not None:
                return

    with StopSignal().listening(say_stopping) as stop:
        rows = scoring.score(loaded, tokenizer, blocks(), per=per, precision=precision, state=now,
                             keep=state is not None, name="stdin" if file == "-" else file)
        try:
            for row in rows:
                print(line_of(row, per, as_json))
        except DataError:
            if state is not None and file == "-":  # what came before the wrong byte does not come again
                now.save(state)
            raise
        sys.stdout.flush()
        if state is not None:
            now.save(state)
        note_scored(now, now.n_tokens - n_before, time.monotonic() - begun, state)
        stop.check("nothing is kept" if state is None else f"the same command goes on with {state}")


def block_bytes(model: "LanguageModel") -> int:
    """So many bytes are read at once. A stop waits until they are scored, which on a core of a
    processor takes less than half a second. Only the model decides, so the bits come out alike."""
    most = (1 << 35) // (sum(part.numel() for part in model.parameters() if part.device.type == "cpu") or 1)
    return min(max(1 << most.bit_length() >> 1, 256), 1 << 16)


def line_of(row: "scoring.Score", per: str, as_json: bool) -> str:
    per_byte, text = row.bits / max(row.n_bytes, 1), repr(row.text) if per == "token" else row.text
    if as_json:
        return json.dumps({"number": row.number, "bits": round(row.bits, 4), "bytes": row.n_bytes,
                           "bits_per_byte": round(per_byte, 4), "text": row.text})
    return f"{row.number:>9} {row.bits:>10.2f} {row.n_bytes:>7} {per_byte:>8.3f}  {text}"


def note_scored(now: "scoring.ScoringState", n_new: int, seconds: float, state: Path | None) -> None:
    """Print what is scored so far, and how fast, to stderr. n_new: tokens of this call."""
    if now.n_tokens:
        per_byte, per_token = now.bits / max(now.n_bytes, 1), now.bits / now.n_tokens
        perplexity = 2**per_token if per_token < 1024 else float("inf")
        note(f"scored   {now.n_lines:,} lines, {now.n_tokens:,} tokens, {now.n_bytes:,} bytes: {per_byte:.3f} bits per "
             f"byte, perplexity {perplexity:.1f} per token; {n_new / max(seconds, 1e-9):,.0f} tokens/s")
    elif not now.shown:
        note("scored   0 tokens: no text")
    if now.shown:
        note(f"the last line has no end yet; what came of it waits in {state}")


def generate(
    model: Annotated[str, "A run, one of its checkpoints, an exported folder, or the shipped model `small`.", "MODEL"],
    prompts: Annotated[tuple[str, ...], "Texts to continue, by default a new document; `-` is stdin.", "PROMPTS"] = (),
    *,
    prompt_file: Annotated[tuple[str, ...], "File with a prompt, or its address; may be given again."] = (),
    state: Annotated[Path | None, "Go on from the text that `lineartime read` read: each prompt follows it."] = None,
    stop: Annotated[tuple[str, ...], "Stop before this text; it is not printed. May be given again."] = (),
    max_new_tokens: Annotated[int, "Most tokens to add."] = 200,
    temperature: Annotated[float, "How freely tokens are drawn; 0 always takes the likeliest."] = 0.8,
    top_k: Annotated[int | None, "Draw from the k likeliest tokens only."] = None,
    top_p: Annotated[float | None, "Draw only from the likeliest tokens that together reach probability p."] = None,
    seed: Annotated[int, "The same seed gives the same text."] = 0,
    precision: Precision = "float32",
    device: Device = None,
) -> None:
    """Continue prompts. One is printed as it grows; several are printed one after another."""
    require(seed >= 0, "seed must not be negative", f"{seed}")
    require("" not in stop, "a stop text is empty", "--stop", "leave it out")
    require((*prompts, *prompt_file).count("-") <= 1, "stdin is read once", "-", "name it once")
    run, texts = named_folder(model), [*map(read_prompt, prompts), *map(read_small, prompt_file)] or [""]
    from lineartime.model.decoding.state import DecodingState
    from lineartime.weights.generation.generate import check_sampling, generate, ids_of_prompts

    check_sampling(max_new_tokens, temperature, top_k, top_p)
    loaded, tokenizer = load_writer(run, device, precision)
    shared = None if state is None else DecodingState.load(state, loaded)
    ids, last_word = ids_of_prompts(texts, tokenizer, shared), ""
    if shared is not None:  # the ids begin with its last word
        last_word, shared.text = shared.text, ""
    streams, held = [tokenizer.stream(last_word + text) for text in texts], [""] * len(texts)
    if len(texts) == 1:
        print(texts[0], end="", flush=True)

    def add(row: int, new_ids: list[int]) -> bool:
        """Add the text of a row's newest token; returns whether a stop text ends the row."""
        text, held[row], is_over = before_stop(held[row] + streams[row](new_ids[-1]), stop)
        texts[row] += text
        if len(texts) == 1:
            print(text, end="", flush=True)
        return is_over

    longest = max(map(len, ids))
    try:
        with Terminal() as terminal:
            def show(n_read: int) -> None:
                terminal.count("tokens of the prompt", n_read, longest)
                if n_read >= longest:
                    terminal.close()

            generate(loaded, ids, stop=add, on_prompt=show if longest >= LONG_PROMPT else None,
                     max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
                     state=shared)
    finally:  # an error has a line of its own, behind what there is of the texts
        for number, (text, rest) in enumerate(zip(texts, held, strict=True), 1):
            print(rest if len(texts) == 1 else f"== {number}\n{text}{rest}")


def load_writer(folder: Path, device: str | None, precision: str) -> tuple["LanguageModel", "Tokenizer"]:
    """A model that continues text, on its device, and its tokenizer. Others are refused."""
    import torch

    from lineartime.model.language_model import LanguageModel
    from lineartime.training.runtime import pick_device
    from lineartime.weights.load import load_model

    loaded, tokenizer, _ = load_model(folder)
    require(loaded.config.causal and type(loaded) is LanguageModel, "only a causal language model continues text",
            str(folder), "transformers opens masked models")
    loaded.decoding_state(0)  # refuses a model that does not decode, before its prompt is printed
    return loaded.to(pick_device(device), getattr(torch, precision)), tokenizer


def read(
    book: Annotated[str, "A text file or its address, which may be packed, or `-` for stdin.", "BOOK"], *,
    model: Annotated[str, "A run, one of its checkpoints, an exported folder, or the shipped model `small`."],
    out: Annotated[Path, "File for the state."],
    precision: Precision = "float32",
    device: Device = None,
) -> None:
    """Read a text once, for generate --state to go on from. The file has all that the model keeps
    of the text. With FLASH it is equally large for texts of any length."""
    check_new(out)
    require(kind_of(book) in ("", ".txt"), "a file of rows is many documents", book, "read one text")
    require_there([book])
    folder = named_folder(model)
    from lineartime.weights.generation.generate import read as read_text

    loaded, tokenizer = load_writer(folder, device, precision)
    n_file_bytes = None if book == "-" or packing_of(book) else size_of(book)
    begun = time.monotonic()
    with Terminal() as terminal:
        def show(n_bytes: int, n_tokens: int) -> None:
            speed = n_tokens / max(time.monotonic() - begun, 1e-9)
            terminal.count("bytes", n_bytes, n_file_bytes, f"{n_tokens:,} tokens  {speed:,.0f} tokens/s")

        state = read_text(loaded, tokenizer, text_of(book), progress=show)
    check_new(out)  # another process may have written it since
    state.save(out)
    note(f"written  {out}: {int(state.seq_lens_B):,} tokens in {out.stat().st_size / 1e6:.1f} MB")


def before_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str, bool]:
    """The text before the first stop text, "" and True. Without one: the text in which no stop text
    has begun, the rest, which more text may make a stop text, and False."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    if found:
        return text[: min(found)], "", True
    end = next((i for i in range(len(text)) if any(stop.startswith(text[i:]) for stop in stops)), len(text))
    return text[:end], text[end:], False


def read_prompt(given: str) -> str:
    """A prompt of the command line: a text, or `-` for stdin."""
    if given == "-":
        return read_small(given)
    with raised_as(UsageError, "the prompt is not UTF-8", "the command line", UnicodeDecodeError):
        return os.fsencode(given).decode("utf-8-sig")


def export(
    run: Annotated[str, "A run of `lineartime train`.", "RUN"],
    out: Annotated[str, "New folder for the model, or its address in a store."],
    data: Annotated[str | None, "Prepared text for the card's scores, or its address; by default the folder that the "
                    "run was trained on, with onnx none."] = None,
    about: Annotated[str | None, "Markdown file with which the model card begins, or its address."] = None,
    to: Annotated[Literal["transformers", "onnx"], "What opens the folder: transformers and this package; or without "
                  "PyTorch onnxruntime-genai, transformers.js and onnxruntime-web."] = "transformers",
    int8: Annotated[bool, "With onnx: the matrices in 8 bits. With --data the README compares the losses."] = False,
    device: Device = None,
) -> None:
    """Export a run to a folder for sharing.
    It holds weights in bfloat16 and a model card with held-out scores."""
    results_are_files()
    require(not int8 if to == "transformers" else about is None and device is None, "options that do not go together",
            f"--to {to}", "--int8 is for onnx, --about and --device are for transformers")
    folder = named_folder(run)
    if to == "onnx":
        with raised_as(UsageError, "a package is missing", "onnx", ImportError, todo="pip install onnx onnxruntime"):
            from lineartime.use.onnx_folder import export_onnx

        n_bytes, loss = export_onnx(folder, out, data=data, int8=int8)
        say(f"{loss}\ngraph    {os.path.join(out, 'model.onnx')} ({n_bytes / 1e6:.1f} MB)\n".lstrip()
            + f"how to   {os.path.join(out, 'README.md')}")
        return
    from lineartime.training.runtime import pick_device
    from lineartime.use.export import export

    text = read_small(about) if about is not None else ""
    with Terminal() as terminal:
        scores, n_bytes = export(folder, out, data=data, about=text, device=pick_device(device),
                                 progress=terminal.count)
    for split, evaluation in scores.items():
        say(summary(split, evaluation.to_dict()))
    say(f"weights  {os.path.join(out, 'model.safetensors')} ({n_bytes / 1e6:.1f} MB; open with lineartime.load_model "
        "or transformers)")
    say(f"card     {os.path.join(out, 'README.md')}")


def plot(
    runs: Annotated[tuple[str, ...], "A run; or LABEL=RUN several times, to draw runs side by side.", "RUNS"],
    out: Annotated[Path | None, "PNG file to write; needed for several runs."] = None,
) -> None:
    """Draw the curves of runs."""
    split = [(text, "", text) if Path(text).is_dir() else text.partition("=") for text in runs]
    named = {label: Path(path or label) for label, _, path in split}  # the label of a run without one is its path
    require(out is not None or len(runs) < 2, "the picture needs a file", "plot", "give --out a .png")
    require(len(named) == len(runs), "two runs have the same label", ", ".join(runs), "name each as LABEL=RUN")
    for run in named.values():
        require_run(run)
    from lineartime.training.plot import plot_run, plot_side_by_side

    say(str(plot_run(*named.values()) if out is None else plot_side_by_side(named, out)))
