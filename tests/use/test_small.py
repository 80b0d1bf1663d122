"""The model that ships with the package: small, whole, better than a compressor."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import lineartime
from lineartime.base.files import read_toml
from lineartime.base.stores import hash_of
from lineartime.data.prepare import prepare
from lineartime.data.tokens import open_split
from lineartime.model.decoding.state import model_sha256
from lineartime.training.evaluation import evaluate
from lineartime.training.run_config import parse_setting, run_config
from lineartime.weights.checkpoint import manifest_of

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "lineartime" / "models" / "small"
CARD = (SMALL / "README.md").read_text(encoding="utf-8")


def test_its_files_are_those_of_its_manifest() -> None:
    files = {name: hash_of(SMALL / name) for name in (
        "config.json", "modeling_lineartime.py", "tokenizer.json", "tokenizer_config.json", "model.safetensors")}
    assert (SMALL / "MANIFEST.json").read_bytes() == manifest_of(files)
    assert files["model.safetensors"]["bytes"] <= 15_000_000


def test_states_of_earlier_versions_open() -> None:
    """They have this hash, which counts settings of then that are gone."""
    model_hash = model_sha256(lineartime.load_model(SMALL)[0])
    assert model_hash == "e446e65aeab1311ceb0b684411ee6951ad32238836ecb488bb6c154ae372d2bd"


def test_it_predicts_a_book_that_it_has_not_seen(tmp_path: Path) -> None:
    """xz that has read the rest of the book needs 2.502 bits per byte."""
    model, _, _ = lineartime.load_model(SMALL)
    prepare([], tmp_path / "data", sample=True, tokenizer=SMALL / "tokenizer.json", held_out=0.1, jobs=1)
    score = evaluate(model, open_split(tmp_path / "data", "validation"), context=2048, max_tokens=8192)
    assert 1.0 < score.bits_per_byte < 2.0


def test_its_card_says_how_it_was_made() -> None:
    assert re.search(r"^\| bits per byte \| 1\.\d{3} \| 1\.\d{3} \|$", CARD, re.MULTILINE)
    assert CARD.startswith((ROOT / "studies" / "small.md").read_text(encoding="utf-8"))
    (line,) = [line for line in CARD.splitlines() if line.startswith("lineartime train ")]
    printed = dict(map(parse_setting, shlex.split(line)[11::2]))
    where = {"data": "DATA", "out": "RUN"}
    source = replace(run_config(read_toml(ROOT / "studies/small_names.toml") | where).model, context=8192)
    config = run_config({"from": "WEIGHTS"} | where | printed, source)
    assert config == run_config({"from": "WEIGHTS"} | where | read_toml(ROOT / "studies/small.toml"), source)
    assert f"| Steps | {config.train.steps:,} of {config.train.steps:,}, " in CARD and "+changes" not in CARD
