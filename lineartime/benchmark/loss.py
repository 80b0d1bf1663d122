"""The loss over a large vocabulary: time side by side, and memory, counted where it does not fit."""

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
from lineartime.benchmark.measure import OnRows, Progress, Stopwatch, ignore
from lineartime.ops.cross_entropy import linear_cross_entropy
from lineartime.ops.dtypes import at_least_float32
from lineartime.settings import require_name

LIMITS = {"float32": 1e-5, "bfloat16": 0.02}
"""Largest relative error of the losses and of any gradient that is let pass, against the plain loss in float64."""

CHECKED_TOKENS = 512

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def plain(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_N: Tensor) -> Tensor:
    """The loss with all logits in memory."""
    return F.cross_entropy(at_least_float32(F.linear(x_ND, weight_VD, bias_V)), targets_N, reduction="none")


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
    rows = []
    for precision in precisions:
        require_name("precision", precision, LIMITS)
        progress(f"loss of {tokens:,} tokens, {precision}")
        answer = measure.measured_alone("loss", {
            "sizes": [tokens, vocab_size, d_model], "many_tokens": many_tokens, "precision": precision,
            "repeats": repeats, "threads": threads, "device": device, "seed": seed},
            "the loss failed", f"{tokens:,} tokens, {precision}")
        shared = {"settings": answer["settings"], **measure.facts_of_run()}
        made = [{"benchmark": "loss", "cell": None, "model": "linear_cross_entropy", "variant": name,
                 "label": f"loss:{name}", "config": None, "vocab_size": vocab_size, "d_model": d_model,
                 "n_parameters": vocab_size * (d_model + 1), "context_tokens": tokens, "tokens_per_step": tokens,
                 "dtype": precision, "device": device, "threads": threads, "unit": "call", **found,
                 "tokens_per_s": tokens * 1e3 / measure.compared_ms(found)["median"],
                 "flops_per_token": 6 * vocab_size * d_model, "warm_up": 2, "repeats": repeats, **shared}
                for name, found in answer["found"].items()]
        on_rows(made)
        rows += made
    return rows


def measure_loss(sizes: Sequence[int], many_tokens: int, precision: str, repeats: int, threads: int, device: str,
                 seed: int) -> Iterator[Row]:
    """One process's part of `benchmark_loss`."""
    on, settings = measure.set_up(threads, device, seed)
    (n_tokens, *head), every = sizes, implementations()
    inputs = random_inputs(n_tokens, *head, device=on)
    few = [t.detach()[:CHECKED_TOKENS] if i in (0, 3) else t.detach() for i, t in enumerate(inputs)]
    expected = losses_and_gradients(plain, [t.double().requires_grad_() for t in few[:3]] + few[3:], "float32")
    found: dict[str, Row] = {}
    for name, loss in every.items():
        ours = losses_and_gradients(loss, [t.requires_grad_() for t in few[:3]] + few[3:], precision)
        check = measure.compare(name, ours, expected, LIMITS[precision], against="the plain loss",
                                what=f"mean loss and gradients of {CHECKED_TOKENS} tokens")
        peak, above = measure.peak_of(partial(losses_and_gradients, loss, inputs, precision), on)
        many = counted_bytes(loss, [many_tokens, *head], precision)
        found[name] = {"check": check, "peak_mib": mib(peak), "above_import_mib": mib(above),
                       "counted_mib": mib(counted_bytes(loss, sizes, precision)),
                       "many_tokens": {"tokens": many_tokens, "counted_mib": mib(many), "measured_mib": None}}
    del expected
    watches = {name: Stopwatch(on) for name in every}
    for _, name in measure.in_turn([*every], range(repeats)):
        with watches[name].running():
            losses_and_gradients(every[name], inputs, precision)
    del inputs, few
    for name, loss in every.items():
        found[name] |= measure.spreads(watches[name].times)
        counted, n_inputs = found[name]["many_tokens"]["counted_mib"], 4 * many_tokens * (head[1] + 2) / 2**20
        if counted is not None and (counted + n_inputs) * 2**20 < measure.available_bytes() / 2 and name == "by chunks":
            many_inputs = random_inputs(many_tokens, *head, device=on)
            _, above = measure.peak_of(partial(losses_and_gradients, loss, many_inputs, precision), on)
            found[name]["many_tokens"]["measured_mib"] = mib(above)
    yield {"settings": settings, "found": found}


def random_inputs(n_tokens: int, vocab_size: int, d_model: int, *, device: torch.device) -> list[Tensor]:
    """x, W and b that want a gradient, and targets: logits are of about 1."""
    numbers = [torch.randn(n_tokens, d_model, device=device), torch.randn(vocab_size, d_model, device=device),
               torch.randn(vocab_size, device=device)]
    numbers[1] /= d_model**0.5
    return [t.requires_grad_() for t in numbers] + [torch.randint(vocab_size, (n_tokens,), device=device)]


def losses_and_gradients(loss: Loss, inputs: Sequence[Tensor], precision: str) -> dict[str, Tensor]:
    """The mean loss and its gradients, as a training step takes them."""
    with torch.autocast(inputs[0].device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        x_ND, weight_VD, bias_V, targets_N = inputs
        mean = loss(x_ND, weight_VD, bias_V, targets_N).sum() / len(targets_N)
    gradients = torch.autograd.grad(mean, inputs[:3])
    return dict(zip(("loss", "gradient of x", "gradient of W", "gradient of b"), (mean.detach(), *gradients),
                    strict=True))


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
    with FakeTensorMode():
        inputs = random_inputs(*sizes, device=torch.device("cpu"))
        with LiveBytes() as count:
            losses_and_gradients(loss, inputs, precision)
    return count.most if loss in (plain, linear_cross_entropy) else None


def mib(n_bytes: int | None) -> float | None:
    return None if n_bytes is None else n_bytes / 2**20


def print_loss(rows: Sequence[Row]) -> None:
    """Print `benchmark_loss`'s rows of one run as a table."""
    first = rows[0]
    base, many = measure.compared_ms(first)["median"], first["many_tokens"]["tokens"]

    def texts(row: Row) -> list[str]:
        memory = [row["above_import_mib"], row["counted_mib"], *(row["many_tokens"][key] for key in (
            "counted_mib", "measured_mib"))]
        return [row["variant"], *measure.quartiles(row), f"{measure.compared_ms(row)['median'] / base:.2f}",
                *("" if value is None else f"{value:,.0f}" for value in memory), f"{row['check']['error']:.1g}"]

    what = (f"Head and loss of {first['tokens_per_step']:,} tokens, vocabulary {first['vocab_size']:,}, "
            f"width {first['d_model']}")
    columns = ["implementation", "ms", "quartiles", "of plain", "MiB", "counted", f"{many:,} counted", "measured",
               "error"]
    measure.print_table(measure.heading(what, first), columns, map(texts, rows), width=16)
