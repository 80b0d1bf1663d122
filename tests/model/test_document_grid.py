"""`document_grid` "own": a packed document is what it is alone, in value and every gradient."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from lineartime.config import ModelConfig, model_config
from lineartime.model.layout import lay_out
from marks import rest
from tiny_models import BIDIRECTIONAL, CHUNK, CONFIGS, CONTEXT, random_ids, random_model, same, with_end

END = 0
ROWS = [(5, 1, 2 * CHUNK, 4), (CHUNK, 3, CHUNK + 1), (CONTEXT,), (2, 2, 2, 2, 2, 2)]
"""Documents that end with chunks and inside them, a row of one, and short ones."""
NAMES = ["flash", "flash+", "flash-quad", "mc-tfm++", "transformer++", "performer"]
OTHERS = [name for name in CONFIGS if name not in NAMES]
EVERY = CONFIGS | BIDIRECTIONAL
CASES = [*itertools.product(NAMES, (True, False)), *rest(
    *itertools.product(OTHERS, (True, False)), ("flash first to all", False), ("flash local first to all", False))]


def config_of(name: str, causal: bool = True, grid: str = "own", **fields: object) -> ModelConfig:
    return replace(with_end(EVERY[name], END), causal=causal, document_grid=grid, **fields)


def documents_of(lengths: tuple[int, ...], seed: int) -> list[Tensor]:
    """Each begins with the end-of-document token, but for the first of a row."""
    texts = (1 + random_ids(sum(lengths), seed=seed, vocab_size=12)).split(lengths)
    return [text_T if n == 0 else torch.cat([torch.tensor([END]), text_T[1:]]) for n, text_T in enumerate(texts)]


def packed_rows() -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """The documents of `ROWS`; and ids, segment ids and the mask of rows in which they are packed,
    with padding, which may be an end-of-document token, anywhere, and with a row of padding
    alone."""
    packed = [documents_of(lengths, seed) for seed, lengths in enumerate(ROWS)]
    width, generator = CONTEXT + 5, torch.Generator().manual_seed(0)
    ids_BT = torch.full((len(ROWS) + 1, width), END)
    segment_ids_BT, valid_BT = torch.zeros_like(ids_BT), torch.zeros_like(ids_BT).bool()
    for row, documents in enumerate(packed):
        ids_T = torch.cat(documents)
        at_T = torch.randperm(width, generator=generator)[: len(ids_T)].sort().values
        numbers_T = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor([*map(len, documents)]))
        ids_BT[row, at_T], segment_ids_BT[row, at_T], valid_BT[row, at_T] = ids_T, 2 + 3 * numbers_T, True
    return [document for documents in packed for document in documents], ids_BT, segment_ids_BT, valid_BT


def gradients_of(model: torch.nn.Module, out_ND: Tensor) -> tuple[Tensor, ...]:
    weight_ND = torch.randn(out_ND.shape, dtype=out_ND.dtype, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad((out_ND * weight_ND).sum(), [*model.parameters()], materialize_grads=True)


def assert_same(model: torch.nn.Module, found_ND: Tensor, alone_ND: Tensor) -> None:
    assert same(found_ND.detach(), alone_ND.detach())
    assert all(map(same, gradients_of(model, found_ND), gradients_of(model, alone_ND)))


@pytest.mark.parametrize(("name", "causal"), CASES)
def test_a_packed_document_is_what_it_is_alone(name: str, causal: bool) -> None:
    """Documents by their first tokens, and by numbers with gaps; by vectors, block by block, and
    layer by layer, where padding may hold NaN."""
    documents, ids_BT, segment_ids_BT, valid_BT = packed_rows()
    longest = ids_BT.shape[1] if EVERY[name].max_len else CONTEXT  # a table is for the row with its padding
    config = config_of(name, causal, context=longest)
    model, by_number = random_model(config), random_model(replace(config, end_of_document=None))
    alone_ND = torch.cat([model.hidden(ids_T[None])[0] for ids_T in documents])
    collected: list[Tensor] = []
    x_BTD = model.hidden(ids_BT, token_mask_BT=valid_BT, collected=collected)
    layered_BTD = collected[0].masked_fill(~valid_BT[..., None], torch.nan)
    for layer in model.layers:
        layered_BTD = layer(layered_BTD, segment_ids_BT, valid_BT)
        assert layered_BTD.isfinite().all()
    assert x_BTD.isfinite().all()
    assert_same(model, torch.cat([x_BTD[valid_BT], model.norm(layered_BTD[valid_BT])]), alone_ND.repeat(2, 1))
    numbered_BTD = by_number.hidden(ids_BT, segment_ids_BT, valid_BT, embeds_BTD=by_number.embed(ids_BT))
    assert same(numbered_BTD[valid_BT].detach(), alone_ND.detach())
    blocks: list[Tensor] = []
    by_number.hidden(documents[2][None], collected=blocks)
    first = int((valid_BT[0].cumsum(0) == 7).nonzero()[0])  # the third document begins behind 6 tokens
    for each_BTD, alone_1TD in zip(collected, blocks, strict=True):
        assert each_BTD.shape == x_BTD.shape and same(each_BTD[0, first].detach(), alone_1TD[0, 0].detach())
    if not (config.by_document() or config.max_len):
        by_row = random_model(replace(config, document_grid="row")).hidden(ids_BT, token_mask_BT=valid_BT)
        assert not same(by_row[valid_BT].detach(), alone_ND.detach())


def test_a_document_begins_a_chunk_or_lies_in_one() -> None:
    """So short ones take no more places than they have tokens."""
    _, _, segment_ids_BT, valid_BT = packed_rows()
    first_BT = lay_out(CONFIGS["flash"], valid_BT, segment_ids_BT, valid_BT).segment_ids_BL[:, :CONTEXT]
    ids_BL = lay_out(config_of("flash"), first_BT, first_BT).segment_ids_BL
    assert ids_BL is not None and ids_BL.shape[1] == 7 * CHUNK
    for ids_L, lengths in zip(ids_BL, ROWS, strict=False):
        assert (ids_L[ids_L >= 0] % 2 == 0).sum() == sum(lengths)
        for each in ids_L[(ids_L >= 0) & (ids_L % 2 == 0)].unique():
            place_N = (ids_L == each).nonzero().flatten()
            assert place_N[0] % CHUNK == 0 or place_N[0] // CHUNK == place_N[-1] // CHUNK
    short_BT = torch.arange(4 * CHUNK)[None] // 2  # documents of two tokens
    for name, n_places in (("flash", 4 * CHUNK), ("flash first to all", 2 * CHUNK * CHUNK)):
        config = config_of(name, causal=name == "flash")
        assert lay_out(config, short_BT, short_BT).position_BL.shape == (1, n_places)
    one_T = torch.tensor([[0] * (CHUNK + 1) + [-1] * (CHUNK - 1)])  # padding takes the places that are free
    assert lay_out(config_of("flash"), one_T, one_T).position_BL.shape == (1, 2 * CHUNK)


@pytest.mark.parametrize(("n_rows", "context", "percents"), [
    (8, 512, (33, 33, 30, 16, 5)), (1, 4096, (21, 21, 11, 4, 1))])
def test_places_that_are_filled_up(n_rows: int, context: int, percents: tuple[int, ...]) -> None:
    """The table of docs/paper.md, which is of 4,000 draws, by the mean length of a document."""
    flash = model_config("flash", document_grid="own")
    for mean, expected in zip((64, 256, 1024, 4096, 16384), percents, strict=True):
        begins_NBT = torch.rand(200, n_rows, context, generator=torch.Generator().manual_seed(2)) < 1 / mean
        n_places = sum(lay_out(flash, ids_BT, ids_BT).position_BL.numel() for ids_BT in begins_NBT.cumsum(-1))
        assert abs(100 * (1 - begins_NBT.numel() / n_places) - expected) < 1


@pytest.mark.parametrize("name", ["flash+", *rest("transformer++", "mc-tfm++", "performer")])
@torch.no_grad()
def test_decoding_gives_the_states_of_every_block(name: str) -> None:
    """By vectors too. A row without new tokens stays as it is, whatever its padding looks like."""
    model = random_model(config_of(name))
    ids_BT = torch.cat(documents_of((3, 6, 2, 7), seed=1) + documents_of((9, 1, 8), seed=2)).view(2, 18)
    embeds_BTD = model.embed(ids_BT)
    wanted: list[Tensor] = []
    wanted.append(model.hidden(ids_BT, collected=wanted))
    state, parts = model.decoding_state(2), []
    for start, n in ((0, 7), (7, 1), (8, 10)):
        found: list[Tensor] = []
        part = slice(start, start + n)
        found.append(model.extend(ids_BT[:, part], torch.tensor([n, n]), state, found, embeds_BTD[:, part])[0])
        parts.append(found)
        model.extend(torch.full((2, 3), END), torch.tensor([0, 0]), state)
    for n, whole_BTD in enumerate(wanted):
        assert same(torch.cat([found[n] for found in parts], dim=1), whole_BTD)


@pytest.mark.rest
@pytest.mark.parametrize("name", ["flash", "mc-tfm++", "transformer++"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_models_compute_the_same(name: str) -> None:
    """Rows of other documents have another number of places, which the graph does not have."""
    model = random_model(config_of(name))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for lengths in ROWS[:3]:
        documents = documents_of(lengths, seed=1)
        alone_TV = torch.cat([model(ids_T[None])[0] for ids_T in documents])
        assert_same(model, compiled(torch.cat(documents)[None])[0], alone_TV)


@pytest.mark.rest
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_rows_of_other_lengths_share_compiled_layers() -> None:
    """A layer is compiled for the first of a model and for those behind it, with the first row's
    number of places and then with any: torch gives up after 8, and warns."""
    model = random_model(config_of("flash+", context=64))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    for layer in model.layers:
        layer.add = torch.compile(layer.add, backend=counter)
    n_places = set()
    for n in range(1, 9):
        ids_1T = torch.cat(documents_of((CHUNK + 1,) * n + (64 - n * (CHUNK + 1),), seed=n))[None]
        n_places.add(lay_out(model.config, ids_1T, (ids_1T == END).cumsum(1)).position_BL.shape[1])
        model(ids_1T)
    assert len(n_places) > 4 and counter.frame_count == 4
