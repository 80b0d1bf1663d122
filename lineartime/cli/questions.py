"""`lineartime finetune` and `lineartime answer`."""

import json
from shlex import quote
from typing import Annotated

from lineartime.base.errors import DataError, UsageError
from lineartime.base.ranks import TIMEOUT_S
from lineartime.base.settings import require
from lineartime.base.stores import require_there
from lineartime.cli.options import Device, RankTimeout
from lineartime.cli.terminal import Terminal, results_are_files, say, say_stopping
from lineartime.model_names import named_folder
from lineartime.tasks.finetune_config import FineTuning, MaxAnswerTokens, Stride


def finetune(plan: FineTuning, *, device: Device = None, rank_timeout: RankTimeout = TIMEOUT_S) -> None:
    """Teach a masked model to find answers in documents.
    It is trained once for each learning rate, and the best is kept. To teach a causal model more text, use `lineartime
    train --from RUN`."""
    results_are_files()
    if not plan.validation or not plan.data:
        raise UsageError("options are missing", "finetune", "it takes --questions, --validation and --out")
    named_folder(plan.run)
    require_there([*plan.data, *plan.validation])
    from lineartime.tasks.finetuning import finetune
    from lineartime.training.stop import StopSignal

    with StopSignal().listening(say_stopping) as stop, Terminal() as terminal:
        result = finetune(plan, device=device, stop=stop, on_step=terminal.step, progress=terminal.count,
                          rank_timeout=rank_timeout)
    out, named = plan.out, quote(str(plan.out))
    if "already" in result:
        say(f"complete: {out} was fine-tuned with these settings; nothing to do.")
    say("")
    for name, scores in result["learning_rates"].items():
        say(f"lr {name:<9} EM {scores['exact_match']:6.2f}  F1 {scores['f1']:6.2f}"
            + "  <- best" * (result["best"] == f"lr-{name}"))
    say(f"\nweights  {out / 'best'}  (open with lineartime.load_model or transformers)")
    say(f"report   {out / 'predictions.json'}")
    say(f'next     lineartime answer {named} --question "Who wrote it?" --document FILE')


def answer(
    run: Annotated[str, "A folder of `lineartime finetune`, or one of its runs or checkpoints.", "RUN"],
    *,
    question: Annotated[str, "The question."],
    document: Annotated[tuple[str, ...], "Text file in which the answer is searched, `-` for stdin; may be given "
                        "again."],
    context: Annotated[int | None, "Tokens in a window; by default as in training."] = None,
    stride: Stride = None,
    max_answer_tokens: MaxAnswerTokens = 30,
    batch_rows: Annotated[int, "Windows read at once; changes only rounding, speed and memory."] = 4,
    as_json: Annotated[bool, "Print one JSON object.", "--json"] = False,
    device: Device = None,
) -> None:
    """Answer one question from documents of any length."""
    require(bool(question.strip()), "no question", "--question", 'give --question "..."')
    require(batch_rows >= 1, "wrong value", f"batch_rows = {batch_rows}", "it takes whole numbers from 1")
    folder = named_folder(run)
    from lineartime.data.read_text import read_small
    from lineartime.data.rows import checked
    from lineartime.tasks.qa.questions import MOST_BYTES, Document, Question

    checked(question, "the question", "--question")
    documents = tuple(Document("stdin" if name == "-" else name, read_small(name, MOST_BYTES)) for name in document)
    if not any(each.text().strip() for each in documents):
        raise DataError("nothing but white space", ", ".join(document))
    from lineartime.tasks.qa.spans import WindowConfig, predict
    from lineartime.training.runtime import pick_device
    from lineartime.weights.load import load_span_model

    model, tokenizer, facts = load_span_model(folder)
    windows = WindowConfig(model.config.context if context is None else context, stride, max_answer_tokens)
    model.check_length(windows.context)
    with Terminal() as terminal:
        asked = [Question("", question, documents, (), ())]
        (found,) = predict(model.to(pick_device(device)), tokenizer, asked, windows,
                           batch_rows=batch_rows, progress=terminal.counting("windows read"))
    if (span := found.span) is None:
        raise DataError("the tokenizer finds nothing in the document", ", ".join(document))
    # The answer, with the text around it.
    where, text = documents[span.document].name, documents[span.document].text()
    before, answer, after = (" ".join(part.split()) for part in (
        text[max(span.start - 120, 0) : span.start], span.text, text[span.stop : span.stop + 120]))
    if as_json:
        say(json.dumps({**facts, "answer": span.text, "score": span.score, "document": where, "start": span.start,
                        "stop": span.stop, "before": before, "after": after, "windows": found.n_windows}))
        return
    say(f"answer   {answer}")
    say(f"score    {span.score:.2f}  (below 0 the model holds it likelier that the answer is not there)")
    say(f"where    characters {span.start:,} to {span.stop:,} of {where} ({found.n_windows:,} windows read)")
    say(f"         ... {before} [{answer}] {after} ...")
