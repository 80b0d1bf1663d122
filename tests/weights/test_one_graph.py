"""A decode step as a function: it is `decode_step`, it is one graph, and the state that goes in is
left as it is."""

from dataclasses import replace

import pytest
import torch

from lineartime.base.errors import UsageError
from lineartime.weights.generation.generate import decode_step, prefill
from lineartime.weights.generation.step import DecodeStep
from marks import rest
from tiny_models import BIDIRECTIONAL, BOTH_GRIDS, CONTEXT, FLASH, UNPACKED, case_of, random_ids, random_model, with_end

PROMPTS = [[5], [1, 2, 3, 4, 5, 6], [7, 0, 8]]
"""At different places of their chunks; one has begun a second document."""

NO_GRAPH = [name for name in BOTH_GRIDS if name.startswith("combiner")]
GROWING = [name for name in BOTH_GRIDS if name.startswith(("transformer", "flash-quad"))]


def begun(name):
    """A step, and the state after the prompts."""
    model = random_model(with_end(BOTH_GRIDS[name]))
    return DecodeStep(model, CONTEXT if name in GROWING else None), prefill(model, PROMPTS)[1]


def assert_same_tokens(run, step, state):
    """Three chunks of tokens, some of which begin documents, give what `decode_step` gives; the
    state that goes in is left as it is."""
    tensors = step.to_tensors(state)
    ids_NB = random_ids(14, len(PROMPTS))
    assert (ids_NB == 0).any()
    for ids_B in ids_NB:
        expected, before = decode_step(step.model, ids_B, state), tensors
        kept = {name: tensor.clone() for name, tensor in before.items()}
        logits_BV, tensors = run(ids_B, before)
        assert (logits_BV - expected).abs().max() < 1e-13
        assert all(torch.equal(before[name], tensor) for name, tensor in kept.items())
    assert tensors["seq_lens_B"].tolist() == state.seq_lens_B.tolist()
    assert tensors["start_B"].tolist() == state.start_B.tolist()


@pytest.mark.parametrize("name", [case_of(name) for name in BOTH_GRIDS if name not in NO_GRAPH])
@torch.no_grad()
def test_it_is_the_step_of_decoding(name):
    step, state = begun(name)
    assert_same_tokens(step, step, state)
    state, ids_BT = step.empty_state(2), random_ids(2, 21)
    wanted_BTV = step.model(ids_BT)
    for t, ids_B in enumerate(ids_BT.T):  # and from no token on
        logits_BV, state = step(ids_B, state)
        assert (logits_BV - wanted_BTV[:, t]).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["flash", "transformer++", *rest("flash heads", "flash near and long memory",
                                                                  "performer", "flash-quad", "flash, own grid")])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@torch.no_grad()
def test_it_is_one_graph(name):
    """torch.export takes it whole, the closing of chunks included; where there is one head, for any
    number of rows."""
    step, state = begun(name)
    if step.model.config.n_heads > 1:
        program = torch.export.export(step, (torch.tensor([1, 2, 3]), step.to_tensors(state)))
    else:
        rows = {0: torch.export.Dim.DYNAMIC}
        example = step.empty_state(2)
        program = torch.export.export(step, (torch.tensor([1, 2]), example),
                                      dynamic_shapes=(rows, dict.fromkeys(example, rows)))
    assert_same_tokens(program.module(), step, state)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["flash", "flash-quad"])
@torch.no_grad()
def test_it_compiles_without_a_break(name):
    step, state = begun(name)
    assert_same_tokens(torch.compile(step, fullgraph=True, backend="aot_eager"), step, state)


def test_what_it_refuses():
    for config, window, words in (
            (BOTH_GRIDS["transformer++"], None, "a window is missing"), (FLASH, 24, "a window is not needed"),
            (BOTH_GRIDS["combiner"], None, "not one graph"),
            (UNPACKED["flash learned weights"], None, "does not decode"),
            (BIDIRECTIONAL["flash cls"], None, "only a causal model decodes"),
            (BOTH_GRIDS["flash-quad"], CONTEXT + 1, "longer than the position table"),
            (replace(FLASH, document_mask="paper", end_of_document=0), None, "keeps documents apart")):
        with pytest.raises(UsageError, match=words):
            DecodeStep(random_model(config), window)
    model = random_model(BOTH_GRIDS["transformer++"])
    with pytest.raises(UsageError, match=r"the rows fill the window: 6 tokens, window = 6"):
        DecodeStep(model, 6).to_tensors(prefill(model, PROMPTS)[1])
    own = random_model(with_end(BOTH_GRIDS["transformer++, own grid"]))  # whose caches hold one document
    step = DecodeStep(own, 6)
    made = step.to_tensors(prefill(own, [[0, *[3] * 30, 0, 1, 2]])[1])  # which has had room for a longer one
    assert {name: x.shape for name, x in made.items()} == {name: x.shape for name, x in step.empty_state(1).items()}
