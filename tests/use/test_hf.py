"""A checkpoint's folder under transformers: weights, logits and tokens are `LanguageModel`'s."""

import copy
import dataclasses
import itertools
import logging

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import lineartime.hf
from lineartime.base.errors import CheckpointError, UsageError
from lineartime.config import model_config, to_dict
from lineartime.data.prepare_config import SAMPLE
from lineartime.data.tokenizer import END_OF_DOCUMENT, byte_tokenizer, load_tokenizer, train_tokenizer
from lineartime.folders import read_config
from lineartime.hf import LineartimeCache, LineartimeConfig, LineartimeTokenizer, document_means
from lineartime.model.language_model import masked_token_losses, token_losses
from lineartime.weights.generation.generate import generate
from lineartime.weights.load import load_model
from lineartime.weights.transformers_files import tokenizer_files
from marks import rest
from tiny_checkpoints import random_model, write_checkpoint
from tiny_models import LONG_MEMORY

EOD = byte_tokenizer().end_of_document
SIZES = {"n_layers": 2, "d_model": 16, "vocab_size": byte_tokenizer().vocab_size, "context": 96, "end_of_document": EOD}
CONFIGS = {
    "flash": model_config("flash", **SIZES, query_key_dim=8, chunk_size=4),
    "flash-quad": model_config("flash-quad", **SIZES, query_key_dim=8),
    "transformer++": model_config("transformer++", **SIZES, n_heads=2),
    "flash long memory": model_config("flash", **SIZES, query_key_dim=8, chunk_size=8, **LONG_MEMORY),
}
PROMPTS = [[EOD, *b"once upon a time"], [EOD, 7], [*b"a", EOD, *b"the second document"]]


@pytest.fixture(scope="module", params=["flash", "transformer++", *rest("flash-quad", "flash long memory")])
def ours(request):
    """Greedy text depends on position and context instead of repeating one token."""
    model = random_model(CONFIGS[request.param])
    with torch.no_grad():
        model.norm.weight += 1
        model.abs_pos.scalar.fill_(1)
    return model


@pytest.fixture(scope="module")
def folder(ours, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), ours, byte_tokenizer())


@pytest.fixture
def hf(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def hf64(folder):
    """In float64, where rounding does not decide between two tokens."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@pytest.fixture
def said(caplog, monkeypatch):
    """What is said through loggers, from warnings upwards."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    return caplog


def packed_ids(n_rows=2, length=30):
    ids_BT = torch.randint(EOD, (n_rows, length), generator=torch.Generator().manual_seed(1))
    ids_BT[0, 0] = ids_BT[0, 11] = ids_BT[1, 17] = EOD
    return ids_BT


def padded(rows, *, left=True, n_more=0, padding=3):
    """Rows with padding that looks like text; n_more: columns in which no row has a token."""
    width = max(map(len, rows)) + n_more
    batch = {"input_ids": [], "attention_mask": []}
    for row in rows:
        pad = width - len(row)
        batch["input_ids"].append([padding] * pad + row if left else row + [padding] * pad)
        batch["attention_mask"].append([0] * pad + [1] * len(row) if left else [1] * len(row) + [0] * pad)
    return {name: torch.tensor(numbers) for name, numbers in batch.items()}


def new_tokens(sequences_BT, prompt_width):
    """Each row's new tokens up to the end of its document, as our `generate` returns them."""
    rows = [row[prompt_width:] for row in sequences_BT.tolist()]
    return [row[: row.index(EOD)] if EOD in row else row for row in rows]


def assert_same_weights(model, expected):
    weights, theirs = dict(model.named_parameters()), dict(expected.named_parameters())
    assert weights.keys() == theirs.keys() and not list(model.buffers())
    assert all(torch.equal(weights[name], theirs[name]) for name in weights)


def test_every_weight_is_loaded_and_the_logits_are_the_same_bits(ours, folder, said):
    hf, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(hf) is lineartime.hf.LineartimeForCausalLM and not hf.training
    assert not any(loading.values()), loading
    assert_same_weights(hf.model, ours)
    assert hf.get_input_embeddings() is hf.model.embed
    ids_BT = packed_ids()
    with torch.no_grad():
        logits_BTV, x_BTD = ours(ids_BT), ours.hidden(ids_BT)
        assert torch.equal(hf(ids_BT).logits, logits_BTV)
        assert torch.equal(hf(ids_BT, attention_mask=torch.ones_like(ids_BT), return_dict=False)[0], logits_BTV)
        assert torch.equal(hf(ids_BT, logits_to_keep=3).logits, ours.logits(x_BTD[:, -3:]))
        assert torch.equal(AutoModel.from_pretrained(folder)(ids_BT).last_hidden_state, x_BTD)
    assert not said.text


def test_what_save_pretrained_writes_is_a_checkpoint_of_ours(ours, hf, tmp_path, said):
    """Trainer saves `state_dict()` and resumes with the file's names."""
    lineartime.hf.LineartimeForCausalLM(hf.config).save_pretrained(tmp_path, state_dict=hf.state_dict())
    hf.save_pretrained(tmp_path / "own")
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == ours.state_dict().keys() == load_file(tmp_path / "own/model.safetensors").keys()
    assert read_config(tmp_path)[0] == ours.config
    for state_dict in (weights, hf.state_dict()):
        other = lineartime.hf.LineartimeForCausalLM(hf.config)
        result = other.load_state_dict(state_dict, strict=False)
        assert not result.missing_keys and not result.unexpected_keys
        assert_same_weights(other.model, ours)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path).model, ours)
    assert not said.text
    # The same in several files.
    folder = tmp_path / "several"
    hf.save_pretrained(folder, max_shard_size="8KB")
    (folder / "tokenizer.json").write_text(byte_tokenizer().json)
    first, second, *_ = sorted(folder.glob("model-*.safetensors"))
    assert not (folder / "model.safetensors").exists()
    assert_same_weights(load_model(folder)[0], ours)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(folder).model, ours)
    whole = (index := folder / "model.safetensors.index.json").read_text()
    first.rename(tmp_path / "gone")
    for text, words in (("{}", "'weight_map' is missing"),
                        (whole.replace(first.name, second.name), "is missing"), (whole, first.name)):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=words):
            load_model(folder)


def test_weights_that_a_checkpoint_lacks_are_refused_or_reported_and_initialised(ours, folder, tmp_path):
    write_checkpoint(tmp_path, ours, byte_tokenizer())
    lacking = {"head_bias", "layers.1.out_proj.weight", "norm.weight"}
    kept = {name: p.detach() for name, p in ours.named_parameters() if name not in lacking}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: model\.head_bias is missing, model"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    hf, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert loading["missing_keys"] == {f"model.{name}" for name in lacking}
    weights = dict(hf.model.named_parameters())
    assert all(torch.equal(weights[name], kept[name]) for name in kept)
    assert (weights["head_bias"] == 0).all() and (weights["norm.weight"] == 1).all()
    assert 0.01 < weights["layers.1.out_proj.weight"].std() < 0.03


def test_padding_anywhere_changes_nothing(ours, hf64):
    """In the parallel form and in the cache's: left, right and in the middle."""
    rows = (([1, 2, EOD, 3, 4, 5, 6], [2, 3, 4, 5, 6, 7, 8]),
            ([7, 8, 9, 10, 11, EOD, 12, 13, 14], [0, 1, 3, 4, 7, 8, 9, 10, 11]))
    ids_BT, mask_BT = torch.full((2, 12), 3), torch.zeros(2, 12, dtype=torch.long)
    for row, (prompt, where) in enumerate(rows):
        ids_BT[row, where], mask_BT[row, where] = torch.tensor(prompt), 1
    with torch.no_grad():
        for use_cache in (False, True):
            output = hf64(ids_BT, attention_mask=mask_BT, use_cache=use_cache)
            assert isinstance(output.past_key_values, LineartimeCache) == use_cache
            for row, (prompt, where) in enumerate(rows):
                alone_TV = ours.double()(torch.tensor([prompt]))[0]
                assert (output.logits[row, where] - alone_TV).abs().max() < 1e-11
        if ours.config.ffn == "gau":
            by_row = torch.func.vmap(lambda ids_T, mask_T: hf64(ids_T[None], attention_mask=mask_T[None]).logits[0])
            assert (by_row(ids_BT, mask_BT) - output.logits)[mask_BT.bool()].abs().max() < 1e-11
    ours.float()


def test_prompts_of_different_lengths_decode_together_as_alone(hf64, said):
    with torch.no_grad():
        hf64.model.head_bias[EOD] += 1.5  # so that rows end, at different times
    width = max(map(len, PROMPTS))
    batch = padded(PROMPTS)
    together = new_tokens(hf64.generate(**batch, max_new_tokens=60, do_sample=False), width)
    alone = [new_tokens(hf64.generate(**padded([prompt]), max_new_tokens=60, do_sample=False), len(prompt))[0]
             for prompt in PROMPTS]
    without_cache = hf64.generate(**batch, max_new_tokens=60, do_sample=False, use_cache=False)
    assert together == alone == generate(hf64.model, PROMPTS, max_new_tokens=60) == new_tokens(without_cache, width)
    assert len({len(row) for row in together}) > 1
    for n_columns in (1, 10):
        pieces = hf64.generate(**batch, max_new_tokens=60, do_sample=False, prefill_chunk_size=n_columns)
        assert new_tokens(pieces, width) == together
    assert not said.text


@pytest.mark.parametrize("search", [
    {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5},
    {"do_sample": True, "num_return_sequences": 3, "top_k": 20, "temperature": 0.9}], ids=lambda each: "-".join(each))
def test_search_and_sampling_with_the_cache_as_without(hf64, search):
    batch = padded(PROMPTS)
    results = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        results.append(hf64.generate(**batch, max_new_tokens=12, use_cache=use_cache, **{"do_sample": False, **search}))
    assert torch.equal(*results)
    assert len(results[0]) == len(PROMPTS) * search.get("num_return_sequences", 1)


def test_a_token_with_the_id_of_padding_is_a_token_where_the_mask_says_so(hf64):
    """And where a cache has no mask: it may have been generated."""
    batch, how = padded(PROMPTS), {"do_sample": False, "eos_token_id": -1, "repetition_penalty": 1.2}
    searches = [{}, {"use_cache": False}, {"num_beams": 3, "num_return_sequences": 2}]

    def made():
        with torch.no_grad():
            yield from (hf64.generate(**batch, **how, **each, max_new_tokens=16) for each in searches)
            yield hf64(texts_BT, use_cache=True).logits
            yield hf64(texts_BT, torch.ones_like(texts_BT), labels=texts_BT).loss

    texts_BT = hf64.generate(**batch, **how, max_new_tokens=16)[:, -16:]
    wanted, hf64.config.pad_token_id = [*made()], int(texts_BT[0, 5])
    assert all(map(torch.equal, made(), wanted))


def test_generation_goes_on_from_a_returned_cache_or_its_file(hf64, ours, tmp_path):
    batch = padded(PROMPTS, n_more=2)
    ids_BT, mask_BT = batch.values()
    options = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, "return_dict_in_generate": True}
    at_once = hf64.generate(**batch, max_new_tokens=25, **options).sequences
    first = hf64.generate(**batch, max_new_tokens=9, **options)
    cache = first.past_key_values
    assert isinstance(cache, LineartimeCache) and cache.get_seq_length() == ids_BT.shape[1] + 8
    n_bytes, fork = cache.state.n_bytes, copy.deepcopy(cache)
    mask_BT = torch.nn.functional.pad(mask_BT, [0, 9], value=1)
    cache.save_pretrained(tmp_path / "cache", hf64)
    for each in (cache, LineartimeCache.from_pretrained(tmp_path / "cache", hf64)):
        more = hf64.generate(first.sequences, attention_mask=mask_BT, past_key_values=each, max_new_tokens=16,
                             **options)
        assert torch.equal(more.sequences, at_once)
        assert more.past_key_values is each and each.get_seq_length() == ids_BT.shape[1] + 24
        assert (each.state.n_bytes == n_bytes) == (ours.config.chunk_size is not None)
    with pytest.raises(CheckpointError, match="another model or precision"):
        LineartimeCache.from_pretrained(tmp_path / "cache", copy.deepcopy(hf64).float())
    with pytest.raises(UsageError, match="the cache is empty"):
        LineartimeCache().save_pretrained(tmp_path / "cache", hf64)
    # Another turn from the same place: the cache that went on has not touched its copy.
    said_BT = torch.cat([first.sequences, torch.tensor([[65, 66], [67, 68], [EOD, 69]])], dim=1)
    options |= {"attention_mask": torch.nn.functional.pad(mask_BT, [0, 2], value=1), "max_new_tokens": 9}
    with torch.no_grad(), pytest.raises(UsageError, match="no such argument"):  # the rest takes long to compile
        torch.compile(hf64.forward, backend="eager")(said_BT[:, -3:], options["attention_mask"], fork, unknown=1)
    turn = hf64.generate(said_BT, past_key_values=fork, **options)
    assert torch.equal(turn.sequences, hf64.generate(said_BT, **options).sequences)


@pytest.mark.rest
@pytest.mark.parametrize(("name", "widths"), [("flash", [1] * 6), ("flash", [2, 5, 3]), ("transformer++", [2, 5, 3])])
def test_exported_for_generation(name, widths):
    """Decoding with padding, documents, and other numbers of rows and tokens than its example."""
    from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter

    config = LineartimeConfig(**to_dict(dataclasses.replace(CONFIGS[name], n_layers=1)))
    torch.manual_seed(0)
    model, stop = AutoModelForCausalLM.from_config(config).double().eval(), 9
    model.config.output_hidden_states = widths[0] == 1
    ids_BT, mask_BT, cache = packed_ids()[[0, 1, 0], :23], torch.ones(3, 23, dtype=torch.long), LineartimeCache()
    mask_BT[1, :3] = 0
    position_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    step = DynamoExporter().export_for_generation(
        model, {"input_ids": ids_BT[:2, :13], "attention_mask": mask_BT[:2, :13]}, DynamoConfig(dynamic=True),
        multi_token_decode=widths[0] > 1).components["decode"].program.module()
    with torch.no_grad():
        wanted_BTV = model(ids_BT, attention_mask=mask_BT, position_ids=position_BT).logits
        model(ids_BT[:, :stop], attention_mask=mask_BT[:, :stop], position_ids=position_BT[:, :stop],
              past_key_values=cache)
        for width in widths:
            at, stop = slice(stop, stop + width), stop + width
            out = step(input_ids=ids_BT[:, at], attention_mask=mask_BT[:, :stop], position_ids=position_BT[:, at],
                       past_key_values=cache)
            cache = out.past_key_values
            assert (out.logits - wanted_BTV[:, at]).abs().max() < 1e-12
    assert cache.get_seq_length() == stop


def test_rows_of_a_cache(hf64):
    ids_BT, cache = packed_ids(), LineartimeCache()
    assert cache.batch_size == cache.get_max_length() == -1 and not cache.is_compileable
    with torch.no_grad():
        expected_BTV = hf64(ids_BT).logits

        def assert_next(rows, start, stop):
            logits_BTV = hf64(ids_BT[rows, start:stop], past_key_values=cache).logits
            assert (logits_BTV - expected_BTV[rows, start:stop]).abs().max() < 1e-11

        cache.batch_repeat_interleave(2)  # of a cache without rows: nothing
        assert_next([0, 1], 0, 13)
        cache.batch_repeat_interleave(2)
        assert_next([0, 0, 1, 1], 13, 20)
        cache.batch_select_indices(torch.tensor([3, 0]))
        with pytest.raises(IndexError):  # a call that fails has read nothing
            hf64(ids_BT[:, 20:] + 9999, past_key_values=cache)
        assert cache.get_seq_length() == 20
        assert_next([1, 0], 20, 29)
        cache.reorder_cache(torch.tensor([1, 0]))
        assert_next([0, 1], 29, 30)
        with pytest.raises(UsageError, match="another batch: 2 rows, the input has 1"):
            hf64(ids_BT[:1, 20:], past_key_values=cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert_next([0, 1], 0, 30)
        with pytest.raises(UsageError, match=r"cannot forget tokens: crop\(-5\)"):
            cache.crop(-5)
        cache.crop(0)


def test_loss(ours, hf):
    """Training makes no logits unless asked: they are most of the memory."""
    ids_BT = packed_ids()
    expected_BT = token_losses(ours, ids_BT).detach()
    # transformers runs the last token too, which changes the rounding of a sum
    evaluated = hf(ids_BT, labels=ids_BT)
    assert torch.allclose(evaluated.loss, expected_BT.mean(), rtol=1e-6)
    assert hf._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()  # by which Trainer shifts labels of smoothing
    assert torch.allclose(hf(ids_BT, labels=ids_BT, num_items_in_batch=7).loss, expected_BT.sum() / 7, rtol=1e-6)
    assert hf(ids_BT, labels=torch.full_like(ids_BT, -100)).loss == 0
    assert torch.equal(evaluated.logits, hf(ids_BT).logits)
    trained = hf.train()(ids_BT, labels=ids_BT)
    assert trained.logits is None and torch.equal(trained.loss, evaluated.loss)
    assert torch.equal(hf(ids_BT).logits, evaluated.logits)
    for kept, places in ((3, slice(-3, None)), (torch.tensor([1, 4]), [1, 4])):
        some = hf(ids_BT, labels=ids_BT, logits_to_keep=kept)
        assert torch.equal(some.loss, evaluated.loss)
        assert torch.allclose(some.logits, evaluated.logits[:, places], atol=1e-6)


def test_configurations_that_differ_are_not_equal_and_wrong_ones_are_refused(folder, tmp_path, monkeypatch):
    (tmp_path / "MANIFEST.json").write_text("damaged")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)  # whose files are not read
    assert LineartimeConfig.from_dict({"n_layers": 3}).n_layers == 3
    config = AutoConfig.from_pretrained(folder)
    assert config.model_config() == read_config(folder)[0]
    assert config == AutoConfig.from_pretrained(folder)
    assert (config.eos_token_id, config.bos_token_id, config.pad_token_id) == (EOD, EOD, config.vocab_size)
    assert (config.hidden_size, config.num_hidden_layers) == (config.d_model, config.n_layers) == (16, 2)
    assert config != AutoConfig.from_pretrained(folder, n_layers=3)
    assert type(config.keys_to_ignore_at_inference) is list  # Trainer adds a list to it
    with pytest.raises(UsageError, match="n_layers = 0"):
        LineartimeConfig(n_layers=0)
    config.d_model = "wide"
    with pytest.raises(UsageError, match="d_model = 'wide'"):
        AutoModelForCausalLM.from_config(config)
    # lm_eval cuts texts to the longest row. A table of positions has an end, FLASH has none.
    table = dataclasses.replace(CONFIGS["transformer++"], abs_pos="learned")
    for config, longest in ((CONFIGS["flash"], 1 << 30), (table, table.context)):
        assert LineartimeConfig(**to_dict(config)).max_position_embeddings == longest


def test_a_vocabulary_that_grows_keeps_the_bits_of_its_tokens(hf, ours, tmp_path):
    ids_BT, n = packed_ids(), SIZES["vocab_size"]
    hf.resize_token_embeddings(n + 2, pad_to_multiple_of=8)
    assert (hf.config.vocab_size, hf.model.config.vocab_size, hf.get_output_embeddings().weight.shape[0]) == (264,) * 3
    assert torch.equal(hf.model.embed.weight[:n], ours.embed.weight) and hf.model.embed.weight.requires_grad
    assert torch.equal(hf.model.head_bias[:n], ours.head_bias) and hf.model.head_bias.requires_grad
    assert torch.allclose(hf.model.head_bias[n:], ours.head_bias.mean())
    assert hf.model.embed.weight[n:].std(0).min() > 0  # two new tokens differ
    with torch.no_grad():
        assert torch.allclose(hf(ids_BT).logits[..., :n], ours(ids_BT), atol=1e-5)
    hf.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_weights(again.model, hf.model)
    again.resize_token_embeddings(n)
    assert_same_weights(again.model, ours)


def test_positions_say_what_the_mask_says_or_where_documents_begin(hf64):
    ids_BT, mask_BT = packed_ids(), torch.ones(2, 30, dtype=torch.long)
    mask_BT[0, :4] = mask_BT[1, 25:] = 0
    position_BT = mask_BT.cumsum(1) - 1
    with torch.no_grad():
        expected = hf64(ids_BT, attention_mask=mask_BT).logits
        position_BT = position_BT.masked_fill(mask_BT == 0, 1)
        assert torch.equal(hf64(ids_BT, attention_mask=mask_BT, position_ids=position_BT).logits, expected)
        assert torch.equal(hf64(ids_BT, position_ids=torch.arange(30)[None]).logits, hf64(ids_BT).logits)
        # Two documents, without a token between them: the second does not see the first.
        ids_BT, begins = ids_BT.masked_fill(ids_BT == EOD, 5), torch.tensor([[*range(12), *range(18)]] * 2)
        bounds, segments_BT = torch.tensor([0, 12, 30], dtype=torch.int32), torch.tensor([[0] * 12 + [1] * 18] * 2)
        packed = hf64(ids_BT, position_ids=begins, seq_idx=segments_BT).logits
        assert torch.equal(packed, hf64.model(ids_BT, segments_BT))
        # A document begins where either says so: positions, or an end-of-document token inside.
        ended_BT = ids_BT.index_fill(1, torch.tensor([20]), EOD)
        segments_BT = torch.tensor([[0] * 12 + [1] * 8 + [2] * 10] * 2)
        assert torch.equal(hf64(ended_BT, position_ids=begins).logits, hf64.model(ended_BT, segments_BT))
        hf64(ids_BT[:1], position_ids=begins[:1], cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=18,
             max_length_k=18)
        for wrong, more in ((begins + 1, {}), (begins * 2, {}), (begins, {"use_cache": True}),
                            (torch.arange(30)[None], {"attention_mask": mask_BT})):
            with pytest.raises(UsageError, match="positions that this model does not take: position_ids; leave them"):
                hf64(ids_BT, position_ids=wrong, **more)


@pytest.mark.parametrize(("name", "causal"), [("flash", True), ("flash", False), *rest(
    *itertools.product(("flash-quad", "transformer++", "flash long memory"), (True, False)))])
def test_one_loss_padded_packed_and_alone(name, causal):
    """With `document_grid` "own"; an end-of-document token inside a text begins a document too."""
    config = dataclasses.replace(CONFIGS[name], document_grid="own", causal=causal)
    kind = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    hf = kind.from_config(LineartimeConfig(**to_dict(config))).double()
    hf.model.load_state_dict(random_model(config).state_dict())
    texts = [[EOD, *b"the first text", EOD], [*b"a", EOD, *b"the second one"], [EOD, 5], [EOD, *b"the last of four"]]
    n_learned, labels = sum(len(text) - 1 for text in texts), [[-100, *text[1:]] for text in texts]
    # The labels of padding are tokens, as its ids are: none is learned, and nothing from it.
    right, left = (padded(texts, left=side, padding=EOD) | {"labels": padded(labels, left=side)["input_ids"]}
                   for side in (False, True))
    alone = [{"input_ids": torch.tensor([ids]), "labels": torch.tensor([own])}
             for ids, own in zip(texts, labels, strict=True)]
    packed = transformers.DataCollatorWithFlattening()([{"input_ids": text} for text in texts])
    batches = [[packed], [right], [left], alone]
    losses, gradients = [], []
    for batch in batches:
        losses.append(sum(hf(**each, num_items_in_batch=n_learned).loss for each in batch))
        gradients.append(torch.autograd.grad(losses[-1], [*hf.parameters()]))
    assert all(abs(loss - losses[-1]) < 1e-12 for loss in losses)
    assert all((a - b).abs().max() <= 1e-12 * max(1, b.abs().max())
               for found in gradients for a, b in zip(found, gradients[-1], strict=True))
    hf.model.config = dataclasses.replace(config, document_grid="row")
    by_row = [sum(hf(**each, num_items_in_batch=n_learned).loss for each in batch) for batch in batches]
    assert abs(by_row[0] - by_row[3]) > 1e-9 and all(abs(loss - by_row[3]) < 1e-12 for loss in by_row[1:])


def test_vectors_instead_of_tokens(hf64):
    batch = padded([[1, 2, 3, 4, 5, 6, 7], [8, 9, 10]])
    ids_BT, mask_BT = batch.values()
    embeds_BTD = hf64.get_submodule("embeddings.word_embeddings")(ids_BT).detach()  # the name that PEFT looks for
    with torch.no_grad():
        expected = hf64(**batch).logits
        for use_cache in (False, True):
            got = hf64(inputs_embeds=embeds_BTD, attention_mask=mask_BT, use_cache=use_cache).logits
            assert (got - expected)[mask_BT.bool()].abs().max() < 1e-11
        positions = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2]])}
        packed = hf64(inputs_embeds=embeds_BTD[:1], **positions).logits
        assert torch.equal(packed, hf64(ids_BT[:1], **positions).logits) and not torch.equal(packed, expected[:1])
        sequences = hf64.generate(inputs_embeds=embeds_BTD, attention_mask=mask_BT, max_new_tokens=12, do_sample=False)
        assert torch.equal(sequences, hf64.generate(**batch, max_new_tokens=12, do_sample=False)[:, 7:])


def test_the_states_of_every_block(hf64):
    batch = padded(PROMPTS)
    valid_BT = batch["attention_mask"].bool()
    with torch.no_grad():
        output = hf64(**batch, output_hidden_states=True)
        states = output.hidden_states
        assert len(states) == hf64.config.n_layers + 1 and hf64(**batch).hidden_states is None
        assert torch.equal(hf64.model.logits(states[-1]), output.logits)
        first_BTD = hf64.model.embed(batch["input_ids"]) + hf64.model.abs_pos(valid_BT.cumsum(1) - 1)
        assert (states[0] - first_BTD)[valid_BT].abs().max() < 1e-11
        alone = hf64(torch.tensor(PROMPTS[:1]), output_hidden_states=True).hidden_states
        x_BTD = alone[0]
        for layer in [*hf64.model.residual_layers()][: hf64.model.layers_per_block]:
            x_BTD = layer(x_BTD)
        assert (x_BTD - alone[1]).abs().max() < 1e-11
        decoded = hf64(**batch, output_hidden_states=True, use_cache=True).hidden_states
        for a, b in zip(states, decoded, strict=True):
            assert (a - b)[valid_BT].abs().max() < max(1e-11, 1e-15 * a[valid_BT].abs().max())  # some are 1e5


def test_padding_is_a_token_of_its_own(hf64, folder):
    """Outside the vocabulary: the model takes it for padding and never for a target."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(["once upon a time", "no"], padding=True, return_tensors="pt")
    ids_BT, mask_BT = batch["input_ids"], batch["attention_mask"]
    assert (ids_BT == tokenizer.pad_token_id).sum() == 14 and hf64.config.pad_token_id == tokenizer.pad_token_id
    assert LineartimeConfig(**to_dict(hf64.config.model_config())).pad_token_id == tokenizer.pad_token_id
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    labels_BT = collator([{"input_ids": [EOD, 97, EOD]}, {"input_ids": [EOD, 98, 99, EOD]}])["labels"]
    assert labels_BT.tolist() == [[-100, EOD, 97, EOD], [EOD, 98, 99, EOD]]
    with torch.no_grad():
        masked = hf64(ids_BT, attention_mask=mask_BT, labels=ids_BT)
        assert torch.equal(hf64(ids_BT).logits, masked.logits)
        assert torch.equal(hf64(ids_BT, labels=ids_BT.masked_fill(mask_BT == 0, -100)).loss, masked.loss)
        # Some processors look up the logits of the tokens they are given.
        options = {"do_sample": False, "max_new_tokens": 8, "repetition_penalty": 1.3,
                   "encoder_repetition_penalty": 1.1,
                   "logits_processor": [lambda ids_BT, scores_BV: scores_BV - scores_BV.gather(1, ids_BT[:, :1]) / 9]}
        together = hf64.generate(**batch, **options)
        assert torch.equal(together[1:, -8:], hf64.generate(ids_BT[1:, -3:], **options)[:, -8:])
        grown = copy.deepcopy(hf64)
        grown.resize_token_embeddings(len(tokenizer))  # as scripts for other models do
        assert torch.equal(grown(ids_BT, labels=ids_BT).loss, grown(ids_BT, mask_BT, labels=ids_BT).loss)
        grown.config.eos_token_id = [EOD, tokenizer.pad_token_id]
        assert grown.padding == -1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.rest
def test_exported_with_any_length(hf64):
    lengths = {1: torch.export.Dim("T", min=2, max=64)}
    ids_BT = packed_ids()
    for mask in (None, ids_BT.cumsum(1) > 300):
        program = torch.export.export(hf64, (ids_BT, None if mask is None else mask.long()), dynamic_shapes={
            "input_ids": lengths, "attention_mask": None if mask is None else lengths})
        for n in (2, 17, 30):
            kept = (ids_BT[:, -n:], None if mask is None else mask[:, -n:].long())
            with torch.no_grad():
                difference = (program.module()(*kept).logits - hf64(*kept).logits).abs()
            assert (difference if mask is None else difference[mask[:, -n:]]).max() < 1e-11


def test_text_generation_pipeline(hf64, folder):
    with torch.no_grad():
        hf64.model.head_bias[128:256] -= 100  # text in ASCII, which decodes piece by piece
    pipeline = transformers.pipeline("text-generation", model=hf64, tokenizer=AutoTokenizer.from_pretrained(folder))
    texts, how = ["Once upon a time", "No", "The end"], {"max_new_tokens": 20, "do_sample": False}
    new = generate(hf64.model, texts, tokenizer=byte_tokenizer(), max_new_tokens=20)
    for batch_size in (1, 3):
        got = pipeline(texts, batch_size=batch_size, **how)
        assert [rows[0]["generated_text"] for rows in got] == [a + b for a, b in zip(texts, new, strict=True)]
    (stopped,) = pipeline(texts[0], stop_strings=[stop := new[0][7:9]], tokenizer=pipeline.tokenizer, **how)
    assert stopped["generated_text"] == texts[0] + new[0][: new[0].index(stop) + len(stop)]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers 5.17 has only this name, later ones another
def test_what_peft_and_trl_ask_of_a_model(hf):
    """TRL's trainers take the trunk and the head apart, and call the trunk themselves. PEFT warns
    of an adapter on a tied embedding by names that this model does not have."""
    ids_BT, forward = packed_ids(), hf.forward
    hf.forward = lambda *arguments, **more: forward(*arguments, **more)
    trunk, head = hf.base_model, hf.get_output_embeddings()
    states_BTD = trunk(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), use_cache=False,
                       output_router_logits=False).last_hidden_state
    logits_BTV = torch.nn.functional.linear(states_BTD, head.weight, head.bias)
    assert torch.equal(logits_BTV, hf(ids_BT).logits) and trunk.base_model is trunk.model
    hf.gradient_checkpointing_enable()
    assert hf.model.activation_checkpointing
    hf.gradient_checkpointing_disable()
    assert not hf.model.activation_checkpointing
    hf.model.embed.base_layer = None
    with pytest.warns(UserWarning, match="an adapter on `embed` of a model whose head is tied to it"):
        hf(ids_BT)


def test_what_would_be_ignored_is_refused(hf):
    ids_BT = packed_ids()
    for given, words in (
            ({"position_ids": ids_BT}, "position_ids"), ({"output_attentions": True}, "output_attentions"),
            ({"segment_ids": ids_BT}, "segment_ids"),
            ({"seq_idx": torch.zeros_like(ids_BT)}, "seq_idx"), ({"attention_mask": torch.ones(2, 31)}, "wrong attent"),
            ({"attention_mask": torch.ones(ids_BT.shape) - 1}, "wrong attention_mask: row 0: 0.0 at token 0"),
            ({"past_key_values": transformers.DynamicCache()}, "wrong cache: DynamicCache"),
            ({"inputs_embeds": hf.model.embed(ids_BT)}, "give one of them")):
        with pytest.raises(UsageError, match=words):
            hf(ids_BT, **given)
    hf(ids_BT, output_attentions=False, token_type_ids=None)
    hf.generate(ids_BT[:, :3], max_new_tokens=3, cache_implementation="dynamic")
    with pytest.raises(UsageError, match="a cache of its own: cache_implementation = static"):
        hf.generate(ids_BT[:, :3], max_new_tokens=3, cache_implementation="static")
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        hf.generate(ids_BT[:1, :3], max_new_tokens=3, prompt_lookup_num_tokens=2)
    with pytest.raises(UsageError, match=r"no room for the end-of-document token: 256 tokens"):
        hf.resize_token_embeddings(256)
    for call in (hf.generate_batch, hf.init_continuous_batching):
        with pytest.raises(UsageError, match="continuous batching; call generate"):
            call([[1, 2, 3]])


def test_the_tokenizer_begins_a_text_as_training_does(folder):
    tokenizer, plain = AutoTokenizer.from_pretrained(folder), byte_tokenizer()
    assert type(tokenizer) is LineartimeTokenizer
    assert tokenizer.eos_token == tokenizer.bos_token == END_OF_DOCUMENT
    pad = plain.vocab_size  # not the end of a document, or a collator would take that out of what is learned
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (EOD, pad, pad + 1)
    text = "  Ein Bär .\n\n don't 漢字\t<end> "
    encoded = tokenizer(text)
    assert encoded["input_ids"] == [EOD, *plain.encode(text)] and set(encoded) == {"input_ids", "attention_mask"}
    assert tokenizer.decode(encoded["input_ids"], skip_special_tokens=True) == text
    harness = AutoTokenizer.from_pretrained(folder, add_bos_token=False)  # lm_eval puts the beginning there itself
    assert harness(text)["input_ids"] == plain.encode(text) and harness.bos_token_id == EOD


def test_text_that_spells_a_special_token_is_text(folder, tmp_path):
    """As in training. Trainers write the end of a document behind a text, as do chat templates."""
    tokenizer, plain = AutoTokenizer.from_pretrained(folder), byte_tokenizer()
    texts = ["a <|pad|> b", f"{END_OF_DOCUMENT} c"]
    assert tokenizer(texts)["input_ids"] == [[EOD, *plain.encode(text)] for text in texts]
    assert AutoTokenizer.from_pretrained(folder, split_special_tokens=False)(texts[1])["input_ids"][:2] == [EOD, EOD]
    closed, ids = texts[1] + END_OF_DOCUMENT, [EOD, *plain.encode(texts[1]), EOD]
    assert tokenizer(closed)["input_ids"] == tokenizer([closed], return_tensors="pt")["input_ids"][0].tolist() == ids
    batch = tokenizer([f"abc{END_OF_DOCUMENT}", "d"], padding=True, truncation=True, max_length=4)
    assert batch["input_ids"] == [[EOD, *b"abc"], [tokenizer.pad_token_id] * 2 + [EOD, *b"d"]]
    assert batch["attention_mask"] == [[1] * 4, [0, 0, 1, 1]]
    ended = tokenizer(f"a{END_OF_DOCUMENT}", return_special_tokens_mask=True)
    assert ended["special_tokens_mask"] == [1, 0, 0] and ended.tokens() == [END_OF_DOCUMENT, "a", END_OF_DOCUMENT]
    assert tokenizer.tokenize(closed)[-2:] == ["c", END_OF_DOCUMENT]
    with pytest.raises(UsageError, match="has ids alone"):
        tokenizer(closed, return_special_tokens_mask=True)
    tokenizer.truncation_side = "left"  # the beginning stays, whatever the other texts are
    for other in (END_OF_DOCUMENT, closed):
        cut = tokenizer(["abcd", other], truncation=True, max_length=3)["input_ids"]
        assert cut[0] == [EOD, *b"cd"] and cut[1][-1] == EOD
    harness = AutoTokenizer.from_pretrained(folder, add_bos_token=False, truncation_side="left")
    assert harness(closed, truncation=True, max_length=3)["input_ids"] == [*b" c", EOD]
    tokenizer.truncation_side = "right"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert tokenizer.apply_chat_template(chat)["input_ids"] == [97, EOD, 98, EOD]
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)(texts)["input_ids"] == tokenizer(texts)["input_ids"]
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer("[PAD]")["input_ids"] == [EOD, *b"[PAD]"]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert each("<|turn|>")["input_ids"] == [EOD, plain.vocab_size + 2]


@pytest.mark.parametrize("end", [259, [259, 258]])
def test_a_model_that_was_fine_tuned_under_transformers(hf, folder, tmp_path, end):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|over|>"]})
    hf.resize_token_embeddings(len(tokenizer))
    hf.generation_config.eos_token_id = end
    with torch.no_grad():
        hf.model.head_bias[259] = 1e4
    for model in (hf, tokenizer):
        model.save_pretrained(tmp_path)
    model, own, _ = load_model(tmp_path)
    text = f"<|turn|>user {END_OF_DOCUMENT}é"
    assert own.encode(text) == [258, *byte_tokenizer().encode(text.removeprefix("<|turn|>"))]
    assert own.decode(own.encode(text)) == text
    assert generate(model, ["<|turn|>"], tokenizer=own, max_new_tokens=5) == [""]
    assert model.end_tokens == {EOD, *(end if isinstance(end, list) else [end])}
    for name, content in tokenizer_files(own).items():  # of a run that goes on from it
        (tmp_path / name).write_text(content)
    further = LineartimeTokenizer.from_pretrained(tmp_path)  # padding is behind the vocabulary, as in the run's config
    assert further.pad_token_id == model.config.vocab_size == own.vocab_size
    assert further(text)["input_ids"][1:] == own.encode(text)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(CheckpointError, match=r"damaged: .*generation_config.json; invalid literal"):
        load_model(tmp_path)


def test_a_tokenizer_from_elsewhere_keeps_its_own_tokens(folder, tmp_path):
    """Its post-processor does not count, as it does not in training."""
    inner = Tokenizer.from_str(train_tokenizer(["a b a b abba"] * 9, 300).json)
    inner.add_special_tokens(["[CLS]", "<|turn|>"])
    cls = ("[CLS]", inner.token_to_id("[CLS]"))
    inner.post_processor = TemplateProcessing(single="[CLS] $A [CLS]", special_tokens=[cls])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|turn|>"}')
    ours, tokenizer = load_tokenizer(tmp_path / "tokenizer.json"), AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("abba b")["input_ids"] == [ours.end_of_document, *ours.encode("abba b")]
    assert (tokenizer.bos_token, tokenizer.eos_token) == (END_OF_DOCUMENT, "<|turn|>")
    # A plain class would heed the post-processor: nothing but this class, imported or trusted,
    # opens such an export.
    (tmp_path / "tokenizer_config.json").write_text(tokenizer_files(ours)["tokenizer_config.json"])
    assert type(AutoTokenizer.from_pretrained(tmp_path)) is LineartimeTokenizer


TEXTS = [[EOD, *b"once upon"], [EOD, *b"a"], [EOD, *b"no more of this"]]


@pytest.fixture(scope="module", params=[True, False], ids=["causal", "masked"])
def classified(request, tmp_path_factory):
    ours = random_model(dataclasses.replace(CONFIGS["flash"], causal=request.param))
    return ours, write_checkpoint(tmp_path_factory.mktemp("classified"), ours, byte_tokenizer())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_the_class_of_a_row_does_not_depend_on_its_batch(classified, tmp_path):
    ours, folder = classified
    hf = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, dtype=torch.float64)
    trunk = AutoModel.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        for left in (True, False):
            batch = padded(TEXTS, left=left, padding=EOD + 1)
            logits_BL = hf(**batch).logits
            if ours.config.causal:  # a padding token of its own says where padding is
                assert torch.equal(hf(batch["input_ids"]).logits, logits_BL)
            for row, text in enumerate(TEXTS):
                mean_D = ours.double().hidden(torch.tensor([text]))[0].mean(0)
                assert (logits_BL[row] - hf.score(mean_D)).abs().max() < 1e-11
            states_BTD = trunk(**batch).last_hidden_state
            embedding_BD = document_means(states_BTD, batch["attention_mask"] - 1)[:, 0]
            assert (hf.score(embedding_BD) - logits_BL).abs().max() < 1e-11
    ours.float()
    hf.save_pretrained(tmp_path)
    again, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True, dtype=torch.float64)
    assert not any(loading.values()), loading
    assert again.config.num_labels == 3
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, logits_BL)
    with pytest.raises(UsageError, match="labels_of"):
        hf(**batch, labels_of="x")
    hf, batch = hf.float(), tuple(batch.values())
    with torch.no_grad():
        torch.testing.assert_close(torch.export.export(hf, batch).module()(*batch).logits, hf(*batch).logits)
        of_8_bits = torch.ao.quantization.quantize_dynamic(hf, {torch.nn.Linear})
        torch.testing.assert_close(of_8_bits(*batch).logits, hf(*batch).logits, rtol=0, atol=0.1)


@pytest.mark.parametrize("kind, labels, loss", [
    (None, [2, 0, 1], F.cross_entropy),
    ("multi_label_classification", [[1, 0, 1], [0, 0, 0], [1, 1, 1]], F.binary_cross_entropy_with_logits),
    ("regression", [[0.5, 1, 2], [0, 0, 1], [3, 2, 1]], F.mse_loss),
    ("regression of one", [0.5, -1, -100], F.mse_loss)])
def test_losses_of_rows(classified, kind, labels, loss):
    one, labels = kind == "regression of one", torch.tensor(labels, dtype=None if kind is None else torch.float)
    how = {"num_labels": 1} if one else {"num_labels": 3, "problem_type": kind}
    hf = transformers.AutoModelForSequenceClassification.from_pretrained(classified[1], **how)
    output = hf(**padded(TEXTS), labels=labels)
    assert torch.allclose(output.loss, loss(output.logits[:, 0] if one else output.logits, labels))
    if one or kind is None:
        assert torch.equal(hf(**padded(TEXTS), labels=labels[:, None]).loss, output.loss)
    output.loss.backward()
    assert hf.score.weight.grad.abs().sum() > 0 and 0 < hf.score.weight.std() < 0.04


MLM = train_tokenizer([SAMPLE.read_text(encoding="utf-8")[:30_000]], 500, mlm=True)


@pytest.fixture(scope="module", params=["flash", *rest("transformer++")])
def masked(request, tmp_path_factory):
    ours = random_model(dataclasses.replace(CONFIGS[request.param], causal=False, norm="scale_norm",
                                            vocab_size=MLM.vocab_size, end_of_document=MLM.end_of_document))
    return ours, write_checkpoint(tmp_path_factory.mktemp("masked"), ours, MLM)


def masked_ids():
    ids_BT = packed_ids() % EOD  # where `packed_ids` has the byte tokenizer's token 256, MLM's is 0
    ids_BT[:, 5] = MLM.mask
    return ids_BT


def test_a_masked_checkpoint_says_what_it_is_and_gives_the_same_logits(masked, tmp_path):
    ours, folder = masked
    hf, loading = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert type(hf) is lineartime.hf.LineartimeForMaskedLM and not any(loading.values()), loading
    assert hf.config.architectures == ["LineartimeForMaskedLM"]
    ids_BT = masked_ids()
    with torch.no_grad():
        assert torch.equal(hf(ids_BT).logits, ours(ids_BT))
        assert torch.equal(hf(ids_BT, return_dict=False)[0], ours(ids_BT))
        assert torch.equal(AutoModel.from_pretrained(folder)(ids_BT).last_hidden_state, ours.hidden(ids_BT))
    with pytest.raises(UsageError, match="only a causal"):
        hf(ids_BT, use_cache=True)
    with pytest.raises(UsageError, match=r"causal = false; AutoModelForMaskedLM opens it"):
        AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(UsageError, match=r"causal = true; AutoModelForCausalLM opens it"):
        AutoModelForMaskedLM.from_pretrained(write_checkpoint(tmp_path, random_model(CONFIGS["flash"]), MLM))


def test_the_loss_is_the_mean_over_labels(masked):
    hf, ids_BT = AutoModelForMaskedLM.from_pretrained(masked[1]), masked_ids()
    targets_BT = torch.full_like(ids_BT, -1)
    targets_BT[0, [3, 5, 20]], targets_BT[1, 5] = torch.tensor([7, 8, 9]), 10
    expected = masked_token_losses(masked[0], ids_BT, targets_BT).detach()
    labels_BT = torch.where(targets_BT < 0, -100, targets_BT)
    output = hf(ids_BT, labels=labels_BT)
    assert torch.allclose(output.loss, expected.mean(), rtol=1e-6) and output.logits is not None
    assert torch.allclose(hf(ids_BT, labels=labels_BT, num_items_in_batch=7).loss, expected.sum() / 7, rtol=1e-6)
    output.loss.backward()
    assert all(p.grad.abs().max() > 0 for p in hf.parameters())
    hf.zero_grad()
    nothing = hf(ids_BT, labels=torch.full_like(ids_BT, -100)).loss
    nothing.backward()
    assert nothing == 0 and all((p.grad == 0).all() for p in hf.parameters())
    trained = hf.train()(ids_BT, labels=labels_BT)
    assert torch.equal(trained.loss, output.loss) and trained.logits is None


def test_a_mask_in_the_text_is_the_token(masked, tmp_path):
    tokenizer, text = AutoTokenizer.from_pretrained(masked[1]), "Reader, I [MASK] him.[SEP]b"
    assert tokenizer.bos_token == tokenizer.pad_token == END_OF_DOCUMENT and len(tokenizer) == MLM.vocab_size
    tokenizer.save_pretrained(tmp_path)
    before, after, last = (MLM.encode(part) for part in ("Reader, I", " him.", "b"))
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert type(each) is LineartimeTokenizer
        assert (each.mask_token_id, each.sep_token_id) == (MLM.mask, MLM.separator)
        ids, (padding, (_, short)) = each(text)["input_ids"], each([text, "b"], padding=True).values()
        assert ids == [MLM.end_of_document, *before, MLM.mask, *after, MLM.separator, *last] == padding[0]
        assert short == [0] * (len(ids) - len(last) - 1) + [1] * (len(last) + 1)


def test_fill_mask_pipeline(masked):
    ours, folder = masked
    pipeline = transformers.pipeline("fill-mask", model=str(folder), tokenizer=str(folder))
    ids = [MLM.end_of_document, *MLM.encode("Reader, I"), MLM.mask, *MLM.encode(" him.")]
    with torch.no_grad():
        values, tokens = ours(torch.tensor([ids]))[0, ids.index(MLM.mask)].softmax(-1).topk(5)
    answers = pipeline("Reader, I [MASK] him.")
    assert [answer["token"] for answer in answers] == tokens.tolist()
    assert [answer["score"] for answer in answers] == pytest.approx(values.tolist(), rel=1e-4)
    assert answers[0]["sequence"] == "Reader, I" + MLM.decode([answers[0]["token"]]) + " him."
