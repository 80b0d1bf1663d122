"""Forward and backward of one op at the size a model gives it: its kernels beside the PyTorch reference.

Whether kernels compute what the reference does is not asked here: tests/ops/test_gpu.py holds them to float64.
"""

import importlib
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from benchmarks import Row, measure
from benchmarks.measure import Case, Setup, Times, rss_bytes
from lineartime.base.settings import require_name
from lineartime.config import ModelConfig, to_dict
from lineartime.ops import reference
from lineartime.ops.reference import rotary
from lineartime.training.runtime import peak_rss_bytes

VARIANTS = ("reference", "compiled", "triton")
"""The PyTorch reference, the same compiled, and the kernels, which run on a GPU only."""

Inputs = dict[str, Tensor]
Implementation = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Op:
    """One op as a model has it."""

    inputs: Callable[[ModelConfig, int], Inputs]
    """Its tensors for a model and a number of rows, in the order of its parameters."""
    module: str
    """The module of `lineartime.ops` that has its kernels."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Keywords of the op, and the fields of a model that they get."""
    wide: tuple[str, ...] = ()
    """Inputs that are float32 in a step of bfloat16 too."""
    fixed: tuple[str, ...] = ()
    """Inputs that have no gradient."""


def gated_inputs(config: ModelConfig, n_rows: int) -> Inputs:
    """What a GAU layer has between its projections. gamma and beta are larger than in a new layer: their product with z
    must show in the scores."""
    n_heads, n, s = (2, config.context, config.qk_width) if config.chunk_size is None else (
        4, config.chunk_size, config.qk_width)
    sin, cos = rotary(torch.arange(config.context)[None], s, torch.float32)
    return {"uvz": torch.randn(n_rows, config.context, 2 * config.v_width + s), "gamma": torch.randn(n_heads, s),
            "beta": torch.randn(n_heads, s), "sin": sin, "cos": cos, "w": torch.randn(2 * n - 1) * 0.02}


PARAMETERS = ("gamma", "beta", "sin", "cos", "w")
OPS: dict[str, Op] = {
    "gated_chunk_attention": Op(gated_inputs, "mixed_chunk", {"chunk_size": "scale_len", "causal": "causal"},
                                PARAMETERS, ("sin", "cos")),
    "gated_quadratic_attention": Op(gated_inputs, "quadratic", {"scale_len": "scale_len", "causal": "causal"},
                                    PARAMETERS, ("sin", "cos"))}

MODEL_OF = {"gated_quadratic_attention": "flash-quad"}
"""The preset whose sizes an op has, where it is not FLASH."""


def benchmark_op(name: str, configs: Sequence[ModelConfig], setup: Setup, *, tokens: int = 8192,
                 precisions: Sequence[str] = ("float32",)) -> Iterator[list[Row]]:
    """Time and memory of forward and backward of one op; for each type and model yields a row per implementation.

    The op has the sizes that a model gives it in a step of `tokens` (one row where the context is longer). The
    implementations take turns. Kernels are left out on a processor. Raises UsageError for an
    unknown op or type."""
    require_name("op", name, OPS)
    measure.require_measurable(precisions, models=len(configs), repeats=setup.repeats, tokens=tokens)
    for precision, config in itertools.product(precisions, configs):
        n_rows, cases = max(tokens // config.context, 1), []
        for variant in VARIANTS if setup.device == "cuda" else VARIANTS[:-1]:
            row = {"model": name, "variant": variant, "label": f"{name}:{variant}", "config": to_dict(config),
                   "n_parameters": 0, "context_tokens": config.context, "batch_size": n_rows,
                   "tokens_per_step": n_rows * config.context, "dtype": precision, "unit": "call"}
            cases.append(Case(measure_op, {
                "name": name, "label": variant, "config": to_dict(config), "n_rows": n_rows, "precision": precision,
                "place": setup.place}, row, n_rows * config.context))
        yield measure.side_by_side(cases, "op", setup, 2)


def implementation(name: str, variant: str, config: ModelConfig) -> Implementation:
    """An op as a model calls it, in one of the `VARIANTS`: a function of its tensors."""
    op = OPS[name]
    # Kernels are imported only when they are called: Triton is not everywhere.
    module = importlib.import_module(f"lineartime.ops.{op.module}") if variant == "triton" else reference
    function = partial(getattr(module, name), **{key: getattr(config, value) for key, value in op.settings.items()})
    return torch.compile(function) if variant == "compiled" else function


def measure_op(name: str, label: str, config: Row, n_rows: int, precision: str,
               place: Row) -> Generator[Row, Row, None]:
    """The job of an implementation, which is called whenever it is asked."""
    on, settings = measure.set_up(**place)
    fields, op = ModelConfig(**config), OPS[name]
    function, inputs = implementation(name, label, fields), op.inputs(fields, n_rows)
    inputs = typed(op, inputs, on, getattr(torch, precision))
    cotangents = [torch.randn_like(out) for out in outputs(function, inputs)]
    # The first whole call says how much memory it takes, and warms up.
    measure.release_memory(on)
    before = torch.cuda.memory_allocated(on) if on.type == "cuda" else rss_bytes() or peak_rss_bytes()
    measure.forget_peak(on)
    gradients(outputs(function, inputs), inputs, cotangents)
    answer: Row = {"settings": settings, **measure.peak_since(before, on)}
    both, forward, backward = Times(), Times(), Times()
    while True:
        order = yield answer
        # Forward and backward are marked apart; both together are what is compared.
        for timed in [False] * order["warm"] + [order["timed"]]:
            measure.wait(on)
            begun = measure.mark(on)
            made = outputs(function, inputs)
            between = measure.mark(on)
            gradients(made, inputs, cotangents)
            ended = measure.mark(on, done=True)
            del made
            if timed:
                for times, marks in ((both, [begun, ended]), (forward, [begun, between]), (backward, [between, ended])):
                    measure.add_times(times, marks)
        if both:
            clock = "gpu_ms" if "gpu_ms" in both else "cpu_ms"
            answer = {"times": both, "forward": {"ms": measure.spread(forward[clock])},
                      "backward": {"ms": measure.spread(backward[clock])}}


def typed(op: Op, inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Copies on a device, in a type; `op.wide` are float32 at least. All want a gradient but `op.fixed`."""
    def copied(key: str, x: Tensor) -> Tensor:
        kind = torch.promote_types(dtype, torch.float32) if key in op.wide else dtype
        return x.detach().to(device, kind).requires_grad_(key not in op.fixed)

    return {key: copied(key, x) for key, x in inputs.items()}


def outputs(function: Implementation, inputs: Inputs) -> tuple[Tensor, ...]:
    out = function(*inputs.values())
    return (out,) if isinstance(out, Tensor) else out


def gradients(outs: Sequence[Tensor], inputs: Inputs, cotangents: Sequence[Tensor]) -> Inputs:
    """Of the sum of the outputs' products with `cotangents`, by every input that has one."""
    wanted = {key: x for key, x in inputs.items() if x.requires_grad}
    given = [x.to(out.dtype) for x, out in zip(cotangents, outs, strict=True)]
    return dict(zip(wanted, torch.autograd.grad(outs, list(wanted.values()), given), strict=True))
