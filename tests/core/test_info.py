"""What `lineartime info` says, against the paper's tables, the modules and PyTorch's own FLOP counter."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lineartime.config import PRESETS, model_config
from lineartime.generation.generate import prefill
from lineartime.info import DecodingBytes, decoding_bytes, describe, print_description
from lineartime.model import LanguageModel
from lineartime.ops import reference
from marks import rest
from tiny_models import LONG_MEMORY
from token_by_token import add_up_states

SMALL = {"d_model": 48, "n_layers": 3, "vocab_size": 96, "context": 32}


def small(preset: str, task: str = "wiki40b", **fields):
    heads = {} if PRESETS[preset].ffn == "gau" else {"n_heads": 4}
    gau = {"query_key_dim": 16} if PRESETS[preset].ffn == "gau" else {}
    chunk = {"chunk_size": 8} if PRESETS[preset].chunk_size else {}
    return model_config(preset, task, **{**SMALL, **heads, **gau, **chunk, **fields})


PRINTED = {  # millions of parameters by preset, in the tables of C4 and Wiki-40B, and of PG-19
    "flash": (112, 496), "flash-quad": (112, 496), "transformer": (110, None), "transformer+": (110, 486),
    "transformer++": (110, 486), "combiner": (124, 562), "performer": (110, None), "mc-tfm++": (110, None)}


@pytest.mark.parametrize("preset", PRINTED)
def test_parameters_are_the_papers(preset):
    for task, printed in zip(("c4", "wiki40b", "pg19"), (PRINTED[preset][0], *PRINTED[preset]), strict=True):
        if printed is not None:
            described = describe(model_config(preset, task))
            assert dict(described.specification)["Params (M)"] == str(printed)
            assert round(described.n_parameters / 1e6) == printed


def test_specification_reads_as_a_column_of_the_table():
    flash, transformer = (dict(describe(model_config(name, "c4")).specification) for name in ("flash", "transformer"))
    assert [*flash.values()] == ["1", "relu²", "Mixed Chunk", "GAU", "SiLU/Swish", "ScaleNorm", "ScaledSin", "RoPE",
                                 "24", "768", "2", "256", "112"]
    assert (transformer["# of layers"], transformer["Relative position emb."]) == ("12+12", "--")
    assert (transformer["Norm. type"], transformer["Absolute position emb."]) == ("LayerNorm", "Learnable")


@pytest.mark.parametrize("config", [
    *(small(preset) for preset in PRESETS), small("flash", "c4", document_mask="paper"),
    small("performer", prefix_sum="blocks"), small("flash", overlap=True, n_heads=4),
    small("flash", chunk_parts="local"), small("flash", chunk_parts="global"),
    small("flash", "c4", chunk_pooling="attention", overlap=True, first_to_all=True, cls_softmax=True),
    *rest(*(small(preset, "c4") for preset in PRESETS), small("flash-quad", gate=False, key_conv=3),
          small("transformer++", gate=True), small("mc-tfm++", **LONG_MEMORY))])
def test_flops_are_those_that_pytorch_counts(config, monkeypatch):
    # The states of chunks are sums. That they are made by a product with zeros and ones is not counted.
    monkeypatch.setattr(reference, "sum_states", add_up_states)
    model, ids_BT = LanguageModel(config), torch.zeros(2, config.context, dtype=torch.long)
    assert describe(config).n_parameters == sum(p.numel() for p in model.parameters())
    model.set_impl("reference")  # what is made again, and what is left out, is not counted
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        logits_BTV = model(ids_BT)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as backward:
        logits_BTV.sum().backward()
    flops, counted = describe(config).flops, forward.get_total_flops()
    if config.document_mask == "paper":
        # The listing adds up chunks by a G x G product, which a running sum replaces; the count leaves it out.
        n_chunks = config.context // config.chunk_size
        counted -= len(ids_BT) * config.n_layers * 2 * n_chunks**2 * config.query_key_dim * config.d_inner
    assert flops.forward * ids_BT.numel() == counted
    if config.document_mask != "paper":
        assert flops.training * ids_BT.numel() == counted + backward.get_total_flops()


def test_a_longer_context_costs_flash_nothing_per_token():
    flash, quad = ([describe(small(preset, context=n)).flops for n in (64, 640)] for preset in ("flash", "flash-quad"))
    assert flash[0] == flash[1]
    assert quad[1].attention == 10 * quad[0].attention


@pytest.mark.parametrize("config", [
    *(small(preset) for preset in PRESETS), small("flash", overlap=True), small("flash-quad", n_heads=4),
    small("flash", n_heads=4, **LONG_MEMORY), small("transformer++", key_conv=3)],
    ids=lambda config: f"{config.attn_type} {config.ffn}")
def test_decoding_bytes_by_formula(config):
    """The table in docs/paper.md in bfloat16, w bytes, with sums of f; and the state of a row has as many."""
    w, f, c, h, d = 2, 4, config.chunk_size, config.n_heads, config.d_model
    s, e = (config.query_key_dim, config.d_inner) if config.ffn == "gau" else (d, d)
    constant = per_token = 0
    if config.attn_type == "mixed_chunk":
        constant = c * (2 * s + e) * w + s * e * f // h + config.overlap * c * (s + e) * w
        if config.chunk_pooling == "written":
            constant += h * (c + 1) * f
    elif config.attn_type == "quadratic":
        per_token = (s + e) * w
    elif config.attn_type == "linear":
        constant = d * (d // h + 1) * f
    else:
        constant, per_token = 4 * c * d * w + 16, 2 * d * w
    constant += config.key_conv * s * w
    expected = DecodingBytes(config.n_layers * constant, config.n_layers * per_token)
    assert decoding_bytes(config, torch.bfloat16) == expected
    assert expected.at(24) == prefill(LanguageModel(config).bfloat16(), [[1] * 24])[1].n_bytes


def test_options_beyond_the_paper_are_named_and_counted(capsys):
    config = small("flash", n_heads=4, **LONG_MEMORY)
    parts = {part.name: part.each for part in describe(config).parts}
    assert parts["layer: key convolution"] == 3 * 16 and parts["layer: write gate"] == 16 + 4
    assert parts["layer: norms"] == 2 * config.d_model + config.d_inner
    assert set(parts) - {part.name for part in describe(small("flash", n_heads=4)).parts} == {
        "layer: key convolution", "layer: write gate"}
    print_description(small("flash", rope_base=500, local_key_conv=True, local_scale_init=1, **LONG_MEMORY), "flash")
    lines = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert lines >= {"rope_base 500.0", "key_conv 3", "linear_scale_init 1.0", "linear_rope false", "linear_gate true",
                     "linear_norm true", "local_key_conv true", "local_scale_init 1.0", "chunk_pooling written"}


@pytest.mark.parametrize(("config", "words"), [
    (model_config("flash"), "at any length"), (model_config("flash", "c4"), "not causal"),
    (model_config("transformer++"), "73,728 bytes more with each token; 36.0 MiB at context 512")])
def test_print_description(config, words, capsys):
    print_description(config, "a name [wiki40b]")
    text = capsys.readouterr().out
    assert "a name [wiki40b]" in text and " M" in text and words in text
    assert max(map(len, text.splitlines())) <= 80
