"""Forward and backward of one op: the PyTorch reference, the same compiled and, on a GPU, the
kernels, in turns. That all compute the same is asked by tests/ops/test_gpu.py, in float64."""

import uuid
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import Row, measure
from benchmarks.measure import Setup, Times
from benchmarks.provenance import provenance
from lineartime.base.settings import require_name
from lineartime.config import ModelConfig, to_dict
from lineartime.ops import reference

OPS = {"gated_chunk_attention": "flash", "gated_quadratic_attention": "flash-quad"}
"""Ops by name, and the preset whose sizes they have."""


def benchmark_op(name: str, config: ModelConfig, setup: Setup, *, tokens: int, precision: str) -> list[Row]:
    """Rows of an op's implementations. Raises UsageError for an unknown op or type."""
    require_name("op", name, OPS)
    measure.require_measurable([precision], repeats=setup.repeats, tokens=tokens)
    device, settings, _ = measure.set_up(**setup.place)
    n_rows, times = max(tokens // config.context, 1), dict[str, Times]()
    inputs = gated_inputs(config, n_rows, device, getattr(torch, precision))
    functions = implementations(name, config, device)
    for number in range(-1, setup.repeats):  # a first round is not timed
        for variant, function in functions.items():
            measure.take_turn(lambda op=function: op(*inputs.values()).square().mean().backward(),  # type: ignore[misc]
                              {"warm": 0, "timed": number >= 0}, times.setdefault(variant, {}), device)
    shared = {"benchmark": "op", "cell": None, "run": uuid.uuid4().hex[:12], "model": name, "config": to_dict(config),
              "n_parameters": 0, "context_tokens": config.context, "batch_size": n_rows, "dtype": precision,
              "tokens_per_step": n_rows * config.context, "unit": "call", "repeats": setup.repeats,
              "threads": setup.threads, "device": setup.device, "settings": settings, **provenance()}
    return [{"variant": variant, "label": f"{name}:{variant}"} | measure.spreads(own, n_rows * config.context) | shared
            for variant, own in times.items()]


def implementations(name: str, config: ModelConfig, device: torch.device) -> dict[str, Callable[..., Tensor]]:
    length = "scale_len" if config.chunk_size is None else "chunk_size"
    how = {length: config.scale_len, "causal": config.causal}
    plain = flat(getattr(reference, name), **how)
    made: dict[str, Callable[..., Tensor]] = {"reference": plain, "compiled": torch.compile(plain)}
    if device.type == "cuda":  # Triton is not everywhere
        from lineartime.ops import mixed_chunk, quadratic

        made["triton"] = flat(getattr(quadratic if config.chunk_size is None else mixed_chunk, name), **how)
    return made


def flat(op: Callable[..., Tensor], **how: object) -> Callable[..., Tensor]:
    """An op as a function of what `gated_inputs` has."""
    return lambda uvz, gamma, beta, sin, cos, w: op(uvz, reference.HeadsFromZ(gamma, beta, sin, cos), w, **how)


def gated_inputs(config: ModelConfig, n_rows: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a GAU has between its projections. All but the angles want a gradient."""
    n_heads, n = (2, config.context) if config.chunk_size is None else (4, config.chunk_size)
    with device:
        sin, cos = reference.rotary(torch.arange(config.context)[None], config.qk_width, torch.float32)
        uvz = torch.randn(n_rows, config.context, 2 * config.v_width + config.qk_width, dtype=dtype)
        gamma, beta, w = *torch.randn(2, n_heads, config.qk_width), torch.randn(2 * n - 1) * 0.02
    made = {"uvz": uvz, "gamma": gamma, "beta": beta, "sin": sin, "cos": cos, "w": w}
    return {name: x.requires_grad_(name not in ("sin", "cos")) for name, x in made.items()}
