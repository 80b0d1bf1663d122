"""What `lineartime info` says, against the paper's tables, formulas and the modules."""

import pytest
import torch

from lineartime.config import PRESETS, model_config
from lineartime.model.language_model import LanguageModel
from lineartime.use.info import DecodingBytes, decoding_bytes, describe, print_description
from lineartime.weights.generation.generate import prefill
from tiny_models import LONG_MEMORY


def small(preset: str, task: str = "wiki40b", **fields):
    own = {"query_key_dim": 16} if PRESETS[preset].ffn == "gau" else {"n_heads": 4}
    chunk = {"chunk_size": 8} if PRESETS[preset].chunk_size else {}
    sizes = {"d_model": 48, "n_layers": 3, "vocab_size": 96, "context": 32, **own, **chunk}
    return model_config(preset, task, **{**sizes, **fields})


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


def test_every_parameter_is_counted():
    options = ({"overlap": True}, {"document_mask": "paper"}, LONG_MEMORY, {"n_heads": 4},
               {"layers": ("gau", "gau_quadratic", "gau")}, {"document_grid": "own", "end_of_document": 0})
    for config in (*(small("flash", **fields) for fields in options), *(small(preset, "c4") for preset in PRESETS)):
        assert describe(config).n_parameters == sum(p.numel() for p in LanguageModel(config).parameters())


@pytest.mark.parametrize("config", [
    *(small(preset) for preset in PRESETS), small("flash", overlap=True), small("flash-quad", n_heads=4),
    small("flash", n_heads=4, **LONG_MEMORY), small("transformer++", key_conv=3)],
    ids=lambda config: f"{config.attn_type} {config.ffn}")
def test_decoding_bytes_by_formula(config):
    """The table in docs/paper.md in bfloat16, w bytes, with sums of f; a state has as many."""
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
    parts, plain = (describe(each).parts for each in (config, small("flash", n_heads=4)))
    assert {name: n for name, n in parts.items() if name not in plain} == {
        "layers: key convolution": 3 * 3 * 16, "layers: write gate": 3 * (16 + 4)}
    print_description(small("flash", rope_base=500, local_key_conv=True, **LONG_MEMORY), "flash")
    lines = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert lines >= {"rope_base 500.0", "key_conv 3", "linear_rope false", "linear_gate true",
                     "local_key_conv true", "chunk_pooling written"}


@pytest.mark.parametrize(("config", "words"), [
    (model_config("flash"), "at any length"), (model_config("flash", "c4"), "not causal"),
    (model_config("transformer++"), "73,728 bytes more with each token; 36.0 MiB at 512")])
def test_print_description(config, words, capsys):
    print_description(config, "a name [wiki40b]")
    text = capsys.readouterr().out
    assert "a name [wiki40b]" in text and " M" in text and words in text
    assert max(map(len, text.splitlines())) <= 88
