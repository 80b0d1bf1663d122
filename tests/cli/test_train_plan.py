"""What a run is before its first step: its size, its plan, its time; its lines for TensorBoard."""

import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lineartime
from command_line import Call, assert_refused
from lineartime.base.errors import Stopped, UsageError
from lineartime.cli import train
from lineartime.cli.terminal import Terminal
from lineartime.config import PRESETS, TASKS, TrainConfig, model_config, to_dict
from lineartime.data.tokens import read_manifest
from lineartime.folders import model_folder, read_metrics
from lineartime.training import language
from lineartime.training.language import TrainResult
from lineartime.training.run_config import config_for_data, run_config
from lineartime.training.runtime import StopSignal
from tiny_runs import SETTINGS, assert_same, command, what_is_left

PLACE = {"data": "D", "out": "R"}


@pytest.mark.parametrize("model", PRESETS)
def test_without_a_size_a_model_is_the_papers_and_a_size_has_the_recipe_that_was_best(model: str) -> None:
    """The recipes are those of benchmarks/tables/results.md, "The recipes of the sizes"."""
    for task in TASKS:
        for size in ({}, {"size": "paper"}):
            config = run_config({"model": model, "task": task, **size, **PLACE})
            assert config.model == model_config(model, task)
            assert config.train == (TrainConfig(clip=None) if model == "transformer" else TrainConfig())
        tiny = run_config({"model": model, "task": task, "size": "tiny", **PLACE}).model
        assert tiny.d_model == 192 and tiny.init_std == 0.04
    train = run_config({"model": model, "size": "tiny", "steps": 120, **PLACE}).train
    found = (train.learning_rate, train.warmup_steps, train.clip, train.clip_scope, train.adam_beta2)
    fast = model in ("mc-tfm++", "performer", "performer-matmul")
    is_gau = model in ("flash", "flash+", "flash-quad")
    assert found == ((8e-3, 6, 0.1, "local", 0.999) if is_gau else (8e-3 if fast else 4e-3, 24, 1.0, "global", 0.95))
    assert train.optimizer == "muon" and train.muon_learning_rate == train.learning_rate * (
        5 if model == "flash-quad" else 2.5 if is_gau else 1.25)


def test_tiny_and_small_train_with_muon_unless_that_cannot_be_or_is_not_wanted() -> None:
    def made(**given: object) -> tuple[str, float, float | None]:
        train = run_config({"model": "flash", "size": "tiny"} | given | PLACE).train
        return train.optimizer, train.learning_rate, train.muon_learning_rate

    assert made() == ("muon", 8e-3, 2e-2) and made(learning_rate=4e-3) == ("muon", 4e-3, 1e-2)
    assert made(muon_learning_rate=3e-2) == ("muon", 8e-3, 3e-2)
    assert made(optimizer="adamw") == made(shard=True, clip_scope="global") == ("adamw", 8e-3, None)
    assert made(size="small") == ("muon", 4e-3, 1e-2) and made(size="base")[0] == "adamw"
    assert made(size="paper", optimizer="muon") == ("muon", TrainConfig.learning_rate, None)
    source = run_config({"model": "flash", "size": "tiny"} | PLACE).model
    assert run_config({"from": "R2", "size": "tiny", **PLACE}, source).train.optimizer == "adamw"


def test_what_is_set_stands_and_the_rest_fits_it() -> None:
    def made(**given: object) -> tuple[int, ...]:
        config = run_config({"model": "flash", "size": "tiny"} | given | PLACE)
        train = config.train
        return (config.model.context, train.micro_batch_tokens, train.tokens_per_step, train.steps, train.warmup_steps)

    assert made() == (512, 2048, 4096, 500, 25) and made(model="transformer++") == (512, 2048, 4096, 500, 100)
    assert made(context=768) == (768, 1536, 3072, 500, 25)
    assert made(context=8192) == (8192, 8192, 8192, 500, 25)
    assert made(tokens_per_step=1024, steps=3) == (512, 1024, 1024, 3, 1)
    assert made(steps=1) == (512, 2048, 4096, 1, 0)
    assert made(tokens_per_step=5120) == (512, 1024, 5120, 500, 25)
    assert made(micro_batch_tokens=8192) == (512, 8192, 8192, 500, 25)
    assert made(steps=200, warmup_steps=0, micro_batch_tokens=512) == (512, 512, 4096, 200, 0)
    assert run_config({"model": "flash", "size": "tiny", "d_model": 48, **PLACE}).model.init_std == 0.08
    for width, n_heads in ((64, 1), (100, 1), (256, 4), (300, 3), (320, 5)):
        model = run_config({"model": "transformer++", "size": "tiny", "d_model": width, **PLACE}).model
        assert (model.d_model, model.n_heads) == (width, n_heads)
    for wrong, words in (({"size": "smal"}, "did you mean small"), ({"context": "long"}, "wrong value: context")):
        with pytest.raises(UsageError, match=words):
            made(**wrong)


@pytest.mark.parametrize("model", ["flash", "transformer++"])
def test_a_field_that_is_set_changes_that_field_alone(model: str, data: Path, tmp_path: Path) -> None:
    """Only the name "paper" makes a run as large as the paper's."""
    given = {"model": model, "data": data, "out": tmp_path / "run"}
    plain = config_for_data(given)
    assert (plain.model.d_model, plain.train.steps) == (192, 500)
    assert config_for_data({**given, "size": "paper"}).train == run_config({"model": model, **PLACE}).train
    with pytest.raises(UsageError, match=r"vocab_size is smaller than the tokenizer's: 200 < 257; leave it out"):
        config_for_data({**given, "vocab_size": 200, "end_of_document": 100})
    for name, value in (("n_layers", 4), ("expansion_factor", 2.5), ("query_key_dim", 32), ("weight_decay", 0.1)):
        changed = config_for_data({**given, name: value})
        fields = {**vars(changed.model), **vars(changed.train)}
        assert fields == {**vars(plain.model), **vars(plain.train), name: value}


@pytest.mark.parametrize(("line", "size", "rate"), [("steps = 2\n", "paper", 7e-4), ("", None, 8e-3)])
def test_a_file_that_is_whole_has_the_papers_other_fields(line: str, size: str | None, rate: float, data: Path,
                                                          tmp_path: Path, call: Call,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[tuple[str | None, float]] = []
    monkeypatch.setattr(train, "say_plan", lambda config, _, size: plans.append((size, config.train.learning_rate)))
    monkeypatch.setattr("lineartime.training.language.train",
                        lambda config, on_plan, **_: on_plan(config) or TrainResult(tmp_path, config, {}, "", True))
    (tmp_path / "run.toml").write_text(f'model = "flash"\nn_layers = 1\nd_model = 16\ntokens_per_step = 4096\n{line}')
    (tmp_path / "rest.toml").write_text(f"tokens_per_step = 4096\n{line}")
    assert call("train", tmp_path / "run.toml", "--data", data, "--out", tmp_path / "run")[0] == 0
    assert plans == [(size, rate)]
    assert train.RunOptions(str(tmp_path / "rest.toml"), weights="small").settings({}).get("size") == size


def test_many_epochs_are_told(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = read_manifest(data)
    n_tokens = manifest.splits["train"].tokens
    for n_epochs, told in ((10, ".00 epochs\n"), (11, ".00 epochs: above ten, the model learns the text by heart")):
        config = run_config({"model": "flash", "context": 8, "d_model": 16, "n_layers": 1, "vocab_size": 257,
                             "tokens_per_step": 8, "micro_batch_tokens": 8, "steps": n_tokens * n_epochs // 8, **PLACE})
        train.say_plan(config, [manifest], "paper")
        assert f", {n_epochs}{told}" in capsys.readouterr().out
    train.say_plan(replace(config, data="A:0.9,B:0.1"), [manifest, manifest], "paper")  # each text has its own
    assert ", 5.50 epochs, of A 9.90\n" in capsys.readouterr().out
    train.say_plan(replace(config, data="A:0.05,B:0.95"), [manifest, manifest], "paper")
    assert ", 5.50 epochs, of B 10.45: above ten" in capsys.readouterr().out


def test_the_last_score_takes_no_longer_than_the_training(data: Path, tmp_path: Path, call: Call) -> None:
    """But it scores all where the run is long enough."""
    n_held_out = read_manifest(data).splits["validation"].tokens
    for steps in (2, 8):
        code, out, err = call(*command(data, tmp_path / f"{steps}", steps=steps, warmup_steps=0, eval_tokens=128))
        scores = json.loads((tmp_path / f"{steps}/result.json").read_text())
        most = 3 * steps * 128
        assert code == 0 and (n_held_out > most) == (steps == 2), err
        assert scores["held_out"]["n_tokens"] == pytest.approx(min(most, n_held_out), abs=33)
        assert (f"a part of the {n_held_out:,} tokens, because the run was short; all of them: lineartime evaluate "
                in out) == (steps == 2)


@pytest.mark.parametrize(("tokenizer", "begun"), [
    ("bytes", "flash"), ("small", "--from small"), ("small/tokenizer.json", "flash")])
def test_text_with_the_tokenizer_of_weights_is_for_these_weights(tokenizer: str, begun: str, tmp_path: Path,
                                                                 call: Call) -> None:
    name = str(model_folder("small") / "tokenizer.json") if "/" in tokenizer else tokenizer
    (tmp_path / "a.txt").write_text("some text " * 99)
    given = ["prepare", tmp_path / "a.txt", "--out", tmp_path / "out", "--tokenizer", name, "--held-out", 0.2]
    assert f"\nnext        lineartime train {begun} --data {tmp_path / 'out'} --out RUN\n" in call(*given)[1]


def test_the_plan_comes_first_and_changes_nothing(data: Path, tmp_path: Path, call: Call) -> None:
    """The bytes of a run are those of one that nobody watches."""
    code, said, err = call(*command(data, tmp_path / "run"))
    assert code == 0
    labels = [line.split()[0] for line in said.splitlines() if line]
    assert labels[:5] == ["size", "model", "data", "run", "on"]
    assert "15 steps of 128 tokens in rows of 32: 1,920 tokens, 0.24 epochs\n" in said
    assert "step 1/15" in err and re.search(r"step 15/15  loss \S+  held-out \S+ \(224 of 1,985 tokens\)  ", err)
    stored = json.loads((tmp_path / "run/run.json").read_text())
    lineartime.train({"model": "flash", "size": "paper", "data": str(data), "out": str(tmp_path / "quiet"),
                      **stored["model"], **stored["train"]}, device="cpu")
    assert_same(tmp_path / "run", what_is_left(tmp_path / "quiet"))
    assert "size " not in call(*command(data, tmp_path / "run"))[1]
    for steps in (1, 2):  # the same run, with more steps
        code, said, err = call(*command(data, tmp_path / "more", steps=steps, warmup_steps=0, schedule="constant"))
        assert code == 0 and f"run      {steps} steps" in said, err
        os.utime(tmp_path / "more/loss.png", (1, 1))  # as if a kill had come before the new picture
    assert call(*command(data, tmp_path / "more", steps=2, warmup_steps=0, schedule="constant"))[0] == 0
    assert (tmp_path / "more/loss.png").stat().st_mtime > 1


def test_minutes_become_steps_once(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                   caplog: pytest.LogCaptureFixture) -> None:
    """Stopped and begun again, the run ends as one that was given its steps by hand."""
    monkeypatch.setattr(language, "LAST_S", 0.0)
    given = {name: value for name, value in SETTINGS.items() if name not in ("steps", "eval_every", "save_every")}
    given |= {"model": "flash", "data": data, "out": tmp_path / "run", "minutes": 0.02}
    stop, plans = StopSignal(), []

    def on_step(record: dict[str, Any]) -> None:
        stop.number = signal.SIGTERM if record["step"] == 5 else None

    with pytest.raises(Stopped), caplog.at_level("INFO"):
        lineartime.train(given, device="cpu", stop=stop, on_step=on_step, on_plan=plans.append)
    lineartime.train(given, device="cpu", on_plan=plans.append)
    stored = json.loads((tmp_path / "run/run.json").read_text())
    train, steps = stored["train"], stored["train"]["steps"]
    assert plans[0] == plans[1] and to_dict(plans[0].train) == train and steps > 5 and stored["minutes"] == 0.02
    assert re.search(rf"0.02 minutes: {steps:,} steps of 128 tokens at \d\S* steps/s\n", caplog.text)
    by_hand = {name: value for name, value in given.items() if name != "minutes"} | train | {"out": tmp_path / "hand"}
    lineartime.train(by_hand, device="cpu")
    assert_same(tmp_path / "run", what_is_left(tmp_path / "hand"), but=["run.json"])
    with pytest.raises(UsageError, match=r"another run is here: .*; minutes: 0\.02 -> 3\. Give another --out"):
        lineartime.train(given | {"minutes": 3}, device="cpu")
    assert config_for_data(given | {"out": tmp_path / "long", "warmup_steps": 600}).train.warmup_steps == 600


def test_a_line_comes_off_a_terminal_now_and_then(capsys: pytest.CaptureFixture[str],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a run that goes on; slow steps, of a machine that was busy, are forgotten."""
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    with Terminal() as terminal:
        for number in range(16):
            terminal.count("step", 7 + number / 16, 500, "loss 5.0")
            now[0] += 6
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 7 and all(re.fullmatch(r"step 7/500  loss 5.0  13:0\d:\d\d left", line) for line in lines)
        for number in range(16 * 20):
            terminal.count("step", 8 + number / 16, 500)
            now[0] += 3
        assert re.fullmatch(r"step 27/500  6:\d\d:\d\d left", capsys.readouterr().err.splitlines()[-1])


def test_tensorboard_has_every_line_once(data: Path, call: Call, tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a run that went on and wrote lines again. A run that is complete adds nothing."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, wanted = tmp_path / "run", {}
    arguments = [*command(data, run, steps=4), "--log", "tensorboard"]
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        assert_refused(*call(*arguments)[::2], 2, "library is not installed: tensorboard; pip install tensorboard, or")
    with train.tensorboard(str(run / "tensorboard")) as on_step:
        for step in (1, 2):
            on_step({"step": step, "steps": 2, "loss": 5.0, "clock": {"time": 1.7e9, "tokens_per_s": 100.0}})
    for _ in range(2):
        assert call(*arguments)[0] == 0
    assert len([*(run / "tensorboard").iterdir()]) == 2
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for line in read_metrics(run):
        for name, value in train.numbers_of(line):
            wanted.setdefault(name, []).append((line["step"], pytest.approx(value)))
    assert {"loss", "held_out/loss", "clock/tokens_per_s"} <= {*wanted}
    assert {name: [(each.step, each.value) for each in events.Scalars(name)] for name in wanted} == wanted
