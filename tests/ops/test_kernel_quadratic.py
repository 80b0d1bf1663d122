"""FLASH-Quad's kernels, and the gradients that both attentions share, held to the reference."""

from functools import partial

import pytest
import torch

import kernel_law
from kernel_law import NAMES, S, documents, error, make_inputs, run, without_bias
from lineartime.ops import gradients, quadratic, reference
from lineartime.ops.reference import rotary
from marks import rest

assert_held = partial(kernel_law.assert_held, quadratic.gated_quadratic_attention, reference.gated_quadratic_attention)


@pytest.mark.parametrize("causal", [True, False])
def test_without_a_bias_and_divided_by_a_root(causal: bool) -> None:
    kernel_law.assert_held(*(without_bias(module.gated_quadratic_attention) for module in (quadratic, reference)),
                           make_inputs(2, 67, torch.bfloat16, d_inner=16, chunk=None), scale_len=S ** 0.5,
                           causal=causal)


SMALL = [(2, 11, 16, True, True, 128), (2, 70, 48, False, False, 1000)]
"""Both directions, which `make test` has in every type."""


@pytest.mark.parametrize(("n_rows", "n_tokens", "d_inner", "causal", "with_documents", "scale_len", "dtype"), [
    *((*case, dtype) for case in SMALL for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    (3, 67, 48, True, True, 512, torch.bfloat16), (3, 1, 16, False, False, 1, torch.float32),
    *rest((1, 133, 272, False, True, 64, torch.bfloat16), (1, 129, 16, True, False, 129, torch.float32))])
def test_held_to_float64(n_rows: int, n_tokens: int, d_inner: int, causal: bool, with_documents: bool, scale_len: int,
                         dtype: torch.dtype) -> None:
    """In part of a tile, in several, and in none that is full; of columns too. Of one token there
    are three rows: with one, the gradients of gamma, beta and w are one number, and their distance
    is that number's luck."""
    inputs = make_inputs(n_rows, n_tokens, dtype, d_inner=d_inner, chunk=None, parameters=torch.float32
                         if n_rows == 3 else dtype)
    if n_rows == 3:  # each has its own positions
        position_BT = torch.arange(n_tokens) + 100 * torch.arange(3)[:, None]
        inputs["sin"], inputs["cos"] = rotary(position_BT, S, torch.float32)
    assert_held(inputs, scale_len=scale_len, causal=causal,
                segment_ids_BT=documents(n_rows, n_tokens) if with_documents else None)


@pytest.mark.parametrize(("tiles", "causal", "tile", "dtype"), [
    (1, True, 64, torch.float32), (1, False, 128, torch.bfloat16), *rest(
        (1, False, 64, torch.float32), (2, True, 64, torch.float32))])
def test_scores_in_parts(tiles: int, causal: bool, tile: int, dtype: torch.dtype,
                         monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a row's two tiles of queries at a time, or one of two rows: as with all at once. Sums
    over parts are rounded once."""
    inputs = make_inputs(2, tile + 3, dtype, d_inner=16, chunk=None, parameters=None)
    how = {"scale_len": 512, "causal": causal, "segment_ids_BT": documents(2, tile + 3)}
    whole = run(quadratic.gated_quadratic_attention, inputs, **how)
    monkeypatch.setattr(gradients, "SCORES_AT_ONCE", tiles * tile * 2 * tile)
    largest = 1e-6 if dtype == torch.float32 else 1e-4
    for name, a, b in zip(NAMES, run(quadratic.gated_quadratic_attention, inputs, **how), whole, strict=True):
        # Sums over rows and over queries are then taken in another order.
        assert torch.equal(a, b) if name == "out" else error(a, b.double()) <= largest * float(b.norm()), name
