"""The library from Python: the verbs in a few lines, progress by callbacks, nothing printed."""

import logging
import re
import runpy
import tomllib
from pathlib import Path

import pytest
import torch

import lineartime
from lineartime.base.errors import UsageError
from lineartime.folders import read_result
from tiny_runs import SETTINGS, prepare_text

ROOT = Path(__file__).parents[2]


def test_prepare_train_evaluate_generate(data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str],
                                         caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress comes by callbacks, news by logging, and nothing is printed. The peak is that of the
    rank with the largest."""
    monkeypatch.setattr("lineartime.training.language.gather", lambda peak, ranks: torch.stack([peak, peak + 1e5]))
    caplog.set_level(logging.INFO, "lineartime")
    told: list[tuple[str, int, int | None]] = []
    lines: list[dict[str, object]] = []
    settings = {"model": "flash", "data": data, "out": tmp_path / "run", **SETTINGS, "steps": 6}
    result = lineartime.train(settings, on_step=lines.append, progress=lambda *progress: told.append(progress))
    model, tokenizer, _ = lineartime.load_model(result.out)
    scores = lineartime.evaluate(model, lineartime.open_split(data, "validation"))
    (ids,) = lineartime.generate(model, [tokenizer.encode("The quick")], max_new_tokens=4)
    assert scores.to_dict() == result.scores["held_out"] and len(ids) <= 4
    assert result.scores["peak_mib"] > 1e5 + 50
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert {line["steps"] for line in lines} == {6}
    assert told[-1] == ("evaluating", scores.n_tokens, scores.n_tokens)
    assert read_result(result.out) == result.scores
    assert result.sample == (result.out / "sample.txt").read_text() and not result.already
    for name in ("latest/model.safetensors", "metrics.jsonl", "loss.png"):
        assert (result.out / name).stat().st_size > 0
    again = lineartime.train(settings)
    assert again.already and (again.scores, again.sample) == (result.scores, result.sample)
    assert capfd.readouterr() == ("", "")
    assert any(record.name == "lineartime.training.loop" and record.getMessage().startswith("on c")
               for record in caplog.records)


def test_progress_of_prepare(tmp_path: Path) -> None:
    told: list[tuple[str, int, int | None]] = []
    prepare_text(tmp_path, progress=lambda *progress: told.append(progress))
    assert {what for what, _, _ in told} == {"hashing", "tokenising", "writing"}
    assert ("tokenising", 10_006, 10_006) in told  # with two byte order marks
    assert told[0] == ("hashing", 0, 1) and told[-1][1] == told[-1][2]


def test_what_is_wrong_is_an_error_of_ours(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown device"):
        lineartime.train({"model": "flash", "data": str(data), "out": str(tmp_path / "run"), **SETTINGS}, device="tpu")
    model, _, _ = lineartime.load_model(lineartime.model_folder("small"))
    with pytest.raises(UsageError, match=r"the model has no \[SEP\]"):
        lineartime.finetune(lineartime.FineTuning(lineartime.model_folder("small"), ("a",), ("b",), tmp_path / "out"))
    stream = lineartime.open_split(data, "validation")
    for wrong, words in (({"precision": "float8"}, "unknown"), ({"context": 0}, "wrong"), ({"batch_rows": 0}, "wrong")):
        with pytest.raises(UsageError, match=words):
            lineartime.evaluate(model, stream, **wrong)


def test_the_package_tells_its_version_and_names() -> None:
    assert lineartime.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {*lineartime.__all__, "__version__", "__name__"} <= {*dir(lineartime)}
    assert all(hasattr(lineartime, name) for name in lineartime.__all__)
    modules = {path.stem for path in Path(lineartime.__file__).parent.iterdir()}
    assert not modules & {*lineartime.__all__}, "importing the module would hide the function"


def test_the_description_on_an_index_has_no_link_into_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {}
    monkeypatch.setattr("setuptools.setup", lambda **fields: given.update(fields))
    runpy.run_path(str(ROOT / "setup.py"))
    links = re.findall(r"\]\(([^)]*)\)", given["long_description"])
    assert links and all(link.startswith("https://") for link in links)
    assert "Read on" in given["long_description"] and "A small model that has read" in given["long_description"]
