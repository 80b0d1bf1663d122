"""The law for the kernels: at most twice the reference's error against float64."""

from collections.abc import Callable

import torch
from torch import Tensor

from lineartime.config import model_config
from lineartime.model.language_model import LanguageModel
from lineartime.ops.reference import HeadsFromZ, rotary

S = 128
NAMES = ("out", "uvz", "gamma", "beta", "w")


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def flat(op) -> Callable[..., Tensor]:
    return lambda uvz, gamma, beta, sin, cos, w, **how: op(uvz, HeadsFromZ(gamma, beta, sin, cos), w, **how)


def without_bias(op) -> Callable[..., Tensor]:
    """The op with w = None; the w given counts nothing."""
    return lambda x, heads, w, **how: op(x, heads, None, **how) + 0 * w.sum()


def run(op, inputs: dict[str, Tensor], **how) -> list[Tensor]:
    inputs = {name: x.detach() for name, x in inputs.items()}
    leaves = [inputs[name].requires_grad_() for name in NAMES[1:]]
    out = flat(op)(*inputs.values(), **how)
    given = random(*out.shape, seed=6).bfloat16().to(out)  # the same in every type
    return [out.detach(), *torch.autograd.grad(out, leaves, given)]


def error(a: Tensor, exact: Tensor) -> float:
    return float((a.double() - exact).norm())


def assert_near(ours: list[Tensor], theirs: list[Tensor], exact: list[Tensor], floor: float = 0.0,
                names: tuple[str, ...] = ()) -> None:
    """The reference's dtypes and shapes, and at most twice as far from float64. floor: a relative
    error that is let pass in float32 and float64."""
    for n, (a, b, x) in enumerate(zip(ours, theirs, exact, strict=True)):
        name = names[n] if names else n
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        let_pass = floor * float(x.norm()) if a.dtype in (torch.float32, torch.float64) else 0.0
        assert error(a, x) <= max(2 * error(b, x), let_pass), name


def assert_held(kernel, reference, inputs: dict[str, Tensor], floor: float | None = None, **how) -> None:
    exact = run(reference, {name: x.double() for name, x in inputs.items()}, **how)
    # Float32 is at its rounding in both, where twice is a matter of luck.
    floor = floor or (1e-6 if inputs["uvz"].dtype == torch.float32 else 0.0)
    assert_near(*(run(op, inputs, **how) for op in (kernel, reference)), exact, floor, NAMES)


def make_inputs(n_rows: int, n_tokens: int, dtype: torch.dtype, *, d_inner: int = 64, chunk: int | None = 128,
                parameters: torch.dtype | None = torch.float32) -> dict[str, Tensor]:
    """As under autocast: uvz is short, parameters and angles are not. chunk None: of FLASH-Quad."""
    sin, cos = rotary(torch.arange(n_tokens)[None], S, torch.float32)
    n_heads = 4 if chunk else 2
    made = {"gamma": 0.5 + random(n_heads, S, seed=1) / 3, "beta": random(n_heads, S, seed=2) / 3, "sin": sin,
            "cos": cos, "w": random(2 * (chunk or n_tokens) - 1, seed=3) / 3}
    return {"uvz": random(n_rows, n_tokens, 2 * d_inner + S, seed=4).to(dtype),
            **{name: x.to(parameters or dtype) for name, x in made.items()}}


def documents(n_rows: int, n_tokens: int) -> Tensor:
    """Several to a row, of one token too and longer than a chunk, and padding in the last row.
    Their numbers have gaps, as with `document_grid` "own"."""
    begins = random(n_rows, n_tokens, seed=5) > 2.2
    begins[:, n_tokens // 3 : n_tokens // 3 + 2] = True
    ids = 2 * begins.cumsum(1)
    ids[-1, n_tokens - n_tokens // 7 :] = -1
    return ids


def tiny(preset: str, **fields: object) -> LanguageModel:
    torch.manual_seed(0)
    chunk = {"chunk_size": 128} if preset == "flash" else {}
    sizes = {"n_layers": 2, "d_model": 64, "vocab_size": 64, "context": 256}
    return LanguageModel(model_config(preset, **{**sizes, **chunk, **fields}))


def head_inputs(n_rows: int, n_tokens: int, s: int, dtype: torch.dtype, chunk: int = 128) -> dict[str, Tensor]:
    """What attention of made heads takes: the same numbers in every type."""
    return {"uv": random(n_rows, n_tokens, 2 * 64, seed=4).bfloat16().to(dtype),
            "heads": (0.7 * random(4, n_rows, n_tokens, s, seed=7)).bfloat16().to(dtype),
            "w": random(2 * chunk - 1, seed=3) / 3, "gate": random(n_rows, n_tokens, seed=9)}


def gated_heads(leaves: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
    """The heads of `head_inputs` with gates on the linear keys, and the gates."""
    gate_BT = leaves["gate"].sigmoid()
    *heads, k_lin = leaves["heads"]
    return [*heads, k_lin * gate_BT[..., None].to(k_lin.dtype)], gate_BT


def run_heads(op, inputs: dict[str, Tensor], gated: bool, **how: object) -> list[Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    heads, gate_BT = gated_heads(leaves)
    out = op(leaves["uv"], heads, leaves["w"], gate_BT=gate_BT if gated else None, **how)
    given = random(*out.shape, seed=6).bfloat16().to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), given)]
