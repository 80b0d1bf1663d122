"""A layer alone in a model of the user's own: one call for training and decoding, documents by
`cu_seqlens`, norm and residual left out, dropout, the first width."""

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lineartime import FeedForward, GatedAttentionUnit, MultiHeadAttention
from lineartime.base.errors import CheckpointError, UsageError
from lineartime.config import model_config
from lineartime.model.decoding.state import DecodingState
from lineartime.model.language_model import LanguageModel
from lineartime.model.layers import ResidualLayer
from tiny_models import BOTH_GRIDS, difference, drawn, random_model

LAYERS = ("flash", "flash+", "flash-quad", "transformer++", "performer", "combiner", "mc-tfm++", "flash overlap",
          "flash others' options", "flash-quad others' options", "flash+, own grid", "transformer++, own grid",
          "flash others' options, own grid")


def layer_of(name: str, seed: int = 0) -> ResidualLayer:
    layer = random_model(BOTH_GRIDS[name], seed).layers[0]
    assert isinstance(layer, ResidualLayer)
    return layer


def documents(*lengths: int) -> torch.Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=10)
@given(data=st.data(), seed=st.integers(0, 100))
@torch.no_grad()
def test_it_is_training_at_every_split(name: str, data: st.DataObject, seed: int) -> None:
    """Packed rows with NaN as padding anywhere, read in parts of any length, also of none."""
    layer, n = layer_of(name), data.draw(st.integers(1, 20))
    generator = torch.Generator().manual_seed(seed)
    x_BTD = torch.randn(3, n, layer.config.d_model, dtype=torch.float64, generator=generator)
    mask_BT = torch.rand(3, n, generator=generator) < data.draw(st.sampled_from([0.6, 1.0]))
    x_BTD = x_BTD.masked_fill(~mask_BT[..., None], torch.nan)
    ids_BT = (torch.rand(3, n, generator=generator) < 0.2).cumsum(1) * 3
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=4)))
    cache = layer.decoding_state(3)
    parts = [layer(x_BTD[:, a:b], ids_BT[:, a:b], mask_BT[:, a:b], cache=cache)[0]
             for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
    whole_BTD = layer(x_BTD, ids_BT, mask_BT)
    assert difference(torch.cat(parts, 1) * mask_BT[..., None], whole_BTD * mask_BT[..., None]) <= 1e-12


@pytest.mark.parametrize("name", ["flash", "flash-quad others' options", "flash others' options", "transformer++"])
@torch.no_grad()
def test_a_cache_copies_saves_and_selects_rows(name: str, tmp_path: Path) -> None:
    layer, file = layer_of(name), tmp_path / "cache.safetensors"
    x_BTD, ids_BT = torch.randn(2, 15, layer.config.d_model, dtype=torch.float64), documents(9, 6).expand(2, -1)
    _, cache = layer(x_BTD[:, :11], ids_BT[:, :11], cache=layer.decoding_state(2))
    cache.save(file)
    older, again, swapped = copy.deepcopy(cache), DecodingState.load(file, layer), copy.deepcopy(cache).to("cpu")
    swapped.select(torch.tensor([1, 0, 1]))
    wanted_BTD, same_cache = layer(x_BTD[:, 11:], ids_BT[:, 11:], cache=cache)
    assert same_cache is cache
    for other in (older, again):
        assert torch.equal(layer(x_BTD[:, 11:], ids_BT[:, 11:], cache=other)[0], wanted_BTD)
    chosen = [1, 0, 1]
    found_BTD, _ = layer(x_BTD[chosen, 11:], ids_BT[[0, 0, 0], 11:], cache=swapped)
    assert difference(found_BTD, wanted_BTD[chosen]) <= 1e-12
    first_BTD, cache = layer(x_BTD[:, :4], cache=layer.decoding_state(2))  # tokens without an id are of document 0
    rest_BTD, _ = layer(x_BTD[:, 4:], torch.zeros_like(ids_BT[:, 4:]), cache=cache)
    assert difference(torch.cat([first_BTD, rest_BTD], 1), layer(x_BTD)) <= 1e-12
    with pytest.raises(CheckpointError, match="the state of another model"):
        DecodingState.load(file, layer_of(name, seed=1))
    with pytest.raises(UsageError, match="the state is of another batch: 2 rows, the input has 3"):
        layer(x_BTD[chosen], cache=cache)
    with pytest.raises(UsageError, match="the state of another model or layer"):
        layer_of(name, seed=1)(x_BTD, cache=cache)


@torch.no_grad()
def test_documents_by_cu_seqlens() -> None:
    layer = layer_of("flash")
    x_1TD = torch.randn(1, 12, layer.config.d_model, dtype=torch.float64)
    wanted = layer(x_1TD, documents(5, 0, 6, 1)[None])
    for bounds in ([0, 5, 5, 11, 12], torch.tensor([0, 5, 5, 11, 12], dtype=torch.int32)):
        assert torch.equal(layer(x_1TD, cu_seqlens=bounds), wanted)
    for bounds in ([0, 5], [1, 12], [0, 7, 5, 12], [0.0, 12.0], [[0, 12]], [], 12):
        with pytest.raises(UsageError, match=r"wrong cu_seqlens: .*; give where each document begins, and the number "):
            layer(x_1TD, cu_seqlens=bounds)
    with pytest.raises(UsageError, match="cu_seqlens is for one row that holds all documents: 2 rows"):
        layer(x_1TD.expand(2, -1, -1), cu_seqlens=[0, 12])
    with pytest.raises(UsageError, match="cu_seqlens goes without segment_ids and cache"):
        layer(x_1TD, cu_seqlens=[0, 12], cache=layer.decoding_state(1))


@pytest.mark.parametrize("make", [GatedAttentionUnit, MultiHeadAttention, FeedForward])
@torch.no_grad()
def test_norm_and_residual_can_be_left_out(make: type[ResidualLayer]) -> None:
    fields = {"d_model": 16, "n_heads": 1}
    whole, normed, plain = (drawn(make(**fields, **more).double()) for more in (
        {}, {"residual": False, "norm": "layer_norm"}, {"residual": False}))
    for layer in (normed, plain):
        layer.load_state_dict(whole.state_dict(), strict=layer is normed)
    assert plain.norm is None
    x_BTD = torch.randn(2, 9, 16, dtype=torch.float64)
    assert whole.norm is not None
    assert torch.equal(whole(x_BTD), x_BTD + normed(x_BTD)) and torch.equal(normed(x_BTD), plain(whole.norm(x_BTD)))
    _, cache = plain(x_BTD[:, :4], cache=plain.decoding_state(2))
    assert difference(plain(x_BTD[:, 4:], cache=cache)[0], plain(x_BTD)[:, 4:]) <= 1e-12


def test_the_first_width_follows_the_width() -> None:
    """And a configuration that is given, as by a model, keeps its own."""
    for width, std in ((64, 0.02 * 12**0.5), (768, 0.02), (1024, 0.02)):
        layer = GatedAttentionUnit(d_model=width, query_key_dim=128)
        assert layer.config.init_std == pytest.approx(std)
        assert float(layer.in_proj.weight.detach().std()) == pytest.approx(std, rel=0.05)
    assert GatedAttentionUnit(d_model=64, init_std=0.02).config.init_std == 0.02


@pytest.mark.parametrize("make", [GatedAttentionUnit, MultiHeadAttention, FeedForward])
def test_dropout_is_of_training_alone_and_keeps_the_mean(make: type[ResidualLayer]) -> None:
    torch.manual_seed(0)
    layer = make(d_model=64, n_heads=1, residual=False, dropout=0.25, bias=False)
    x_BTD = torch.randn(4, 64, 64)
    exact = layer.eval()(x_BTD).detach()
    assert torch.equal(layer(x_BTD), exact)
    layer.train()
    drawn_NBTD = torch.stack([layer(x_BTD).detach() for _ in range(100)])
    assert (drawn_NBTD == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert float((drawn_NBTD.mean(0) - exact).norm() / exact.norm()) < 0.2  # 1 / (100 p)^1/2, and of W_o's input


class Halved(ResidualLayer):
    """A layer of a user who forgets a shape, and a cache."""

    def branch(self, normed_BTD, info, cache=None):  # type: ignore[no-untyped-def]
        return normed_BTD.mean(1, keepdim=True)


def test_what_a_layer_of_ones_own_lacks_is_said() -> None:
    layer = Halved(model_config("flash", d_model=8))
    with pytest.raises(UsageError, match=r"a layer's branch: Halved gives \[2, 1, 8\]; give \[2, 5, 8\]"):
        layer(torch.randn(2, 5, 8))
    with pytest.raises(UsageError, match="this layer does not decode: Halved; define its empty_cache"):
        layer.decoding_state(1)
    sizes = {"d_model": 8, "query_key_dim": 4, "chunk_size": 4, "vocab_size": 13}
    assert not LanguageModel(model_config("flash", layers=[Halved], **sizes)).decodes
    assert LanguageModel(model_config("flash", layers=["gau", "ffn"], **sizes)).decodes
