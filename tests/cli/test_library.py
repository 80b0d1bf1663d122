"""The library from Python: what the verbs do in a few lines, with progress as a callback and nothing printed."""

import json
import logging
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lineartime
from lineartime.errors import DataError, UsageError
from tiny_runs import SETTINGS

ROOT = Path(__file__).parents[2]
TEXT = "The quick brown fox jumps over the lazy dog. " * 60


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("library")
    (root / "book.txt").write_text(TEXT)
    lineartime.prepare([root / "book.txt"], root / "data", tokenizer="bytes", held_out=0.2)
    return root / "data"


def test_prepare_train_evaluate_generate(data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str],
                                         caplog: pytest.LogCaptureFixture) -> None:
    """Progress comes by callbacks, news by logging, and nothing is printed."""
    caplog.set_level(logging.INFO, "lineartime")
    told: list[tuple[str, int, int | None]] = []
    lines: list[dict[str, object]] = []
    settings = {"model": "flash", "data": data, "out": tmp_path / "run", **SETTINGS, "steps": 4}
    result = lineartime.train(settings, on_step=lines.append, progress=lambda *progress: told.append(progress))
    model, tokenizer, _ = lineartime.load_model(result.out)
    scores = lineartime.evaluate(model, lineartime.open_split(data, "validation"))
    (ids,) = lineartime.generate(model, [tokenizer.encode("The quick")], max_new_tokens=4)
    assert scores.to_dict() == result.scores["held_out"] and len(ids) <= 4
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert {line["steps"] for line in lines} == {4}
    assert told[-1] == ("evaluating", scores.n_tokens, scores.n_tokens)
    assert json.loads((result.out / "result.json").read_text()) == result.scores
    assert result.sample == (result.out / "sample.txt").read_text() and not result.already
    for name in ("latest/model.safetensors", "metrics.jsonl", "loss.png"):
        assert (result.out / name).stat().st_size > 0
    again = lineartime.train(settings)
    assert again.already and (again.scores, again.sample) == (result.scores, result.sample)
    assert capfd.readouterr() == ("", "")
    assert any(record.name == "lineartime.runtime" and record.getMessage().startswith("on c")
               for record in caplog.records)


def test_progress_of_prepare(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(TEXT)
    told: list[tuple[str, int, int | None]] = []
    manifest = lineartime.prepare([tmp_path / "book.txt"], tmp_path / "data", tokenizer="bytes", held_out=0.2,
                                  progress=lambda *progress: told.append(progress))
    assert manifest.splits["train"].documents == 1
    assert {what for what, _, _ in told} == {"hashing", "checking", "tokenising", "writing"}
    assert ("tokenising", len(TEXT), len(TEXT)) in told and told[-1][1] == told[-1][2] == len(TEXT) + 2
    assert [done for _, done, _ in told[:2]] == [0, 1]


def test_what_is_wrong_is_an_error_of_ours(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean flash"):
        lineartime.train({"model": "flsh", "data": str(data), "out": str(tmp_path / "run")})
    with pytest.raises(UsageError, match="unknown device"):
        lineartime.train({"model": "flash", "data": str(data), "out": str(tmp_path / "run"), **SETTINGS}, device="tpu")
    with pytest.raises(UsageError, match="no such folder"):
        lineartime.train({"model": "flash", "data": str(tmp_path / "none"), "out": str(tmp_path / "run")})
    model, _, _ = lineartime.load_model(lineartime.model_folder("small"))
    with pytest.raises(UsageError, match="the run's tokenizer has no"):
        lineartime.finetune(lineartime.FineTuning(lineartime.model_folder("small"), (), (), tmp_path / "out"))
    stream = lineartime.open_split(data, "validation")
    for wrong in ({"precision": "float8"}, {"context": 0}, {"batch_rows": 0}):
        with pytest.raises(UsageError, match="wrong value"):
            lineartime.evaluate(model, stream, **wrong)
    with pytest.raises(DataError, match="no test split"):
        lineartime.open_split(data, "test")


@pytest.mark.rest
@pytest.mark.parametrize("order", [[], ["reversed"]], ids=str)
def test_no_module_takes_the_place_of_a_function(order: list[str]) -> None:
    """Every module of the package is imported; the public names stay what they are."""
    code = """
import importlib, pkgutil, sys, types, lineartime
names = [name for _, name, _ in pkgutil.walk_packages(lineartime.__path__, "lineartime.") if "__main__" not in name]
for name in sys.argv[1:] and names[::-1] or names:
    try:
        importlib.import_module(name)
    except ImportError as e:
        assert (e.name or "").partition(".")[0] in ("triton", "transformers"), e
for name in lineartime.__all__:
    value = getattr(lineartime, name)
    assert not isinstance(value, types.ModuleType), name
    home = importlib.import_module("lineartime." + lineartime._HOME[name])
    assert value is getattr(home, name), name
assert {name for name in vars(lineartime) if not name.startswith("_")} & {*lineartime.__all__} == set()
"""
    done = subprocess.run([sys.executable, "-c", code, *order], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_package_tells_its_version_and_names() -> None:
    assert lineartime.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {*lineartime.__all__, "__version__", "__name__"} <= {*dir(lineartime)}


def test_the_description_on_an_index_has_no_link_into_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {}
    monkeypatch.setattr("setuptools.setup", lambda **fields: given.update(fields))
    runpy.run_path(str(ROOT / "setup.py"))
    links = re.findall(r"\]\(([^)]*)\)", given["long_description"])
    assert links and all(link.startswith("https://") for link in links)
    assert "Read on" in given["long_description"] and "A small FLASH comes" in given["long_description"]
