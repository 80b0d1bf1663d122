"""Time and memory of whole training steps, the models in turn: forward, loss, backward, clipping, optimizer."""

import math
import re
import tempfile
import uuid
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks import Row, measure, peers
from benchmarks.measure import OnRows, Progress, Times, ignore
from benchmarks.peers import Label
from lineartime.config import ModelConfig, TrainConfig, to_dict
from lineartime.distributed.ordered import parts_of
from lineartime.errors import NumericsError
from lineartime.info import describe
from lineartime.masking import NO_TARGET
from lineartime.model import LanguageModel
from lineartime.objectives import MaskedTokens, NextToken, Objective
from lineartime.release.provenance import installed_version
from lineartime.runtime import available_bytes, rss_bytes
from lineartime.training import compute_gradient, make_optimizer

Precision = Literal["float32", "bfloat16"]

LIMITS = {"float32": 1e-3, "bfloat16": 0.06}
"""Largest relative error of the loss and of any parameter's gradient that is let pass, against eager float32."""

NEAR_UNIFORM = 1.0
"""Nats that the loss of new weights may lie from ln V. The head is the embedding again, so a token's own logit stands
out, and the more so the wider the model: by 0.45 nats at 110 M."""

CHECKED_WHOLE = 2**14
"""Steps of at most so many tokens are checked as they are timed; larger ones by a short row, unless they are compiled:
for what is compiled, another shape is another program."""

WARM_UP = 2
"""Steps before the first that is timed: that of the check, and one in turn with the others."""


@dataclass(frozen=True)
class StepCase:
    """One model at one context in one type."""

    label: Label
    config: ModelConfig
    """For a peer, the model whose size it has."""
    tokens: int = 8192
    """In a step; one row where the context is longer."""
    precision: Precision = "float32"

    @property
    def n_rows(self) -> int:
        return max(self.tokens // self.config.context, 1)

    @property
    def tokens_per_step(self) -> int:
        return self.n_rows * self.config.context

    @property
    def text(self) -> str:
        return f"{self.label.text}, context {self.config.context:,}, {self.precision}"

    @property
    def reference(self) -> object:
        """Cases for which this is the same are compared with the same step."""
        return self.label.model, self.config, self.checked_shape

    @property
    def checked_shape(self) -> tuple[int, int]:
        """Rows and tokens in a row of the step that is checked."""
        if self.label.compiled or self.tokens_per_step <= CHECKED_WHOLE:
            return self.n_rows, self.config.context
        if self.label.windowed:
            return 1, min(self.config.context, 2 * peers.WINDOW_TOKENS)
        return 1, min(self.config.context, 5 * (self.config.chunk_size or 256) // 2)


def benchmark_step(cases: Sequence[StepCase], *, repeats: int = 5, threads: int = 1, device: str = "cpu", seed: int = 0,
                   together: bool = False, progress: Progress = ignore, on_rows: OnRows = ignore) -> list[Row]:
    """Time and memory of whole training steps; a row per case.

    Every case is a process of its own that stays. Those of one context and type take a step in turn, `repeats` times
    round and round; with `together` those of one type do. on_rows gets the rows of those that were measured together,
    which share their "run". Before a time counts, the loss and the gradient have been compared with those of the same
    weights in eager float32. A process that dies, or a peer that is not installed, gives a row with "failed" alone."""
    precisions = [case.precision for case in cases]
    measure.require_measurable(precisions, cases=len(cases), repeats=repeats, threads=threads, **{
        "tokens of a step": min((min(case.tokens, case.config.context) for case in cases), default=1)})
    groups: dict[object, list[StepCase]] = {}
    for case in cases:
        groups.setdefault((None if together else case.config.context, case.precision), []).append(case)
    machine, rows, references = {"threads": threads, "device": device}, list[Row](), dict[object, Row]()
    with tempfile.TemporaryDirectory(prefix="lineartime-") as folder:
        for group in groups.values():
            measured = measure_group(group, references, Path(folder), {**machine, "seed": seed}, repeats, progress)
            shared = {"benchmark": "step", **machine, "warm_up": WARM_UP, "repeats": repeats,
                      **measure.facts_of_run()}
            made = [step_row(case, answer) | shared for case, answer in zip(group, measured, strict=True)]
            on_rows(made)
            rows += made
    return rows


def measure_group(cases: Sequence[StepCase], references: dict[object, Row], folder: Path, machine: Row, repeats: int,
                  progress: Progress) -> list[Row]:
    """Each case's answers, the last of which has all times, or its failure.

    machine: threads, device and seed of a process. references: what steps are compared with; missing ones are added."""
    workers = [measure.Worker(training_steps, {
        "label": case.label.text, "config": to_dict(case.config), "n_rows": case.n_rows, "precision": case.precision,
        **machine}) for case in cases]
    try:
        # Check every case, which is its first step. Cases of one model share what they are compared with.
        answers = []
        for case, worker in zip(cases, workers, strict=True):
            if case.reference not in references:
                progress(f"{case.label.model}, context {case.config.context:,}: eager float32, to compare with")
                references[case.reference] = make_reference(case, folder, machine)
            progress(f"{case.text}: check and warm-up")
            wanted = references[case.reference]
            answers.append(wanted if "failed" in wanted else worker.ask({"wanted": wanted}))
        return take_turns(cases, workers, answers, machine["device"] == "cpu", repeats, progress)
    finally:
        for worker in workers:
            worker.close()


def take_turns(cases: Sequence[StepCase], workers: Sequence[measure.Worker], answers: Sequence[Row], on_cpu: bool,
               repeats: int, progress: Progress) -> list[Row]:
    """Let those that were checked take a step in turn, `repeats` times; each one's answers with all times."""
    answers = list(answers)
    alive = [i for i, answer in enumerate(answers) if "failed" not in answer]
    # On a processor all keep their memory between steps if it is enough for all.
    needed = sum(answers[i]["above_import_mib"] for i in alive) * 2**20
    hold = on_cpu and needed < 0.8 * (available_bytes() or 0)
    if on_cpu and not hold:
        progress("too little memory for all at once: each gives it back after its step, and takes one more before")
    # Who holds its memory warms up in a round of its own, before the first that is timed.
    for number, i in measure.in_turn(alive, range(-1 if hold else 0, repeats)):
        progress(f"round {number + 1} of {repeats}: {cases[i].text}")
        answer = workers[i].ask({"warm": 0 if hold else 1, "release": not hold, "timed": number >= 0})
        answers[i] = answer if "failed" in answer else answers[i] | answer
    for i in alive:
        if "failed" not in answers[i]:
            answers[i]["settings"]["between_steps"] = "keeps memory" if hold else "gives memory back"
    return answers


def make_reference(case: StepCase, folder: Path, machine: Row) -> Row:
    """What a case is compared with: the loss, the shape of the step, and the file of the gradients."""
    path, (n_rows, n_tokens) = str(folder / uuid.uuid4().hex), case.checked_shape
    return {"path": path, **measure.in_own_process(reference, {
        "label": case.label.model, "config": to_dict(case.config), "n_rows": n_rows, "n_tokens": n_tokens,
        "path": path, **machine})}


def step_row(case: StepCase, answer: Row) -> Row:
    """The row of a case that `measure_group` answered, without what it shares with others."""
    label, config, peer = case.label, case.config, case.label.model == peers.PEER
    row: Row = {"cell": None, "model": label.model, "variant": label.variant, "label": label.text,
                "config": None if peer else to_dict(config), "n_parameters": describe(config).n_parameters,
                "context_tokens": config.context, "tokens_per_step": case.tokens_per_step, "dtype": case.precision,
                "unit": "step"}
    if peer:
        row["peer"] = {"package": "FLASH-pytorch", "version": installed_version("FLASH-pytorch")}
    elif label.reference:
        row["attention"] = "reference"
    elif (config.attn_type, config.attn_kernel) == ("quadratic", "softmax"):
        row["attention"] = "unfused" if label.unfused else "fused"
    if "failed" in answer:
        return row | {"failed": answer["failed"]}
    return row | answer | measure.spreads(answer.pop("times"), case.tokens_per_step)


def training_steps(label: str, config: Row, n_rows: int, precision: Precision, threads: int, device: str, seed: int,
                   wanted: Row) -> Generator[Row, Row, None]:
    """One process's part of `benchmark_step`: checks and warms up, then takes a step whenever it is asked.

    An order says how many steps to take before ("warm"), whether the step's time is added to those that are answered
    ("timed"), and whether to give back the memory afterwards ("release")."""
    imported, parsed, fields = (rss_bytes() or 0) * (device == "cpu"), peers.parse_label(label), ModelConfig(**config)
    on, settings = measure.set_up(threads, device, seed)
    train = TrainConfig(precision=precision, tokens_per_step=n_rows * fields.context,
                        micro_batch_tokens=n_rows * fields.context)
    model = peers.build(parsed, fields).to(on).train()
    if parsed.compiled:
        model.compile_layers()
    optimizer = make_optimizer(parts_of(model), train)
    task, batch = random_batch(fields, n_rows, fields.context, seed, on)
    times: Times = {}

    def step() -> None:
        compute_gradient(model, task, batch, n_rows, train, n_windows=parsed.n_windows(fields.context))
        optimizer.step()

    with peers.attention_backend(on):
        checked = check_step(model, fields, train, seed, wanted, parsed.n_windows(wanted["shape"][1]))
        if wanted["shape"] == [n_rows, fields.context]:
            optimizer.step()
        else:
            step()
        measure.wait(on)
        ready = {"check": checked, "settings": settings, "n_parameters": sum(p.numel() for p in model.parameters()),
                 **measure.peak_since(imported, on)}
        model.zero_grad(set_to_none=True)
        measure.release_memory(on)
        measure.forget_peak(on)
        order = yield ready
        while True:
            for _ in range(order["warm"]):
                step()
            measure.wait(on)
            before = measure.mark(on)
            step()
            measure.add_times(times if order["timed"] else {}, [before, measure.mark(on, done=True)])
            answer = {"times": times, **measure.peak_since(imported, on)}
            if order["release"]:
                model.zero_grad(set_to_none=True)
                measure.release_memory(on)
            order = yield answer


def reference(label: str, config: Row, n_rows: int, n_tokens: int, threads: int, device: str, seed: int,
              path: str) -> Generator[Row, Row, None]:
    """One process's part of `benchmark_step`: the loss and gradient of new weights by the reference, in eager float32,
    row by row; the gradient goes into a file.

    Raises NumericsError where the loss is far from ln V, or a token changes what comes before it."""
    on, _ = measure.set_up(threads, device, seed)
    fields = ModelConfig(**config)
    model = peers.build(peers.parse_label(label), fields).to(on).train()
    if isinstance(model, LanguageModel):
        model.activation_checkpointing = True
        model.set_impl("reference")
    if fields.causal:
        check_causal(model, torch.randint(fields.vocab_size, (1, min(n_tokens, 640)), device=on))
    task, batch = random_batch(fields, n_rows, n_tokens, seed, on)
    loss, _ = compute_gradient(model, task, batch, 1, TrainConfig(clip=None, micro_batch_tokens=4096))
    away = abs(loss - math.log(fields.vocab_size))
    if away > NEAR_UNIFORM:
        raise NumericsError("the loss of new weights is far from ln V", f"{label}: by {away:.3f} nats")
    gradients = {name: p.grad.cpu().contiguous() for name, p in model.named_parameters() if p.grad is not None}
    save_file(gradients, path)
    yield {"loss": loss, "shape": [n_rows, n_tokens]}


@torch.no_grad()
def check_causal(model: nn.Module, ids_1T: Tensor) -> None:
    """Raise NumericsError unless a changed token changes logits from its place on and none before."""
    place = ids_1T.shape[1] * 5 // 8  # inside a chunk
    changed_1T = ids_1T.clone()
    changed_1T[0, place] = (changed_1T[0, place] + 1) % (ids_1T.max() + 1)
    difference_T = (model(ids_1T) - model(changed_1T)).abs().amax(-1)[0]
    before, after = (difference_T[part].max().item() for part in (slice(None, place or 1), slice(place, None)))
    if not after > 0 or (place and before > 1e-6 * after):
        raise NumericsError("the model is not causal", f"a token changes logits before it by {before:.2g}, "
                            f"and from its place on by {after:.2g}")


def check_step(model: nn.Module, config: ModelConfig, train: TrainConfig, seed: int, wanted: Row,
               n_windows: int = 1) -> Row:
    """A row's "check": the largest relative error of the loss and the gradients of a step. Raises NumericsError where
    it is above the limit.

    Each parameter's gradient is measured against its own norm: new weights let attention contribute little, and what is
    wrong with it would be lost in the whole. One that is nearly 0 is measured against 1e-9 of the whole. That of a
    single number is a sum over all tokens that cancels, in one layer or another to nothing: it is measured together
    with those of the same name in other layers, and may be ten times as far off."""
    n_rows, n_tokens = wanted["shape"]
    task, batch = random_batch(config, n_rows, n_tokens, seed, next(model.parameters()).device)
    loss, norm = compute_gradient(model, task, batch, n_rows, replace(train, clip=None), n_windows=n_windows)
    errors = {"the loss": abs(loss - wanted["loss"]) / wanted["loss"]}
    together: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, expected in load_file(wanted["path"]).items():
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        of_layers = re.sub(r"\.\d+\.", ".*.", name) if expected.numel() == 1 else name
        together.setdefault(of_layers, []).append((gradient.cpu().flatten(), expected.flatten()))
    for name, pairs in together.items():
        gradients, wanted_gradients = map(torch.cat, zip(*pairs, strict=True))
        error = measure.relative_error(gradients, wanted_gradients, least=1e-9 * norm)
        errors[name] = error / (10 if pairs[0][1].numel() == 1 else 1)
    what = f"loss and gradients against eager float32 of the same weights, {n_rows} x {n_tokens:,} tokens"
    return measure.check(errors, LIMITS[train.precision], what, otherwise="not the same step as in eager float32")


def random_batch(config: ModelConfig, n_rows: int, n_tokens: int, seed: int,
                 device: torch.device) -> tuple[Objective, list[Tensor]]:
    """The task of a training run, and a batch of random tokens."""
    generator, no_stream = np.random.default_rng(seed), cast(Any, None)  # the batch is given, and nothing is read
    ids = generator.integers(config.vocab_size, size=(n_rows, n_tokens + 1))
    if config.causal:
        return NextToken(no_stream, no_stream, no_stream), [torch.from_numpy(ids).to(device)]
    chosen = generator.random((n_rows, n_tokens)) < 0.15  # token 0 is the mask: new weights would copy what they see
    masked = np.where(chosen, 0, ids[:, 1:]), np.where(chosen, ids[:, 1:], NO_TARGET)
    return MaskedTokens(no_stream, no_stream, no_stream), [torch.from_numpy(part).to(device) for part in masked]


def step_cases(labels: Sequence[str], contexts: Sequence[int], precisions: Sequence[Any], *, tokens: int,
               config_of: Callable[[str], ModelConfig]) -> list[StepCase]:
    """The cases of labels at contexts in types, those of one context side by side. config_of: a preset's model. Raises
    UsageError for an unknown label."""
    parsed = [peers.parse_label(text) for text in labels]
    return [StepCase(label, replace(config_of(label.preset), context=context), tokens, precision)
            for context in contexts for precision in precisions for label in parsed]
