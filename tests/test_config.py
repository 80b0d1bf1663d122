"""The configuration is the paper's tables; what makes no sense is refused in one line."""

import itertools
import json
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lineartime
from lineartime.base.errors import CheckpointError, UsageError
from lineartime.base.files import read_toml
from lineartime.base.settings import MEANT, OTHER_WORDS, choices_of, field_text
from lineartime.config import MODEL_FIELDS, PRESETS, TRAIN_FIELDS, ModelConfig, TrainConfig, model_config, to_dict
from lineartime.data.prepare_config import PrepareSettings
from lineartime.folders import model_config_json, model_config_of, read_config
from lineartime.tasks.qa.finetune_config import FineTuning
from lineartime.tasks.qa.spans import WindowConfig
from lineartime.training.run_config import RUN_FIELDS, parse_setting, run_config

MINIMAL = {"model": "flash", "data": "books", "out": "run"}

# Tables 8-10, row by row. PG-19's table has no Transformer and no Performer, and no table has
# MC-TFM++, which is Transformer++ with the attention of FLASH.
COLUMNS = ("flash-quad", "flash", "transformer", "transformer+", "transformer++", "combiner", "performer", "mc-tfm++")
TABLES: dict[str, dict[str, tuple[Any, ...]]] = {
    "wiki40b": {
        "n_heads": (1, 1, 12, 12, 12, 12, 12, 12),
        "attn_kernel": ("relu2", "relu2", "softmax", "softmax", "softmax", "softmax", "relu", "softmax"),
        "attn_type": ("quadratic", "mixed_chunk", "quadratic", "quadratic", "quadratic", "rowmajor_axial", "linear",
                      "mixed_chunk"),
        "ffn": ("gau", "gau", "mlp", "mlp", "glu", "mlp", "mlp", "glu"),
        "activation": ("silu", "silu", "gelu", "gelu", "gelu", "gelu", "gelu", "gelu"),
        "norm": ("layer_norm",) * 8,
        "abs_pos": ("scaled_sin", "scaled_sin", "learned", *["scaled_sin"] * 5),
        "rel_pos": ("rope", "rope", None, *["rope"] * 5),
        "n_layers": (24, 24, *[12] * 6),
        "d_model": (768,) * 8,
        "expansion_factor": (2, 2, *[4] * 6),
        "chunk_size": (None, 256, None, None, None, 256, None, 256),
        "causal": (True,) * 8,
    },
}
TABLES["c4"] = TABLES["wiki40b"] | {
    "norm": ("scale_norm", "scale_norm", "layer_norm", *["scale_norm"] * 5),
    "causal": (False,) * 8,
}
TABLES["pg19"] = TABLES["wiki40b"] | {
    "n_heads": (1, 1, *[16] * 6), "n_layers": (72, 72, *[36] * 6), "d_model": (1024,) * 8,
    "chunk_size": (None, 512, None, None, None, 512, None, 512)}


def test_presets_are_the_columns_of_the_tables():
    for model, task in itertools.product(PRESETS, TABLES):
        config = model_config(model, task)
        column = COLUMNS.index({"performer-matmul": "performer", "flash+": "flash"}.get(model, model))
        assert {row: getattr(config, row) for row in TABLES[task]} == {
            row: values[column] for row, values in TABLES[task].items()}
        assert config.prefix_sum == {"performer": "scan", "performer-matmul": "matmul"}.get(model)
        assert config.gate == (config.ffn == "gau")
    five = {"key_conv": 3, "local_key_conv": True, "linear_rope": False, "linear_gate": True,
            "chunk_pooling": "written"}
    assert to_dict(model_config("flash+")) == to_dict(model_config("flash")) | five


def test_training_defaults_are_the_rows_of_the_hyperparameter_tables():
    run = run_config(MINIMAL)
    assert (run.train.tokens_per_step, run.train.steps, run.train.warmup_steps) == (2**18, 125_000, 10_000)
    assert (run.train.learning_rate, run.train.adam_epsilon, run.train.weight_decay) == (7e-4, 1e-6, 0.01)
    assert (run.train.adam_beta1, run.train.adam_beta2) == (0.9, 0.999)
    assert (run.train.clip, run.train.clip_scope) == (0.1, "local")
    assert {model: run_config(MINIMAL | {"model": model}).train.clip for model in PRESETS} == {
        model: None if model == "transformer" else 0.1 for model in PRESETS}
    assert run_config(MINIMAL | {"model": "transformer", "clip": 1}).train.clip == 1.0


def test_what_follows_from_the_fields():
    """The inner width, n of relu(q k / n)^2, and the longest row."""
    assert [model_config(m).d_inner for m in COLUMNS] == [1536, 1536, 3072, 3072, 2048, 3072, 3072, 2048]
    assert model_config("transformer++", "pg19").d_inner == 2728  # 8d/3 is 2730.67
    assert model_config("transformer++", d_model=2, n_heads=1).d_inner == 8
    assert model_config("flash", context=4096).scale_len == 256
    assert model_config("flash-quad", context=4096).scale_len == 4096
    assert model_config("flash-quad", context=4096, attn_scale_len=1024).scale_len == 1024
    assert model_config("transformer", context=1024).max_len == 1024
    assert model_config("transformer+", context=1024).max_len is None
    assert model_config("flash-quad", context=511).max_len == 511
    assert model_config("flash-quad", context=32, abs_pos="learned", attn_scale_len=13).max_len == 13
    hybrid = model_config("flash+", context=400, layers=["gau", "gau_quadratic"])
    quad = replace(hybrid, context=800, **hybrid.kept_scale).of_layer("gau_quadratic")
    assert (hybrid.n_layers, hybrid.max_len, quad.attn_type, quad.scale_len) == (2, 400, "quadratic", 400)
    assert model_config("flash-quad", context=512).max_len is None


REFUSED = [
    ({"model": "flsh"}, "unknown model: flsh; did you mean flash?"),
    ({"model": ["flash"]}, "unknown model: ['flash']"),
    ({"task": "wiki-40b"}, "unknown task: wiki-40b; did you mean wiki40b?"),
    ({"lerning_rate": 1e-3}, "unknown setting: lerning_rate; did you mean learning_rate?"),
    ({"batch_size": 8}, "unknown setting: batch_size; did you mean tokens_per_step?"),
    ({"attn_dropout": 0.1}, "unknown setting: attn_dropout; did you mean dropout?"),
    *(({"minutes": value}, f"wrong value: minutes = {value!r}; it takes a number above 0, up to 100,000")
      for value in (0, -1, float("nan"), 1e9, True, "1")),
    ({"minutes": 2, "steps": 3}, "a run has minutes or steps, not both: minutes = 2, steps = 3; leave one out"),
    ({"steps": 1.5}, "wrong value: steps = 1.5; it takes a whole number"),
    ({"steps": True}, "wrong value: steps = True; it takes a whole number"),
    ({"learning_rate": float("nan")}, "wrong value: learning_rate = nan; it takes a finite number"),
    ({"clip": "off"}, "wrong value: clip = 'off'; it takes a number or None"),
    ({"rel_pos": "none"}, "wrong value: rel_pos = 'none'; it takes 'rope' or None"),
    ({"model": "transformer", "n_layers": 0}, "n_layers must be at least 1: n_layers = 0"),
    ({"learning_rate": 10**400}, "wrong value: learning_rate; the number is too large"),
    ({"seed": -(10**5000)}, "wrong value: seed; the number is too large"),
    ({"data": 5}, "wrong value: data = 5; it takes a folder's path"),
    ({"a\nb": 1}, "unknown setting: a b; the nearest are "),
    ({"chunk_size": None}, "this attention needs a chunk size: attn_type = mixed_chunk, chunk_size = none; try chunk_"),
    ({"model": "performer", "chunk_size": 64}, "chunk_size is for attention in chunks: attn_type = linear; leave it "),
    ({"document_mask": "paper", "chunk_pooling": "sum"}, "the paper's document mask goes with chunk_pooling = mean al"),
    ({"document_mask": "paper", "overlap": True}, "the paper's document mask does not go with overlap: document_mask "),
    ({"chunk_parts": "global", "overlap": True}, "there is no local part to overlap: chunk_parts = global; leave "),
    ({"chunk_pooling": "attention", "chunk_parts": "local"}, "learned chunk weights are for GAU layers with one head "),
    ({"chunk_pooling": "attention", "end_of_document": 0}, "learned chunk weights are for unpacked rows: end_of_docum"),
    ({"model": "flash-quad", "overlap": True}, "overlap is for mixed chunk attention: overlap = true, attn_type = qu"),
    ({"first_to_all": True}, "first_to_all and cls_softmax are for bidirectional GAU layers with one head: causal = t"),
    ({"cls_softmax": True, "causal": False, "attn_kernel": "softmax"}, "cls_softmax takes the place of relu2: attn_"),
    ({"rope_base": 1}, "rope_base must be above 1: rope_base = 1"),
    ({"model": "transformer", "rope_base": 500}, "rope_base is for models with RoPE: rope_base = 500.0, rel_pos"),
    ({"key_conv": 1}, "key_conv is 0 or at least 2: key_conv = 1"),
    ({"key_conv": 257}, "key_conv is too large: key_conv = 257; the largest is 256"),
    ({"key_conv": 4, "causal": False}, "key_conv must be odd in a bidirectional model: key_conv = 4, causal = false"),
    ({"model": "performer", "key_conv": 3}, "key_conv is for quadratic attention and for the linear half of mixed "),
    ({"model": "flash-quad", "linear_gate": True}, "linear_gate is for the linear half of mixed chunk attention: att"),
    ({"layers": ["gau", "gua"]}, "unknown layer: gua; did you mean gau"),
    ({"layers": "gau"}, "wrong value: layers = 'gau'; it takes a list of names"),
    ({"layers": ["gau"], "n_layers": 2}, "layers names another number of layers: 1 names, n_layers = 2; leave n_lay"),
    ({"layers": ["gau"], "document_mask": "paper"}, "the paper's document mask is for layers that are all alike"),
    ({"rotary_dim": 3}, "rotary_dim is even, and at most the width of queries and keys: 3 of 128"),
    ({"dropout": 1.0}, "dropout must lie in [0, 1): dropout = 1.0"),
    ({"model": "transformer++", "position_bias": False}, "position_bias is for relu(q k / n + b)^2: ffn = glu"),
    ({"layers": ["gau_quadratic"], "document_grid": "own", "context": 256}, "n of layers over the whole row is too "),
    ({"local_key_conv": True}, "local_key_conv is for the local half of mixed chunk attention, with key_conv: key_"),
    *(({"qk_norm": True, **fields}, "qk_norm is for a Transformer's softmax attention without chunks: ffn = ")
      for fields in ({"attn_kernel": "softmax"}, {"model": "combiner"}, {"model": "performer"},
                     {"model": "transformer++", "attn_kernel": "relu2"})),
    ({"chunk_pooling": "written"}, 'chunk_pooling "written" needs gates: linear_gate = false; set linear_gate = true'),
    ({"model": "mc-tfm++", "rel_pos": None, "linear_rope": False}, "there is no RoPE to leave out: rel_pos = none"),
    ({"document_mask": "paper", "key_conv": 3}, "the paper's document mask takes no options beyond the paper: docum"),
    ({"chunk_pooling": "attention", "document_grid": "own"}, "cls_softmax and learned chunk weights are for unpacked "),
    ({"n_heads": 3}, "query_key_dim must be a multiple of n_heads: 128, n_heads = 3"),
    ({"n_heads": 4, "d_model": 3, "query_key_dim": 8, "abs_pos": "learned"},
     "the inner width must be a multiple of n_heads: 6, n_heads = 4"),
    ({"attn_type": "linear", "chunk_size": None, "attn_kernel": "relu", "prefix_sum": "scan"},
     "a GAU's attention is quadratic or mixed_chunk: attn_type = linear"),
    ({"attn_kernel": "relu"}, "mixed_chunk attention does not take this kernel: attn_kernel = relu; set attn_kernel ="),
    ({"model": "performer", "attn_kernel": "softmax"}, "linear attention does not take this kernel: attn_kernel = sof"),
    ({"model": "performer", "prefix_sum": None}, "prefix_sum is for linear attention: prefix_sum = none, attn_type = "),
    ({"prefix_sum": "scan"}, "prefix_sum is for linear attention: prefix_sum = scan, attn_type = mixed_chunk; leave"),
    ({"query_key_dim": 127}, "queries and keys need an even width: 127"),
    ({"query_key_dim": 127, "rel_pos": None}, "queries and keys need an even width: 127"),
    ({"d_model": 767}, "ScaledSin needs an even width: d_model = 767"),
    ({"model": "transformer", "n_heads": 7}, "d_model must be a multiple of n_heads: d_model = 768, n_heads = 7"),
    ({"end_of_document": 32_000}, "end_of_document is outside the vocabulary: 32000 of 32000"),
    ({"weight_decay": -0.1}, "weight_decay must not be negative: weight_decay = -0.1"),
    ({"learning_rate": 0}, "learning_rate must be positive: learning_rate = 0.0"),
    ({"adam_beta2": 1}, "adam_beta2 must lie in [0, 1): adam_beta2 = 1.0"),
    ({"clip": 0}, 'clip must be positive: clip = 0.0; none, in Python None, is off'),
    ({"steps": 100, "warmup_steps": 101}, "warm-up is longer than the run: warmup_steps = 101, steps = 100; lower war"),
    ({"decay_share": 0.5}, 'decay_share is for schedule "wsd": schedule = linear; leave it out'),
    ({"schedule": "wsd", "decay_share": 0}, "decay_share is a share of the steps: decay_share = 0.0; it lies above 0"),
    ({"schedule": "wsd", "decay_share": 0.9, "steps": 10}, "the warm-up reaches into the decay: warmup_steps = 2, the"),
    ({"muon_learning_rate": 0.01}, "muon_learning_rate is for Muon: optimizer = adamw; set optimizer = muon, or leave"),
    ({"optimizer": "muon", "shard": True, "clip": None}, "Muon needs whole matrices: shard = true, optimizer = muon; "),
    ({"from": "small"}, "weights have their own model: model = flash, from = small; leave one out"),
    ({"micro_batch_tokens": 3072}, "tokens_per_step must be a multiple of micro_batch_tokens: 262144 and 3072"),
    ({"context": 3000}, "micro_batch_tokens must be a multiple of context: micro_batch_tokens = 4096, context = 3000;"),
]


def refused_by(read, *given, **fields):
    """What the one line says that refuses these."""
    with pytest.raises(UsageError) as refused:
        read(*given, **fields)
    assert "\n" not in str(refused.value) and refused.value.exit_code == 2
    return str(refused.value)


def test_a_wrong_setting_is_refused_in_one_line():
    for wrong, message in REFUSED:
        assert refused_by(run_config, MINIMAL | wrong).startswith(message)
    for missing, message in (("model", "training needs a model: none is named; name one of transformer, "),
                             ("data", "training needs text: no data is named; give --data a folder made by `line"),
                             ("out", "training needs a folder for the run: none is named; give --out a new folder")):
        assert refused_by(run_config, {name: MINIMAL[name] for name in MINIMAL if name != missing}).startswith(message)
    for text, message in (("steps", "a setting is NAME=VALUE: 'steps'"), ("=3", "unknown setting"),
                          ("steps=1e5", "wrong value: steps = '1e5'; it takes a whole number"),
                          ("rel_pos=alibi", "wrong value: rel_pos = 'alibi'; it takes rope or none"),
                          ("compile=yes", "wrong value: compile = 'yes'; it takes true or false"),
                          ("seed=" + "1" * 5000, "wrong value: seed")):
        assert refused_by(parse_setting, text).startswith(message)
    assert refused_by(run_config, MINIMAL | {"zz": 1}).count(",") == 4  # five of all
    fields = {*RUN_FIELDS, *MODEL_FIELDS, *TRAIN_FIELDS}
    assert {*OTHER_WORDS} < fields and not {*MEANT} & fields
    for name in RUN_FIELDS + MODEL_FIELDS + TRAIN_FIELDS:  # a misspelt name is answered with the nearest
        assert refused_by(run_config, MINIMAL | {name[:2] + name[1:]: 1}).endswith(f"did you mean {name}?")
    for name in MODEL_FIELDS + TRAIN_FIELDS:  # every choice of every field is described
        assert f"{name} = <object" in (said := refused_by(run_config, MINIMAL | {name: object()})) and "takes " in said


def test_every_whole_number_has_a_smallest_value():
    """A new field without one would take -1 in silence."""
    for config in (model_config("flash"), TrainConfig(), WindowConfig(64), PrepareSettings(("a.txt",), "out"),
                   FineTuning("run", "a.json", "b.json", Path("out"))):
        for name, kind in typing.get_type_hints(type(config)).items():
            assert int not in choices_of(kind) or name in refused_by(replace, config, **{name: -1})


# Values of which many are valid and many are nearly so.
VALUES = st.one_of(
    st.sampled_from([-1, 0, 1, 2, 3, 8, 12, 64, 256, 512, 1024, 4096, 2**18, 2**70, 10**400, 10**5000]),
    st.sampled_from([-0.5, 0.0, 1e-3, 1.0, 1e308]),
    st.sampled_from([None, True, False, "", "none", "true", "flash", "flash-quad", "transformer", "c4", "pg19"]),
    st.sampled_from(["softmax", "relu2", "quadratic", "mixed_chunk", "mlp", "glu", "gau", "silu", "scale_norm", "rope",
                     "learned", "paper", "sum", "local", "global", "bfloat16"]),
    st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=4), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2), st.dates(), st.datetimes(),
)
NAMES = st.sampled_from(RUN_FIELDS + MODEL_FIELDS + TRAIN_FIELDS)


@settings(max_examples=300)
@given(st.dictionaries(NAMES | st.text(max_size=12), VALUES, max_size=4), st.booleans())
def test_any_settings_are_a_run_or_a_usage_error(fields, complete):
    try:
        run = run_config(MINIMAL | fields if complete else fields)
    except UsageError as refused:
        assert str(refused) and "\n" not in str(refused)
    else:
        for name, value in fields.items():
            if name in MODEL_FIELDS + TRAIN_FIELDS:
                kept = getattr(run.model if name in MODEL_FIELDS else run.train, name)
                assert kept == value
                assert type(kept) is type(value) or (type(kept), type(value)) == (float, int)


def test_every_field_reads_back_from_text():
    """And a stored configuration is the one that was stored."""
    assert all(model_config_of(json.loads(model_config_json(config))) == config for config in PRESETS.values())
    for config in (*PRESETS.values(), TrainConfig(), TrainConfig(clip=None)):
        for name, value in to_dict(config).items():
            expected = tuple(value) if isinstance(value, list) else value
            assert parse_setting(f"{name} = {field_text(value)}") == (name, expected)
    for text, (name, value) in (
            ("steps=1_000", ("steps", 1000)), ("clip=None", ("clip", None)), ("compile=TRUE", ("compile", True)),
            ("learning_rate=3", ("learning_rate", 3.0)), ("data=a=b", ("data", "a=b")),
            ("norm=scale_norm", ("norm", "scale_norm"))):
        assert parse_setting(text) == (name, value) and type(parse_setting(text)[1]) is type(value)


def test_a_removed_setting_is_dropped_if_it_had_no_effect_and_else_named(monkeypatch):
    stored_config, removed = lineartime.config.stored_config, lineartime.config.REMOVED
    monkeypatch.setitem(removed, "gone", (None, "go back"))
    monkeypatch.setitem(removed, "start", (0, "go back"))
    monkeypatch.setattr("lineartime.folders.REMOVED_AT_START", ("start",))
    assert stored_config(TrainConfig(), {"steps": 20_000, "gone": None}) == TrainConfig(steps=20_000)
    for config in (TrainConfig(), ModelConfig()):
        with pytest.raises(CheckpointError, match=r"^a setting that is gone: gone = 2; go back$"):
            stored_config(config, {"gone": 2})
    stored = {"model_type": "lineartime", "gone": None, "start": 3}
    assert model_config_of(stored) == ModelConfig()
    with pytest.raises(CheckpointError, match="gone"):
        model_config_of(stored | {"gone": 2})


def test_a_wrong_file_is_refused(tmp_path):
    """A model's stored configuration, and a run's settings."""
    stored, toml = tmp_path / "config.json", tmp_path / "run.toml"
    for content, message in (
            (b'{"model_type": "bert"}', f"not a lineartime model: {stored}"),
            (b'{"model_type": "lineartime", "d_model": "wide"}', f"wrong value: d_model = 'wide' in {stored}; it tak"),
            (b'{"model_type": "lineartime", "d_model": 0}', f"d_model must be at least 1: d_model = 0 in {stored}")):
        stored.write_bytes(content)
        assert refused_by(read_config, tmp_path).startswith(message)
    for damaged in (b"", b"[" * 100_000, b"[]"):
        stored.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=f"damaged: {stored}"):
            read_config(tmp_path)
    for content, message in ((b"[model]\nd_model = 3", f"settings are flat: [model] in {toml}; move its fields to"),
                             *((wrong, f"not valid TOML: {toml}; ") for wrong in (
                                 b"steps = 1\nsteps = 2", b"\xff\xfe", b"s = " + b"1" * 5000, b"s=" + b"[" * 99_999))):
        toml.write_bytes(content)
        assert refused_by(read_toml, toml).startswith(message)
    for path, why in ((tmp_path / "none", "No such file or directory"), (tmp_path, "Is a directory")):
        assert refused_by(read_toml, path) == f"cannot read the configuration: {path}; {why}"
    toml.write_text("\ufeffsteps = 1", encoding="utf-8")  # a byte order mark is no part of a setting
    assert read_toml(toml) == {"steps": 1}
