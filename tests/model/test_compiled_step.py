"""Decoding in C is the parallel forward in float64, to float32's rounding; who has PyTorch's."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lineartime.base.errors import NumericsError, UsageError
from lineartime.model.decoding import compiled_step
from lineartime.model.decoding.state import DecodingState
from lineartime.model.language_model import LanguageModel
from lineartime.ops import compiled
from lineartime.weights.generation.generate import generate
from lineartime.weights.load import load_model
from marks import rest
from tiny_models import BOTH_GRIDS, CHUNK, FLASH, difference, drawn, random_ids, random_model, with_end

pytestmark = pytest.mark.skipif(compiled.library() is None, reason=compiled.in_words())
END, LENGTH = 0, 3 * CHUNK + 2
MODELS = {name: with_end(config) for name, config in BOTH_GRIDS.items() if config.ffn == "gau" and not config.layers
          and config.attends_as_flash and config.chunk_size and config.n_heads == 1 and not config.token_shift}
PLUS = MODELS["flash+, own grid"]
MODELS["others' options"] = replace(PLUS, rotary_dim=2, bias=False, position_bias=False, norm_eps=0.1, tied_head=False,
                                    head_norm="scale_norm", abs_pos="learned", local_key_conv=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions of the C file that are called."""
    found, plain = [], compiled_step.call
    monkeypatch.setattr(compiled_step, "call", lambda name, *rest: found.append(name) or plain(name, *rest))
    return found


def rows_with_documents() -> Tensor:
    """Four rows, whose documents begin and end inside chunks, at their ends and not at all."""
    ids_BT = random_ids(4, LENGTH) % 12 + 1
    ids_BT[1, [3, 4, 9]] = END
    ids_BT[2, [0, 4, 5, 8, 12]] = END
    ids_BT[3] = random_ids(LENGTH, vocab_size=3)
    return ids_BT


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_every_split(name: str, calls: list[str], tmp_path: Path) -> None:
    """PyTorch hands over anywhere; rows are chosen as beam search does; a file holds the state."""
    model, ids_BT = random_model(MODELS[name]).float(), rows_with_documents()
    x_BTD, chosen = random_model(MODELS[name]).hidden(ids_BT).float(), torch.tensor([2, 0, 2, 1, 3])
    for cut in range(LENGTH):
        with torch.inference_mode(cut % 2 == 0):  # what that mode has made goes on outside it
            model.set_impl("reference")
            _, state = model.extend(ids_BT[:, :cut])
            model.set_impl(None)
        state.select(chosen)
        for t in range(cut, LENGTH):
            if t == cut + 3:
                state.save(tmp_path / "state")
                state = DecodingState.load(tmp_path / "state", model)
            calls.clear()
            x_BD = model.extend(ids_BT[chosen, t : t + 1], torch.ones(5, dtype=torch.long), state)[0][:, 0]
            assert calls == ["step"] and difference(x_BD, x_BTD[chosen, t]) < 2e-6, (cut, t)
        assert state.seq_lens_B.tolist() == [LENGTH] * 5


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_rows_of_any_lengths(name: str, calls: list[str]) -> None:
    """Rows get none, one or a few tokens at once, with anything behind them."""
    model, ids_BT = random_model(MODELS[name]).float(), rows_with_documents()
    x_BTD, generator = random_model(MODELS[name]).hidden(ids_BT).float(), torch.Generator().manual_seed(1)
    for most in (1, 2, CHUNK):
        state, done_B, found_BTD = model.decoding_state(4), torch.zeros(4, dtype=torch.long), torch.zeros(4, LENGTH, 8)
        while (done_B < LENGTH).any():
            n_new_B = torch.randint(most + 1, (4,), generator=generator).minimum(LENGTH - done_B)
            index_BN = done_B[:, None] + torch.arange(max(int(n_new_B.max()), 1))
            x_BND = model.extend(ids_BT.gather(1, index_BN.clamp(max=LENGTH - 1)), n_new_B, state)[0]
            for row, n_new in enumerate(n_new_B.tolist()):
                found_BTD[row, done_B[row] : done_B[row] + n_new] = x_BND[row, :n_new]
            done_B += n_new_B
        assert calls and difference(found_BTD, x_BTD) < 2e-6


@pytest.mark.parametrize("threads", [1, 3])
@torch.no_grad()
def test_many_rows_share_passes_and_threads(threads: int, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 37 rows is at a place of its own."""
    model, ids_BT = random_model(PLUS).float(), random_ids(37, LENGTH)
    _, state = model.extend(ids_BT, torch.arange(37) % LENGTH)
    again = state.repeated(37)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x_BND, _ = model.extend(ids_BT[:, :1], None, state)
    model.set_impl("reference")
    assert difference(model.extend(ids_BT[:, :1], None, again)[0], x_BND) < 2e-6 and calls == ["step"] * 3


@torch.no_grad()
def test_bfloat16_is_rounded_where_it_is_kept(calls: list[str]) -> None:
    """Weights are as they are and sums are float32: nearer to float64 than PyTorch's bfloat16."""
    model, ids_BT = random_model(PLUS).bfloat16(), rows_with_documents()
    x_BTD = random_model(PLUS).bfloat16().double().hidden(ids_BT)
    errors: list[float] = []
    for impl in ("reference", None):
        model.set_impl(impl)
        state = model.decoding_state(4)
        found = [model.extend(ids_B1, None, state)[0] for ids_B1 in ids_BT.split(1, 1)]
        logits_BV = model.logits(found[-1][:, 0])
        assert found[0].dtype == logits_BV.dtype == state.caches[0].v_BCE.dtype == torch.bfloat16
        errors.append(float((torch.cat(found, 1).double() - x_BTD).square().mean()))
    assert calls == ["step"] * LENGTH + ["linear"] and errors[1] < errors[0] / 2


@pytest.mark.parametrize("change", [
    lambda model: model.set_impl("reference"), lambda model: model.double(),
    lambda model: setattr(model.layers[1], "out_proj", nn.Sequential(model.layers[1].out_proj)),
    lambda model: setattr(w := model.layers[0].in_proj.weight, "data", w.data.T.contiguous().T),
    lambda model: model.layers[0].in_proj.register_forward_hook(lambda _module, _x, y: 2 * y)],
    ids=["reference", "float64", "adapter", "gaps", "hook"])
@torch.no_grad()
def test_who_takes_pytorch(change: Callable[[LanguageModel], object], calls: list[str]) -> None:
    model = random_model(PLUS).float()
    _, state = model.extend(torch.tensor([[3]]))
    change(model)
    x_BND, _ = model.extend(torch.tensor([[3, 4]]))
    model.extend(torch.tensor([[4]]), None, state if model.embed.weight.dtype == torch.float32 else None)
    assert calls == ["step"] and difference(x_BND, model.hidden(torch.tensor([[3, 4]]))) < 2e-6


def test_gradients_and_autocast_take_pytorch(calls: list[str]) -> None:
    model, id_B1 = random_model(PLUS).float(), torch.tensor([[3]])
    x_BND, state = model.extend(id_B1)
    with torch.no_grad():
        model.extend(id_B1, None, state)  # a gradient needs the state as it is
        with torch.autocast("cpu", torch.bfloat16):
            model.extend(id_B1)
    assert not calls and torch.autograd.grad(x_BND.sum(), model.layers[0].in_proj.weight)[0].any()


@torch.no_grad()
def test_weights_are_read_where_they_are(calls: list[str]) -> None:
    """Changed in place, given new memory, and replaced, between steps."""
    model, other = (random_model(PLUS, seed).float() for seed in (0, 1))
    state, ids_B1 = model.decoding_state(2), torch.tensor([[3], [4]])
    for cache, layer in zip(state.caches, other.layers, strict=True):
        cache.bias_M.copy_(layer.rel_pos_bias.before(CHUNK))
    model.extend(ids_B1, None, state.repeated(2))
    drawn(model, 2)
    model.extend(ids_B1, None, state.repeated(2))
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        mine.data = its.data
    model.layers[1].key_conv.taps = nn.Parameter(other.layers[1].key_conv.taps.clone())
    assert difference(model.extend(ids_B1, None, state)[0], other.hidden(ids_B1)) < 2e-6 and calls == ["step"] * 3


@torch.no_grad()
def test_what_changes_between_steps_of_a_state(calls: list[str]) -> None:
    model, ids_B1 = random_model(PLUS).float(), torch.tensor([[3], [4]])
    w, m, (_, state) = model.layers[0].in_proj.weight, model.layers[1].out_proj, model.extend(ids_B1)
    for change in (lambda: state.select([1, 0]), lambda: setattr(w, "data", w.flip(0)),
                   lambda: setattr(m, "weight", nn.Parameter(m.weight.flip(0)))):
        change()
        again, (x_BND, _) = state.repeated(2), model.extend(ids_B1, None, state)
        model.set_impl("reference")
        assert difference(model.extend(ids_B1, None, again)[0], x_BND) < 2e-6
        model.set_impl(None)
    assert calls == ["step"] * 4


@torch.no_grad()
def test_what_is_no_number_and_the_end_of_a_table() -> None:
    broken = random_model(PLUS).float()
    broken.layers[1].in_proj.weight[3, 2] = torch.nan
    with pytest.raises(NumericsError, match="the logits are not numbers"):
        generate(broken, [[1]], max_new_tokens=3)
    model = random_model(replace(FLASH, abs_pos="learned", context=4)).float()
    _, state = model.extend(torch.tensor([[1, 2, 3, 4]]))
    with pytest.raises(UsageError, match="5 tokens, the table has 4"):
        model.extend(torch.tensor([[1]]), None, state)


@rest
@torch.no_grad()
def test_greedy_text_of_small(calls: list[str]) -> None:
    """800 tokens over edges of chunks, with new documents, are those of the parallel forward."""
    model, ids = load_model("small")[0].eval(), [0]
    state = model.decoding_state(1)
    for t in range(800):
        logits_1V = model.logits(model.extend(torch.tensor([[ids[t]]]), None, state)[0][:, 0])
        ids.append(0 if t % 211 == 210 else int(logits_1V.argmax()))
    best_T = model(torch.tensor([ids[:800]]))[0].argmax(-1)
    assert all(a == b or t % 211 == 210 for t, (a, b) in enumerate(zip(ids[1:], best_T.tolist(), strict=True)))
    assert calls == ["step", "linear"] * 800
