"""Decoding is the parallel forward: at every position, for every split, in constant memory."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lineartime.base.errors import UsageError
from lineartime.config import PRESETS
from lineartime.model.attention.combiner import RowCache
from lineartime.model.attention.performer import PrefixState
from lineartime.model.decoding.cache import ChunkState, KeyValueCache
from lineartime.model.decoding.state import DecodingState
from lineartime.model.gau import GatedAttentionUnit
from lineartime.model.language_model import LanguageModel
from lineartime.weights.generation import generate
from lineartime.weights.load import load_model
from tiny_models import BOTH_GRIDS, CHUNK, CONTEXT, FLASH, case_of, difference, random_ids, random_model, with_end

END = 0
PRESETS_FIRST = pytest.mark.parametrize("name", [case_of(name, rest=name not in PRESETS) for name in BOTH_GRIDS])
"""The presets, and in `make test-all` every model."""


def extend(model: LanguageModel, ids_BN: Tensor, state: DecodingState, embeds_BND: Tensor | None = None) -> Tensor:
    """The hidden states of the same number of next tokens in each row."""
    return model.extend(ids_BN, torch.full((len(ids_BN),), ids_BN.shape[1]), state, embeds_BND=embeds_BND)[0]


@pytest.mark.parametrize(("name", "width", "trained"), [
    ("flash", 99, ""), ("flash+", 99, ""), ("flash+", 1, ""), ("mc-tfm++", 1, ""), ("flash-quad", 1, ""),
    ("transformer++", 3, ""), ("performer", 1, ""), ("flash", 1, "gamma"), ("flash", 1, "rel_pos_bias"),
    ("flash-quad", 1, "rel_pos_bias"), ("flash+", 1, "key_conv"), ("mc-tfm++", 1, "gamma"),
    *[(name, 1, "prompt") for name in ("flash", "flash, own grid", "flash+", "flash overlap", "mc-tfm++", "flash-quad",
                                       "transformer++", "performer", "combiner")]])
def test_what_is_read_into_a_state_has_gradients(name: str, width: int, trained: str) -> None:
    """Also where values have none, and where only the vectors that were read first have one."""
    model, ids_BT = random_model(with_end(BOTH_GRIDS[name])), random_ids(2, 3 * CHUNK + 2) % 12 + 1
    prompt_BND = torch.randn(2, CHUNK + 2, 8, dtype=torch.float64, requires_grad=True)
    learning = [p for name, p in model.layers.named_parameters() if trained in name] or [prompt_BND]
    for p in model.parameters():
        p.requires_grad_(any(p is each for each in learning))
    state, parts = model.decoding_state(2), [(part_BN, None) for part_BN in ids_BT.split(width, 1)]
    embeds_BTD = model.embed(ids_BT)
    if trained == "prompt":
        parts[: CHUNK + 2] = [(ids_BT[:, : CHUNK + 2], prompt_BND)]
        embeds_BTD = torch.cat([prompt_BND, embeds_BTD[:, CHUNK + 2 :]], 1)
    read_BTD = torch.cat([extend(model, ids_BN, state, embeds_BND) for ids_BN, embeds_BND in parts], 1)
    wanted_BTD = model.hidden(ids_BT, embeds_BTD=embeds_BTD)
    found, wanted = (torch.autograd.grad(x_BTD.square().sum(), learning) for x_BTD in (read_BTD, wanted_BTD))
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("name", "n_new"), [("flash", 1), ("flash-quad", 3)])
def test_the_position_bias_has_a_gradient_after_a_prompt_without(name: str, n_new: int) -> None:
    model, ids_BT = random_model(with_end(BOTH_GRIDS[name])), random_ids(2, 16)
    with torch.no_grad():  # the last token makes room for more
        state = model.decoding_state(2)
        extend(model, ids_BT[:, :12], state)
        extend(model, ids_BT[:, 12:13], state)
    x_BND = extend(model, ids_BT[:, 13 : 13 + n_new], state)
    assert torch.autograd.grad(x_BND.square().sum(), [*model.layers[0].rel_pos_bias.parameters()])[0].any()


@pytest.mark.parametrize("name", [*map(case_of, BOTH_GRIDS)])
@torch.no_grad()
def test_every_split(name: str) -> None:
    """After any number of tokens the others come at once; or one at a time, to rows chosen as beam
    search does: some twice, some dropped. Documents begin and end inside chunks, at their ends and
    not at all."""
    model = random_model(with_end(BOTH_GRIDS[name]))
    ids_BT = random_ids(4, 3 * CHUNK + 2) % 12 + 1
    ids_BT[1, [3, 4, 9]] = END
    ids_BT[2, [0, 4, 5, 8, 12]] = END
    ids_BT[3] = random_ids(3 * CHUNK + 2, vocab_size=3)
    x_BTD, chosen = model.hidden(ids_BT), torch.tensor([2, 0, 2, 1, 3])
    for cut in range(ids_BT.shape[1]):
        with torch.inference_mode(cut % 2 == 0):  # what that mode has made goes on outside it
            state = model.decoding_state(4)
            if cut:
                assert difference(extend(model, ids_BT[:, :cut], state), x_BTD[:, :cut]) <= 1e-12, cut
            again = copy.deepcopy(state)
        assert difference(extend(model, ids_BT[:, cut:], state), x_BTD[:, cut:]) <= 1e-12, cut
        again.select(chosen)
        again = again if cut else model.decoding_state(len(chosen))  # as it was made: buffers share no memory
        for t in range(cut, ids_BT.shape[1]) if cut in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK) else ():
            x_BD = extend(model, ids_BT[chosen, t : t + 1], again)[:, 0]
            assert difference(x_BD, x_BTD[chosen, t]) <= 1e-12, (cut, t)


@pytest.mark.parametrize("name", [case_of(name) for name in BOTH_GRIDS if name != "flash rotated bias"])
@settings(max_examples=8)
@given(lengths=st.lists(st.integers(1, CONTEXT), min_size=1, max_size=4), vocab_size=st.sampled_from([2, 4, 13]),
       seed=st.integers(0, 2**32 - 1), data=st.data())
@torch.no_grad()
def test_any_split_of_rows_of_any_lengths(name: str, lengths: list[int], vocab_size: int, seed: int,
                                          data: st.DataObject) -> None:
    """Each row gets its next tokens in pieces of its own sizes, with anything behind them."""
    model = random_model(with_end(BOTH_GRIDS[name]), seed)
    rows = [random_ids(length, seed=seed + row, vocab_size=vocab_size) for row, length in enumerate(lengths)]
    state, done = model.decoding_state(len(rows)), [0] * len(rows)
    outputs: list[list[Tensor]] = [[] for _ in rows]
    while any(n < length for n, length in zip(done, lengths, strict=True)):
        most = data.draw(st.sampled_from([1, 1, 2, CHUNK, CONTEXT]))
        left = [length - n for n, length in zip(done, lengths, strict=True)]
        n_new = [min(data.draw(st.integers(most == 1, most)), n) for n in left]
        n_new = n_new if any(n_new) else left
        ids_BN = random_ids(len(rows), max(n_new), seed=seed + 99)
        for row, (start, n) in enumerate(zip(done, n_new, strict=True)):
            ids_BN[row, :n] = rows[row][start : start + n]
        x_BND = model.extend(ids_BN, torch.tensor(n_new), state)[0]
        for row, n in enumerate(n_new):
            outputs[row].append(x_BND[row, :n])
            done[row] += n
    for row, ids_T in enumerate(rows):
        assert difference(torch.cat(outputs[row]), model.hidden(ids_T[None])[0]) <= 1e-12
    assert state.seq_lens_B.tolist() == lengths


@PRESETS_FIRST
@torch.no_grad()
def test_what_of_a_state_grows(name: str) -> None:
    """Nothing in FLASH, MC-TFM++ and Performer; keys and values, and Combiner's summaries."""
    config = with_end(BOTH_GRIDS[name])
    model = random_model(config)
    state = model.decoding_state(2)
    kinds = {"linear": PrefixState, "rowmajor_axial": RowCache, "quadratic": KeyValueCache, "mixed_chunk": ChunkState}
    growing = {RowCache: ("ks_BLCHK", "vs_BLCHK"), KeyValueCache: ("k_BL", "v_BL")}
    attending = [layer.config for layer in model.layers if layer.attends]
    for of_layer, cache in zip(attending, state.caches, strict=True):
        assert type(cache) is kinds[of_layer.attn_type] and cache.growing == growing.get(type(cache), ())
    with torch.inference_mode():  # what is made in it can be written outside
        state.reserve(3)
    at_first, n_bytes, n_tokens = [cache.tensors() for cache in state.caches], state.n_bytes, 0
    for n_new in (1, 7, 10) if config.max_len else (1, 7, 100, 1, 1, 1100):
        model.extend(random_ids(2, n_new, vocab_size=12) + 1, torch.tensor([n_new, n_new // 2]), state)
        n_tokens += n_new
        for cache, before in zip(state.caches, at_first, strict=True):
            now, n_kept = cache.tensors(), n_tokens // (config.chunk_size or 1 if isinstance(cache, RowCache) else 1)
            assert now.keys() == before.keys()
            for part, tensor in now.items():
                assert tensor.dtype == before[part].dtype
                if part in cache.growing:
                    assert n_kept <= tensor.shape[1] <= max(2 * n_kept, 7), part
                else:
                    assert tensor.shape == before[part].shape, part
        assert state.n_bytes == sum(t.nbytes for cache in state.caches for t in cache.tensors().values()) > 0
    assert (state.n_bytes > n_bytes) == any(cache.growing for cache in state.caches)


@pytest.mark.parametrize(("name", "kept"), [("flash", "kv_BSE"), ("performer", "kv_BHMK")])
@torch.no_grad()
def test_the_sum_of_a_short_type_is_float32(name: str, kept: str) -> None:
    """In bfloat16 a count stops at 256. Token by token and at once the sums are equal."""
    model = LanguageModel(replace(BOTH_GRIDS[name], n_layers=1)).to(torch.bfloat16).eval()
    ids_BT = random_ids(1, 700)
    for impl, limit in (("reference", 1e-3), (None, 5e-3)):  # C rounds less often than PyTorch, which reads at once
        model.set_impl(impl)
        by_one, at_once = model.decoding_state(1), model.decoding_state(1)
        for t in range(700):
            model.extend(ids_BT[:, t : t + 1], torch.tensor([1]), by_one)
        model.extend(ids_BT, torch.tensor([700]), at_once)
        kv_by_one, kv_at_once = (getattr(state.caches[0], kept) for state in (by_one, at_once))
        assert kv_by_one.dtype == kv_at_once.dtype == torch.float32
        assert getattr(by_one.caches[0], "bias_M", kv_by_one).dtype == torch.float32  # so that scores are
        assert float((kv_by_one - kv_at_once).abs().max() / kv_at_once.abs().max()) < limit


@pytest.mark.parametrize("name", ["transformer++", "flash, own grid", "transformer++, own grid", "flash overlap"])
@torch.no_grad()
def test_rows_of_any_lengths_under_autocast(name: str) -> None:
    model = random_model(with_end(BOTH_GRIDS[name])).float()
    ids_BT, state = random_ids(2, 20, vocab_size=4), model.decoding_state(2)
    with torch.autocast("cpu", torch.bfloat16):
        x_BTD = model.hidden(ids_BT)
        model.extend(ids_BT[:, :15], torch.tensor([15, 6]), state)
        found_BTD = model.extend(ids_BT[:, 6:14], torch.tensor([0, 8]), state)[0]
        assert difference(found_BTD[1], x_BTD[1, 6:14]) < 0.1
        for t in range(5):  # one at a time, which closes the rows' chunks at different times
            x_BD = extend(model, ids_BT[[0, 1], [15 + t, 14 + t]][:, None], state)[:, 0]
            assert difference(x_BD, x_BTD[[0, 1], [15 + t, 14 + t]]) < 0.1
        model.extend(ids_BT[:, :7], torch.tensor([7, 6]), state)
        model.extend(ids_BT[:, : 2 * CHUNK], torch.tensor([CHUNK, 2 * CHUNK]), whole := model.decoding_state(2))
        extend(model, ids_BT[:, :1], whole)
    extend(model, ids_BT[:, :1], state)  # the state has the model's own dtype


@torch.no_grad()
def test_sums_under_autocast_may_exceed_float16() -> None:
    """As in training: keys of 10^4, of which queries read little."""
    model, ids_BT = random_model(FLASH).float(), random_ids(1, 3 * CHUNK)
    for layer in model.layers:
        layer.scale_offset.beta[2:].copy_(torch.tensor([[1e-5], [3e4]]))
        layer.scale_offset.gamma[2:].zero_()
    state, x_BTD = model.decoding_state(1), model.hidden(ids_BT)
    with torch.autocast("cpu", torch.float16):
        read_BTD = torch.cat([extend(model, id_B1, state) for id_B1 in ids_BT.split(1, 1)], 1)
    assert state.caches[0].kv_BSE.abs().max() > 65_504 and difference(read_BTD, x_BTD) < 0.1


@PRESETS_FIRST
def test_nothing_to_decode(name: str) -> None:
    """No prompts, no rows, no new tokens: empty results, and the state of a row does not change."""
    model = random_model(BOTH_GRIDS[name])
    assert generate.generate(model, [], max_new_tokens=3, temperature=1.0) == []
    logits_BV, state = generate.prefill(model, [])
    assert logits_BV.shape == (0, 13)
    assert generate.decode_step(model, torch.zeros(0, dtype=torch.long), state).shape == (0, 13)
    prompts = random_ids(2, 7).tolist()
    expected, same = (generate.prefill(model, prompts)[1] for _ in range(2))
    with torch.inference_mode():
        x_BND = model.extend(torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, dtype=torch.long), same)[0]
    assert x_BND.shape == (2, 0, 8)
    ids_B = torch.tensor([3, 4])
    assert torch.equal(generate.decode_step(model, ids_B, same), generate.decode_step(model, ids_B, expected))
    with pytest.raises(UsageError, match="empty prompt"):
        generate.generate(model, [[]], max_new_tokens=3)


@pytest.mark.parametrize("name", ["transformer", "flash-quad"])
@torch.no_grad()
def test_the_end_of_a_table(name: str) -> None:
    """One row reaches the end: nothing is read beyond it, and a refusal changes nothing."""
    model = random_model(BOTH_GRIDS[name])
    state = model.decoding_state(2)
    ids_BT = random_ids(2, CONTEXT)
    model.extend(ids_BT, torch.tensor([CONTEXT - 1, 3]), state)
    x_BND = model.extend(ids_BT[:, -1:], torch.tensor([1, 1]), state)[0]
    assert difference(x_BND[0], model.hidden(ids_BT)[0, -1:]) <= 1e-12
    with pytest.raises(UsageError, match="25 tokens, the table has 24"):
        model.extend(ids_BT[:, :1], torch.tensor([1, 0]), state)
    x_BND = model.extend(ids_BT[:, :1], torch.tensor([0, 1]), state)[0]
    alone_BT = torch.cat([ids_BT[1, :3], ids_BT[1, -1:], ids_BT[1, :1]])[None]
    assert difference(x_BND[1], model.hidden(alone_BT)[0, -1:]) <= 1e-12


@torch.no_grad()
def test_a_layer_alone_refuses_the_token_behind_its_table() -> None:
    layer, x_BTD = GatedAttentionUnit(d_model=16, query_key_dim=8, context=4), torch.randn(1, 5, 16)
    cache = layer.decoding_state(1)
    for t in range(5):
        with pytest.raises(UsageError, match="5 tokens, the table has 4") if t == 4 else nullcontext():
            layer(x_BTD[:, t : t + 1], cache=cache)


@torch.no_grad()
def test_layers_of_other_numbers_of_heads() -> None:
    """Attention with 2 and a GAU with 4, in rows of 7 and 4 tokens, then two at a time."""
    model = random_model(replace(FLASH, d_model=128, n_heads=4, query_key_dim=16, layers=("attention", "gau")))
    ids_BT, seen_B = random_ids(2, 12), torch.tensor([7, 4])
    x_BTD, state = model.hidden(ids_BT), model.extend(ids_BT[:, :7], seen_B)[1]
    for _ in range(2):
        at_BN = seen_B[:, None] + torch.arange(2)
        x_BND = extend(model, ids_BT.gather(1, at_BN), state)
        assert difference(x_BND, x_BTD.gather(1, at_BN[..., None].expand_as(x_BND))) <= 1e-12
        seen_B = seen_B + 2


def test_layers_share_the_tables_of_a_step() -> None:
    """By PyTorch a token of the model that ships takes at most 900 ops, views included."""
    ops, model = [], load_model("small")[0]
    model.set_impl("reference")
    counts = {"__torch_dispatch__": lambda _, op, types, x=(), how=None: ops.append(op) or op(*x, **how or {})}
    _, state = generate.prefill(model, [[0, 5, 6, 7]])
    with type("Ops", (torch.utils._python_dispatch.TorchDispatchMode,), counts)():
        generate.decode_step(model, torch.tensor([8]), state)
    assert 0 < len(ops) <= 900
