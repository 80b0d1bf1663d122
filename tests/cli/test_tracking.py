"""`train --log`: what a library is given, that of TensorBoard if it is installed; what fails stops nothing."""

import sys
import types
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from command_line import Call, assert_refused
from command_line import call as call  # a fixture
from lineartime.cli.tracking import Tracker, numbers_of
from lineartime.run import read_metrics
from lineartime.run_config import run_config
from tiny_runs import command, prepare_text

LINE = {"step": 1, "steps": 2, "loss": 5.0, "clock": {"time": 1.7e9, "tokens_per_s": 100.0}}


def test_numbers_of_a_line_have_names() -> None:
    assert numbers_of(LINE) == {"loss": 5.0, "clock/tokens_per_s": 100.0}
    scores = {"step": 2, "clock": {"time": 1.0}, "held_out": {"loss": 2.0, "by_source": {"a": {"loss": 3.0}}}}
    assert numbers_of(scores) == {"held_out/loss": 2.0, "held_out/by_source/a/loss": 3.0}


def test_a_library_that_is_not_there_is_refused(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = call("train", "flash", "--data", tmp_path, "--out", tmp_path / "run", "--log", "trackio")
    assert_refused(code, err, 2, "the library is not installed: trackio; pip install trackio, or leave out --log")
    code, _, err = call("train", "flash", "--data", tmp_path, "--out", tmp_path / "run", "--log", "tensorbord")
    assert_refused(code, err, 2, "unknown tracker: tensorbord; did you mean tensorboard?")


def test_a_library_has_every_line_of_the_metrics(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[tuple[int, dict[str, float]]] = []
    opened: list[dict[str, Any]] = []
    finished: list[None] = []
    run = types.SimpleNamespace(log=lambda numbers, step: lines.append((step, numbers)),
                                finish=lambda: finished.append(None))
    wandb = types.SimpleNamespace(init=lambda **how: (opened.append(how), run)[1])
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    arguments = [*command(prepare_text(tmp_path), tmp_path / "run", steps=4), "--log", "wandb"]
    assert call(*arguments)[0] == 0
    assert lines == [(line["step"], numbers_of(line)) for line in read_metrics(tmp_path / "run")]
    assert len(finished) == 1 and opened[0]["mode"] == "offline" and opened[0]["dir"] == str(tmp_path / "run")
    assert call(*arguments)[0] == 0 and len(opened) == 1  # complete: nothing is written

    def stopped(config: object, *, on_step: Callable[[dict[str, Any]], None], **_: object) -> None:
        on_step(LINE)
        raise KeyboardInterrupt

    monkeypatch.setattr("lineartime.training.train", stopped)
    assert call(*arguments)[0] == 130 and len(finished) == 2


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_library_that_fails_is_said_once(broken: str, caplog: pytest.LogCaptureFixture,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    works = {name: lambda *_, **__: None for name in ("init", "log", "finish")}
    monkeypatch.setitem(sys.modules, "trackio", types.SimpleNamespace(**works | {broken: full}))
    with closing(Tracker("trackio", run_config({"model": "flash", "data": "d", "out": "o"}))) as on_step:
        on_step(LINE)
        on_step(LINE)
    assert caplog.messages == ["trackio does not go on: OSError: no space left; the metrics are in metrics.jsonl"]


def test_tensorboard_shows_a_resumed_run_without_what_was_written_twice(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = run_config({"model": "flash", "data": "d", "out": str(tmp_path)})
    for steps in ((1, 2, 3), (3, 4)):
        with closing(Tracker("tensorboard", config)) as on_step:
            for step in steps:
                on_step(LINE | {"step": step, "loss": 10.0 * len(steps) + step})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [(1, 31), (2, 32), (3, 23), (4, 24)]
