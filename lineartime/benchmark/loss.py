"""The loss over a large vocabulary: an op whose memory is also counted, where it does not fit."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lineartime.benchmark import Row, measure
from lineartime.benchmark.measure import OnRows, Progress, ignore
from lineartime.benchmark.op import (
    OPS,
    Implementation,
    Inputs,
    head_inputs,
    plain,
    times_in_turn,
    typed,
    value_and_gradients,
)
from lineartime.ops.cross_entropy import linear_cross_entropy
from lineartime.ops.dtypes import at_least_float32
from lineartime.settings import require_name

LIMITS = {"float32": 1e-5, "bfloat16": 0.02}
"""Largest relative error of the losses and of any gradient that is let pass, against the plain loss in float64."""

CHECKED_TOKENS = 512

OP = OPS["linear_cross_entropy"]
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def of_torch(reduction: str) -> Loss:
    """`F.linear_cross_entropy` by chunks of its own choice. Autocast does not reach it, so inputs are cast before."""
    def loss(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_N: Tensor) -> Tensor:
        device = x_ND.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_ND.dtype
        x_ND, weight_VD, bias_V = (t.to(dtype) for t in (x_ND, weight_VD, bias_V))
        options = torch.nn.LinearCrossEntropyOptions()
        return at_least_float32(F.linear_cross_entropy(x_ND, weight_VD, targets_N, linear_bias=bias_V,
                                                       reduction=reduction, options=options))
    return loss


def implementations() -> dict[str, Loss]:
    """By name: losses of the tokens, or their sum."""
    found: dict[str, Loss] = {"plain": plain, "by chunks": linear_cross_entropy}
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        found |= {"torch": of_torch("none"), "torch sum": of_torch("sum")}
    return found


def mean(loss: Loss, precision: str) -> Implementation:
    """The mean loss as a training step takes it."""
    def mean_loss(**inputs: Tensor) -> Tensor:
        with torch.autocast(inputs["x"].device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            return loss(*inputs.values()).sum() / len(inputs["targets"])
    return mean_loss


def benchmark_loss(*, vocab_size: int = 32_000, d_model: int = 768, tokens: int = 8192, many_tokens: int = 2**18,
                   precisions: Sequence[str] = ("float32", "bfloat16"), repeats: int = 3, threads: int = 1,
                   device: str = "cpu", seed: int = 0, progress: Progress = ignore,
                   on_rows: OnRows = ignore) -> list[Row]:
    """Time and memory of the loss of `tokens` hidden vectors, forward and backward; a row per implementation and type.

    Those of one type are one process, in which they take turns. Memory is what they need above their inputs; for
    `many_tokens` it is counted, and measured too where less than half of what is free is counted. Before a time counts,
    losses and gradients have been compared with float64. Raises UsageError for a wrong number or type, ResourceError
    where the process dies."""
    measure.require_positive(vocab_size=vocab_size, d_model=d_model, tokens=tokens, many_tokens=many_tokens,
                             repeats=repeats, threads=threads)
    for precision in precisions:
        require_name("precision", precision, LIMITS)
    cases = [(f"{tokens:,} tokens, {precision}", {
        "sizes": [tokens, vocab_size, d_model], "many_tokens": many_tokens, "precision": precision, "repeats": repeats,
        "threads": threads, "device": device, "seed": seed}) for precision in precisions]

    def row_of(case: Row, name: str, found: Row) -> Row:
        return {"benchmark": "loss", "cell": None, "model": "linear_cross_entropy", "variant": name,
                "label": f"loss:{name}", "config": None, "vocab_size": vocab_size, "d_model": d_model,
                "n_parameters": vocab_size * (d_model + 1), "context_tokens": tokens, "tokens_per_step": tokens,
                "dtype": case["precision"], "device": device, "threads": threads, "unit": "call", **found,
                "tokens_per_s": measure.tokens_per_s(found, tokens), "flops_per_token": 6 * vocab_size * d_model,
                "warm_up": 2, "repeats": repeats}

    return measure.measured_side_by_side("loss", "the loss", cases, row_of, progress, on_rows)


def measure_loss(sizes: Sequence[int], many_tokens: int, precision: str, repeats: int, threads: int, device: str,
                 seed: int) -> Iterator[Row]:
    """One process's part of `benchmark_loss`."""
    on, settings = measure.set_up(threads, device, seed)
    (n_tokens, *head), losses, one = sizes, implementations(), [torch.ones((), device=on)]
    every = {name: mean(loss, precision) for name, loss in losses.items()}
    inputs = random_inputs(n_tokens, *head, device=on)
    few = {key: t[:CHECKED_TOKENS] if key in ("x", "targets") else t for key, t in inputs.items()}
    expected = value_and_gradients(mean(plain, "float32"), typed(OP, few, on, torch.float64), one)
    few = typed(OP, few, on, torch.float32)
    found: dict[str, Row] = {}
    for name, loss in losses.items():
        ours = value_and_gradients(every[name], few, one)
        check = measure.compare(name, ours, expected, LIMITS[precision], against="the plain loss",
                                what=f"mean loss and gradients of {CHECKED_TOKENS} tokens")
        memory = measure.peak_of(partial(value_and_gradients, every[name], inputs, one), on)
        counts = [counted_bytes(loss, [n, *head], precision) for n in (n_tokens, many_tokens)]
        few_mib, many_mib = (None if n is None else n / 2**20 for n in counts)
        found[name] = {"check": check, **memory, "counted_mib": few_mib,
                       "many_tokens": {"tokens": many_tokens, "counted_mib": many_mib, "measured_mib": None}}
    del ours, expected
    for name, (both, *_) in times_in_turn(every, inputs, one, repeats, on).items():
        found[name] |= measure.spreads(both.times)
    del inputs
    many = found["by chunks"]["many_tokens"]
    if many["counted_mib"] * 2**20 + 4 * many_tokens * (head[1] + 2) < measure.available_bytes() / 2:
        inputs = random_inputs(many_tokens, *head, device=on)
        memory = measure.peak_of(partial(value_and_gradients, every["by chunks"], inputs, one), on)
        many["measured_mib"] = memory["above_import_mib"]
    yield {"settings": settings, "found": found}


def random_inputs(*sizes: int, device: torch.device) -> Inputs:
    """x, W and b that want a gradient, and targets. sizes: tokens, vocabulary and width."""
    return typed(OP, head_inputs(*sizes), device, torch.float32)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations have made and that still live, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(t.untyped_storage()) for t in (*args, *(kwargs or {}).values()) if isinstance(t, Tensor)}
        result = function(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else [result]:
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                if id(storage) not in given and storage not in self.seen:
                    self.seen.add(storage)
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self.forget, storage.nbytes())
        self.most = max(self.most, self.live)
        return result

    def forget(self, n_bytes: int) -> None:
        self.live -= n_bytes


def counted_bytes(loss: Loss, sizes: Sequence[int], precision: str) -> int | None:
    """The most bytes that tensors take in one forward and backward pass, inputs left out, without a number computed;
    None for what does not show what it does."""
    if loss not in (plain, linear_cross_entropy):
        return None
    with FakeTensorMode():
        inputs = random_inputs(*sizes, device=torch.device("cpu"))
        with LiveBytes() as count:
            value_and_gradients(mean(loss, precision), inputs, [torch.ones(())])
    return count.most


def print_loss(rows: Sequence[Row]) -> None:
    """Print `benchmark_loss`'s rows of one run as a table."""
    first = rows[0]
    base, many = measure.compared_ms(first)["median"], first["many_tokens"]["tokens"]
    measure.print_runs(
        f"Head and loss of {first['tokens_per_step']:,} tokens, vocabulary {first['vocab_size']:,}, "
        f"width {first['d_model']}", {
            "implementation": "{variant}", "type": "{dtype}", **measure.TIMES, "of plain": "{of_plain:.2f}",
            "MiB": "{above_import_mib:,.0f}", "counted": "{counted_mib:,.0f}",
            f"{many:,} counted": "{many_tokens[counted_mib]:,.0f}", "measured": "{many_tokens[measured_mib]:,.0f}",
            "error": "{check[error]:.1g}"},
        [row | {"of_plain": measure.compared_ms(row)["median"] / base} for row in rows])
