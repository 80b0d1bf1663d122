"""Time and memory of whole training steps, forward, loss, backward, clipping, optimizer."""

import math
import re
import tempfile
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import Row, llama, measure, peers
from benchmarks.measure import Case, Setup, Times
from benchmarks.peers import Label
from lineartime.base.errors import NumericsError
from lineartime.base.settings import require
from lineartime.config import ModelConfig, TrainConfig, to_dict
from lineartime.model.language_model import LanguageModel, number_of_parameters
from lineartime.training.gradient import compute_gradient
from lineartime.training.masking import NO_TARGET
from lineartime.training.objectives import MaskedTokens, NextToken, Objective
from lineartime.training.optimizers import Muon, make_optimizer, update_weights
from lineartime.training.ordered import parameter_parts

Precision = Literal["float32", "bfloat16"]
LIMITS = {"float32": 1e-3, "bfloat16": 0.06}
"""Largest relative error of loss and gradients that passes, against eager float32."""
CUDA_ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
                  SDPBackend.MATH]
"""The fastest first; torch's own order has FlashAttention-2 there."""
WARM_UP = 2  # steps before the first that is timed: that of the check, and one in turn with the others


@dataclass(frozen=True)
class StepCase:
    """One model at one context in one type."""

    label: Label
    config: ModelConfig  # for a peer, the model whose size it has
    tokens: int = 8192  # in a step; one row where the context is longer
    precision: Precision = "float32"
    optimizer: str = "adamw"
    reads: bool = False  # only reads: forward to the logits of the last token, without a gradient

    @property
    def n_rows(self) -> int:
        return max(self.tokens // self.config.context, 1)


def benchmark_step(cases: Sequence[StepCase], setup: Setup, *, together: bool = False) -> Iterator[list[Row]]:
    """Time and memory of whole training steps; yields the rows of cases measured together. Those of
    one context and type take a step in turn, round and round; with `together` all do.
    Before a time counts, loss and gradient are compared with those in eager float32."""
    lengths, ours = [min(case.tokens, case.config.context) for case in cases], [
        case.precision for case in cases if case.label.model != llama.NAME]
    measure.require_measurable(ours, cases=len(cases), repeats=setup.repeats,
                               **{"tokens of a step": min(lengths, default=1)})
    groups: dict[object, list[StepCase]] = {}
    for case in cases:
        groups.setdefault(None if together else (case.config.context, case.precision), []).append(case)
    with tempfile.TemporaryDirectory(prefix="lineartime-") as folder:
        @cache  # cases of one model share what they are compared with
        def wanted(model: str, config: ModelConfig, n_rows: int) -> Row:
            setup.progress(f"{model}, context {config.context:,}: eager float32, to compare with")
            path = str(Path(folder) / uuid.uuid4().hex)
            with closing(measure.Worker(reference, {"label": model, "config": to_dict(config), "n_rows": n_rows,
                                                    "path": path, "place": setup.place})) as worker:
                return {"wanted": path, **worker.ask()}

        for group in groups.values():
            yield measure.side_by_side([measured_case(case, setup.place, wanted) for case in group],
                                       "forward" if group[0].reads else "step", setup, WARM_UP,
                                       hold=None if setup.device == "cpu" else False)


def measured_case(case: StepCase, place: Row, wanted: Callable[..., Row]) -> Case:
    """A case with the columns of its row. wanted: makes what it is compared with."""
    label, config, is_peer = case.label, case.config, case.label.model in peers.PACKAGES
    n_tokens = case.n_rows * config.context
    row: Row = {"model": label.model, "variant": label.variant, "label": label.text,
                "config": None if is_peer else to_dict(config), "n_parameters": number_of_parameters(config),
                "context_tokens": config.context, "tokens_per_step": n_tokens, "dtype": case.precision, "unit": "step"}
    row |= peers.about(label.model)
    if "reference" in label.how:
        row["attention"] = "reference"
    elif not is_peer and (config.attn_type, config.attn_kernel) == ("quadratic", "softmax"):
        row["attention"] = "unfused" if "unfused" in label.how else "fused"
    arguments = {"label": label.text, "config": to_dict(config), "n_rows": case.n_rows, "precision": case.precision,
                 "place": place}
    if case.reads:
        return Case(forward_passes, arguments, row, n_tokens)
    arguments["optimizer"] = case.optimizer
    return Case(training_steps, arguments, row, n_tokens, lambda: wanted(label.model, config, case.n_rows))


def training_steps(label: str, config: Row, n_rows: int, precision: Precision, place: Row,
                   optimizer: Literal["adamw", "muon"], wanted: str, loss: float) -> Generator[Row, Row, None]:
    """The job of a case: checks and warms up, then takes a step whenever it is asked. wanted: the
    file of the first step's gradients; loss: its loss."""
    on, settings, imported = measure.set_up(**place)
    parsed, fields, times = peers.parse_label(label), ModelConfig(**config), Times()
    n_tokens = n_rows * fields.context
    train = TrainConfig(precision=precision, optimizer=optimizer, tokens_per_step=n_tokens, micro_batch_tokens=n_tokens)
    model = peers.build(parsed, fields).to(on).train()
    if "compiled" in parsed.how:
        model.compile_layers()
    parts = parameter_parts(model, muon=optimizer == "muon")
    adamw = make_optimizer(parts, train)
    muon = Muon(cast(Any, model), parts, train, adamw.state)
    task, batch = random_batch(fields, n_rows, on)

    def step() -> float:
        last_loss, _ = compute_gradient(model, task, batch, n_rows, train)
        update_weights(adamw, muon, train.learning_rate, train)
        return last_loss

    def free() -> None:
        model.zero_grad(set_to_none=True)
        measure.release_memory(on)

    with attention_of(parsed, on):
        found, norm = compute_gradient(model, task, batch, n_rows, replace(train, clip=None))
        checked = check_step(model, found, norm, loss, wanted, LIMITS[precision])
        update_weights(adamw, muon, train.learning_rate, train)
        measure.wait(on)
        answer: Row = {"check": checked, "settings": settings, "times": times,
                       "n_parameters": sum(p.numel() for p in model.parameters()), **measure.peak_since(imported, on)}
        # What building and compiling took is no part of a step's memory.
        free()
        if on.type == "cuda":
            torch.cuda.reset_peak_memory_stats(on)
        with suppress(OSError):  # resets this process's peak, on systems that can
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        while True:
            order = yield answer
            last_loss = measure.take_turn(step, order, times, on)
            if not last_loss < found:
                raise NumericsError("the loss does not fall", f"{last_loss:.4f} after {found:.4f}, on one batch")
            answer = {"times": times, "losses": [found, last_loss], **measure.peak_since(imported, on)}
            if order["release"]:
                free()


def attention_of(label: Label, device: torch.device) -> AbstractContextManager[None]:
    """What PyTorch's attention may be inside the block: the fastest, or where it is unfused the one
    that has every T x T matrix in memory, in the type of the step."""
    if "unfused" in label.how:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
        return sdpa_kernel(SDPBackend.MATH)
    return sdpa_kernel(CUDA_ATTENTION, set_priority=True) if device.type == "cuda" else nullcontext()


@torch.inference_mode()
def forward_passes(label: str, config: Row, n_rows: int, precision: Precision, place: Row) -> Generator[Row, Row, None]:
    """The job of a case that only reads. Tests hold our forward pass to its reference."""
    on, settings, imported = measure.set_up(**place)
    parsed, fields, times = peers.parse_label(label), ModelConfig(**config), Times()
    answer: Row = {"settings": settings}
    if label == llama.NAME:
        context, facts = llama.loaded(fields, precision, fields.context)
        answer, forward = answer | facts, partial(llama.read, context, fields.context)
    else:
        model = peers.build(parsed, fields).to(on, getattr(torch, precision)).eval()
        if "compiled" in parsed.how:
            model.compile_layers()
        ids_BT = random_batch(fields, n_rows, on)[1][0][:, :fields.context]
        forward = partial(model, ids_BT, at_K=torch.arange(1, n_rows + 1, device=on) * fields.context - 1)
        answer["n_parameters"] = sum(p.numel() for p in model.parameters())
    with attention_of(parsed, on):
        forward()  # what it takes decides whether processes keep their memory
        while True:
            order = yield answer | measure.peak_since(imported, on)
            measure.take_turn(forward, order, times, on)
            answer = {"times": times}
            if order["release"]:
                measure.release_memory(on)


def reference(label: str, config: Row, n_rows: int, place: Row, path: str) -> Generator[Row, Row, None]:
    """The job that makes what steps are compared with: loss and gradient of new weights by the
    reference, in eager float32, row by row. path: gets the gradient."""
    on, *_ = measure.set_up(**place)
    fields = ModelConfig(**config)
    model = peers.build(peers.parse_label(label), fields).to(on).train()
    if isinstance(model, LanguageModel):
        model.activation_checkpointing = True
        model.set_impl("reference")
    task, batch = random_batch(fields, n_rows, on)
    loss, _ = compute_gradient(model, task, batch, 1, TrainConfig(clip=None, micro_batch_tokens=4096))
    gradients = {name: p.grad.cpu().contiguous() for name, p in model.named_parameters() if p.grad is not None}
    save_file(gradients, path)
    yield {"loss": loss}


def check_step(model: nn.Module, loss: float, norm: float, wanted_loss: float, gradients: str, limit: float) -> Row:
    """A row's "check": the largest relative error of a step's loss and gradients. norm: of the
    gradients; gradients: the file of those that are wanted. Raises NumericsError above the limit.

    Each parameter's gradient is measured against its own norm, at least 1e-9 of the whole: new
    weights let attention contribute little, and what is wrong with it would be lost in the whole.
    The gradient of a single number is a sum over all tokens that may cancel to nothing: it is
    measured together with its likes in other layers, and may be ten times as far off."""
    errors = {"the loss": abs(loss - wanted_loss) / wanted_loss}
    together: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, expected in load_file(gradients).items():
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        of_layers = re.sub(r"\.\d+\.", ".*.", name) if expected.numel() == 1 else name
        together.setdefault(of_layers, []).append((gradient.cpu().flatten(), expected.flatten()))
    for name, pairs in together.items():
        found, expected = (torch.cat(each).double() for each in zip(*pairs, strict=True))
        error = (found - expected).norm().item() / max(expected.norm().item(), 1e-9 * norm)
        errors[name] = error / (10 if pairs[0][1].numel() == 1 else 1)
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    if not errors[worst] <= limit:
        raise NumericsError("not the same step as in eager float32",
                            f"{worst}: relative error {errors[worst]:.2g}, the limit is {limit:.2g}")
    what = "loss and gradients against eager float32 of the same weights"
    return {"what": what, "error": errors[worst], "worst": worst, "limit": limit}


def random_batch(config: ModelConfig, n_rows: int, device: torch.device) -> tuple[Objective, list[Tensor]]:
    """The task of a training run, and a batch of random tokens in rows of the model's context."""
    generator, no_stream = np.random.default_rng(0), cast(Any, None)  # the batch is given, and nothing is read
    n_tokens = config.context
    ids = generator.integers(config.vocab_size, size=(n_rows, n_tokens + 1))
    if config.causal:
        return NextToken(no_stream, no_stream, no_stream), [torch.from_numpy(ids).to(device)]
    chosen = generator.random((n_rows, n_tokens)) < 0.15  # token 0 is the mask: new weights would copy what they see
    masked = np.where(chosen, 0, ids[:, 1:]), np.where(chosen, ids[:, 1:], NO_TARGET)
    return MaskedTokens(no_stream, no_stream, no_stream), [torch.from_numpy(part).to(device) for part in masked]


def step_cases(labels: Sequence[str], contexts: Sequence[int], precisions: Sequence[Any], *, tokens: int,
               config_of: Callable[[str], ModelConfig], reads: bool = False) -> list[StepCase]:
    """Raises UsageError for an unknown label, and where llama.cpp would train. Only it has q8_0."""
    parsed = [peers.parse_label(text) for text in labels]
    has_llama = any(label.model == llama.NAME for label in parsed)
    if has_llama:
        require(reads, "llama.cpp does not train", llama.NAME, "give --reads")
        llama.library()
    return [StepCase(label, replace(config_of(label.preset), context=context), tokens, precision, reads=reads)
            for context in contexts for precision in precisions for label in parsed
            if precision != llama.QUANTIZED or label.model == llama.NAME or not has_llama]
