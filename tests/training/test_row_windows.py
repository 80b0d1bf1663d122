"""A row in windows: the gradient of the whole row, faults, memory, compiled code, a run, refusals."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from context_ranks import BEGIN, LENGTH, ON_PUSH, SHARED, Tokens, model_of, run_of
from lineartime.base.errors import UsageError
from lineartime.config import TrainConfig
from lineartime.folders import read_metrics
from lineartime.training.gradient import compute_gradient
from lineartime.training.language import train
from marks import rest
from tiny_models import CONFIGS, random_ids
from tiny_runs import SETTINGS, prepare_text

CONFIG = TrainConfig(tokens_per_step=4 * LENGTH, micro_batch_tokens=LENGTH, clip=0.1)
LAYOUTS = [BEGIN[n] for n in (1, 3, 4)]
"""Documents that begin with parts, with one part alone, and with the tokens before parts."""


def gradient_of(model, n_windows=1):
    """The loss, the norm and the gradients of a step. Each of the `LAYOUTS` is a micro-batch of its own."""
    rows_BL = 1 + random_ids(len(LAYOUTS), LENGTH + 1, seed=3, vocab_size=model.config.vocab_size - 1)
    for row_L, at in zip(rows_BL, LAYOUTS, strict=True):
        row_L[list(at)] = 0
    found = compute_gradient(model, Tokens(), [rows_BL], 1, CONFIG, n_windows=n_windows)
    return found, [p.grad.clone() for p in model.parameters()]


def error_of(found, wanted):
    """The largest error of the loss, of the norm, and of the gradients in parts of the largest entry of each."""
    (found, gradients), (wanted, others) = found, wanted
    most = max(g.abs().max() for g in others)
    return max(*(abs(a - b) for a, b in zip(found, wanted, strict=True)),
               *(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3 * most))
                 for a, b in zip(gradients, others, strict=True)))


@pytest.mark.parametrize("name", [*ON_PUSH, *rest(*(name for name in SHARED if name not in ON_PUSH))])
def test_the_gradient_is_that_of_the_whole_row(name):
    model = model_of(name, True, end_of_document=0)
    whole = gradient_of(model)
    for n_windows in (2, 3, 4):
        error = error_of(gradient_of(model, n_windows), whole)
        assert error < 1e-12, n_windows


def test_two_threads_do_not_read_each_others_states():
    models = [model_of("flash", True, end_of_document=0) for _ in range(2)]
    wanted = gradient_of(models[0], 4)
    with ThreadPoolExecutor(2) as pool:
        for several in pool.map(lambda model: [gradient_of(model, 4) for _ in range(10)], models):
            assert max(error_of(found, wanted) for found in several) < 1e-12


def most_kept(model, n_windows, rows_BL):
    """The largest number of elements that autograd keeps for the backward pass of one window."""
    kept, most = 0, 0

    def pack(x):
        nonlocal kept, most
        kept += x.numel()
        most = max(most, kept)
        return x

    class Counting(Tokens):
        def losses(self, *args, **kwargs):
            nonlocal kept
            kept = 0
            return super().losses(*args, **kwargs)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        compute_gradient(model, Counting(), [rows_BL], 1, CONFIG, n_windows=n_windows)
    return most


def test_activations_do_not_grow_with_the_row():
    model = model_of("flash long memory", True)
    two, eight = (most_kept(model, n, random_ids(1, n * LENGTH + 1, seed=5)) for n in (2, 8))
    assert eight < 1.1 * two < 0.2 * most_kept(model, 1, random_ids(1, 8 * LENGTH + 1, seed=5))


@pytest.mark.rest
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_layers_are_compiled_a_few_times_for_any_number_of_windows():
    torch.compiler.reset()
    model, compiled = model_of("flash long memory", True), []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    plain = gradient_of(model, 6)[1]
    for layer in model.layers:
        layer.add = torch.compile(layer.add, backend=backend, fullgraph=True)
    for a, b in zip(plain, gradient_of(model, 6)[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    n_compiled = len(compiled)
    gradient_of(model, 6)
    assert len(compiled) == n_compiled <= 8


def test_a_run_learns_what_whole_rows_teach(tmp_path):
    data = prepare_text(tmp_path)
    settings = {"model": "flash", "data": str(data), **SETTINGS, "steps": 4}
    for name, window in (("whole", None), ("windows", SETTINGS["context"] // 4)):
        train({**settings, "window_tokens": window, "out": str(tmp_path / name)}, device="cpu")
    losses, norms = ([[line[key] for line in read_metrics(tmp_path / name) if "grad_norm" in line]
                      for name in ("whole", "windows")] for key in ("loss", "grad_norm"))
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and norms[1] == pytest.approx(norms[0], rel=1e-3)


@pytest.mark.parametrize(("name", "window", "changes", "said"), [
    ("flash", 0, {}, "window_tokens must be at least 1: window_tokens = 0"),
    ("flash", 10, {}, "a row must be whole windows, and a window whole chunks: context"),
    ("flash", CONFIGS["flash"].chunk_size + 1, {}, "a row must be whole windows"),
    ("transformer++", 8, {}, "window_tokens is for mixed chunk attention .*set window_tokens = none"),
    ("flash overlap", CONFIGS["flash"].chunk_size, {}, "window_tokens does not go with overlap"),
    ("flash first to all", 8, {}, "window_tokens is for causal models"),
    ("flash, own grid", CONFIGS["flash"].chunk_size, {}, "document_grid: document_grid = own; set document_grid = row"),
    ("flash", CONFIGS["flash"].chunk_size, {"activation_checkpointing": True},
     "window_tokens does not go with activation_checkpointing"),
    ("flash", CONFIGS["flash"].chunk_size, {"context_parallel": 2}, "window_tokens does not go with context_parallel"),
    ("flash", CONFIGS["flash"].chunk_size, {"shard": True, "clip_scope": "global"},
     "window_tokens does not go with shard")])
def test_refusals(name, window, changes, said):
    with pytest.raises(UsageError, match=said):
        run_of(name, window_tokens=window, **changes)
