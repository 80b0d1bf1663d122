"""`train --log tensorboard`: what TensorBoard is given, and that its errors stop nothing."""

from contextlib import closing
from pathlib import Path

import pytest

from command_line import Call, assert_refused
from lineartime.cli.train import Tracker, numbers_of
from lineartime.folders import read_metrics
from tiny_runs import command, prepare_text

LINE = {"step": 1, "steps": 2, "loss": 5.0, "clock": {"time": 1.7e9, "tokens_per_s": 100.0}}


def test_a_library_that_is_not_there_is_refused(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = call("train", "flash", "--data", tmp_path, "--out", tmp_path / "run", "--log", "tensorboard")
    assert_refused(code, err, 2, "the library is not installed: tensorboard; pip install tensorboard, or leave")


def test_tensorboard_has_every_line_once(call: Call, tmp_path: Path) -> None:
    """Also of a run that went on and wrote lines again; and nothing is written for a run that is complete."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, wanted = tmp_path / "run", {}
    arguments = [*command(prepare_text(tmp_path), run, steps=4), "--log", "tensorboard"]
    with closing(Tracker(str(run / "tensorboard"))) as on_step:
        for step in (1, 2):
            on_step(LINE | {"step": step})
    for _ in range(2):
        assert call(*arguments)[0] == 0
    assert len([*(run / "tensorboard").iterdir()]) == 2
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for line in read_metrics(run):
        for name, value in numbers_of(line):
            wanted.setdefault(name, []).append((line["step"], pytest.approx(value)))
    assert {"loss", "held_out/loss", "clock/tokens_per_s"} <= {*wanted}
    assert {name: [(each.step, each.value) for each in events.Scalars(name)] for name in wanted} == wanted
