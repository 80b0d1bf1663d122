"""A run that begins with weights, is given more steps, follows a schedule, or mixes texts."""

import json
import math
import shutil
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import fsspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lineartime
from command_line import Call, assert_refused
from lineartime.base.errors import Stopped, UsageError
from lineartime.base.stores import hash_of
from lineartime.config import TrainConfig
from lineartime.data.mixture import order_of, place_of, read_mixture
from lineartime.data.prepare import prepare
from lineartime.data.tokens import batch_rows, open_data, open_split
from lineartime.folders import read_metrics, read_run, weights_folder
from lineartime.training.language import TrainResult
from lineartime.training.optimizers import learning_rate_at
from lineartime.training.run_config import config_for_data, nearest_preset, run_config
from lineartime.training.runtime import StopSignal
from lineartime.weights.load import load_model
from lineartime.weights.transfer import check_shapes
from tiny_runs import SETTINGS, assert_same, command, prepare_text, steps_saved, what_is_left

LEFT_OUT = ("n_layers", "d_model", "query_key_dim", "chunk_size", "warmup_steps")
TRAINING = {name: value for name, value in SETTINGS.items() if name not in LEFT_OUT}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two texts of one tokenizer, and a run of four steps."""
    root = tmp_path_factory.mktemp("from")
    for name, first in (("a", 20_000), ("b", 60_000)):
        (root / name).mkdir()
        prepare_text(root / name, first=first)
    lineartime.train({**SETTINGS, "model": "flash", "data": root / "a/prepared", "out": root / "run", "steps": 4,
                      "warmup_steps": 1}, device="cpu")
    return root


def begun(root: Path, out: Path, stop_at: int | None = None, **changes: object) -> TrainResult:
    """Train on the second text, from the weights of the first."""
    stop = StopSignal()

    def on_step(line: dict[str, object]) -> None:
        if line["step"] == stop_at:
            stop.number = 15

    return lineartime.train({**TRAINING, "data": root / "b/prepared", "out": out, "from": str(root / "run"), "steps": 6,
                             **changes}, device="cpu", on_step=on_step, stop=stop)


def test_the_first_loss_is_that_of_the_weights_and_the_rest_begins_anew(root: Path, tmp_path: Path) -> None:
    begun(root, tmp_path / "new", warmup_steps=2, rope_base=1000.0, context=64)
    model, _, facts = load_model(root / "run")
    changed = lineartime.LanguageModel(config_for_data({**TRAINING, "from": str(root / "run"), "context": 64,
                                                        "rope_base": 1000.0, "data": str(root / "b/prepared"),
                                                        "out": "x"}).model)
    changed.load_state_dict(model.state_dict())
    rows = torch.from_numpy(batch_rows(open_split(root / "b/prepared", "train"), seed=0, step=0, rows_per_step=2,
                                       context=64))
    with torch.no_grad():
        loss = changed(rows[:, :-1], targets=rows[:, 1:]).mean().item()
    first = read_metrics(tmp_path / "new")[0]
    assert first["loss"] == pytest.approx(loss, rel=1e-5)
    assert (first["step"], first["learning_rate"], first["tokens"]) == (1, 0.005, 128)
    stored = json.loads((tmp_path / "new/run.json").read_text())
    assert stored["from"] == str(root / "run") and stored["preset"] == "flash"
    assert stored["from_sha256"] == hash_of(Path(facts["checkpoint"]) / "model.safetensors")["sha256"]
    assert stored["from_model"]["context"] == 32 and stored["model"]["context"] == 64
    older = stored | {name: stored[name] | {"local_scale_init": None} for name in ("from_model", "model")}
    (tmp_path / "new/run.json").write_text(json.dumps(older))  # a field that is gone, in what it was off
    assert read_run(tmp_path / "new") == stored


def test_it_goes_on_to_the_same_bytes_without_the_weights(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(root / "run", source)
    begun(root, tmp_path / "whole", **{"from": str(source)})
    with pytest.raises(Stopped):
        begun(root, tmp_path / "halved", stop_at=2, **{"from": str(source)})
    with pytest.raises(Stopped):  # the same weights by another name
        begun(root, tmp_path / "halved", stop_at=3, **{"from": str(root / "run")})
    shutil.rmtree(source)
    begun(root, tmp_path / "halved", **{"from": str(source)})
    assert_same(tmp_path / "halved", what_is_left(tmp_path / "whole"))
    with pytest.raises(UsageError, match=r"another run is here: .*from: "):
        begun(root, tmp_path / "halved", **{"from": str(tmp_path / "whole")})
    with pytest.raises(UsageError, match="no weights here"):
        begun(root, tmp_path / "other", **{"from": str(source)})


def test_checkpoints_that_were_moved_aside_or_damaged_are_not_begun_with(root: Path, tmp_path: Path) -> None:
    first = read_metrics(begun(root, tmp_path / "run", steps=2).out)[0]["loss"]
    for path in (tmp_path / "run").glob("step-*"):
        path.rename(f"{path}.bad")
    (tmp_path / "run/result.json").unlink()
    assert read_metrics(begun(root, tmp_path / "run", steps=2).out)[0]["loss"] == first  # not of drawn weights
    source = shutil.copytree(root / "run", tmp_path / "source", symlinks=True)
    older, newest = sorted(source.glob("step-*"))[-2:]
    for name, old, new in (("config.json", "silu", "gelu"), ("tokenizer.json", "256", "255")):
        (newest / name).write_text((root / "run" / newest.name / name).read_text().replace(old, new))
        assert weights_folder(str(source)) == older
        shutil.copy(root / "run" / newest.name / name, newest / name)
        assert weights_folder(str(source)) == newest


def test_any_weights_begin_a_run(root: Path, tmp_path: Path, call: Call) -> None:
    """An export is in bfloat16, so that its first loss differs in the third digit. One process
    shards nothing, but its model begins on the meta device."""
    assert call("export", root / "run", "--out", tmp_path / "export")[0] == 0
    begun(root, tmp_path / "run", steps=2, clip_scope="global")
    for name, weights, shard in (("checkpoint", root / "run/latest", False), ("export", tmp_path / "export", False),
                                 ("shard", root / "run", True)):
        out = tmp_path / f"from-{name}"
        begun(root, out, **{"from": str(weights)}, steps=2, clip_scope="global", shard=shard)
        found, wanted = ([line["loss"] for line in read_metrics(each) if "loss" in line]
                         for each in (out, tmp_path / "run"))
        assert (found == wanted) == (name != "export") and found == pytest.approx(wanted, rel=1e-2)


@pytest.mark.parametrize(("more", "words"), [
    (["--from", "RUN", "--set", "d_model=32"], "the weights have other shapes: d_model = 32, the weights have 16; "),
    (["--from", "RUN", "--set", "chunk_size=4", "--set", "key_conv=2"],
     "chunk_size = 4, the weights have 8, key_conv = 2, the weights have 0"),
    (["--from", "RUN", "--set", "vocab_size=300"], "vocab_size = 300, not 257; leave it out"),
    (["--from", "RUN", "--task", "pg19"], "weights have their own model: task = pg19, from = "),
    (["--from", "small"], "the weights and the data have different tokenizers: 4fa18f87371d of small and "),
])
def test_what_cannot_begin_is_refused(root: Path, tmp_path: Path, call: Call, more: list[str], words: str) -> None:
    named = [str(root / "run") if word == "RUN" else word for word in more]
    code, _, err = call("train", *named, "--data", root / "b/prepared", "--out", tmp_path / "new", "--steps", 2,
                        *(["--set", "micro_batch_tokens=4096"] if "small" not in more else []))
    assert_refused(code, err, 2, words)
    assert not (tmp_path / "new").exists()


def test_n_without_chunks_stays_that_of_the_weights() -> None:
    quad = lineartime.model_config("flash-quad", context=600)
    given = {"from": "w", "data": "d", "out": "o", "context": 1200, "micro_batch_tokens": 1200, "tokens_per_step": 2400}
    assert run_config(given, quad).model.scale_len == 600
    assert run_config({**given, "attn_scale_len": 1200}, quad).model.scale_len == 1200


@pytest.mark.parametrize("preset", lineartime.PRESETS)
def test_a_model_is_called_by_its_nearest_preset(preset: str) -> None:
    assert nearest_preset(lineartime.model_config(preset, n_layers=3, d_model=96, vocab_size=300)) == preset


def test_no_field_changes_shapes_unseen() -> None:
    config = lineartime.model_config("flash", n_layers=1, d_model=32, vocab_size=300)
    for fields in ({"norm": "scale_norm"}, {"linear_gate": True}, {"expansion_factor": 3}, {"overlap": True},
                   {"vocab_size": 310}):
        with pytest.raises(UsageError, match=f"{next(iter(fields))} = "):
            check_shapes(config, replace(config, **fields))
    for fields in ({"context": 1024}, {"rope_base": 1e6}, {"document_mask": "paper"}):
        check_shapes(config, replace(config, **fields))
    with pytest.raises(UsageError, match="row longer than the position table"):
        quad = lineartime.model_config("flash-quad", n_layers=1, d_model=32, vocab_size=300, context=128)
        check_shapes(quad, replace(quad, context=256, attn_scale_len=128))


@pytest.mark.parametrize("how", [{"warmup_steps": 1, "schedule": "wsd", "decay_share": 0.5}, {"warmup_steps": 2}])
def test_more_steps_are_those_of_a_run_that_had_them(root: Path, tmp_path: Path, how: dict[str, object]) -> None:
    common = {**how, "save_every": 1, "eval_every": 2}
    begun(root, tmp_path / "whole", steps=8, **common)
    with pytest.raises(Stopped):  # where the decay of 4 steps begins, or the warm-up ends
        begun(root, tmp_path / "longer", steps=4, stop_at=2, **common)
    del common["warmup_steps"]  # a run keeps its own
    (tmp_path / "longer/step-00000050.bak").mkdir()  # somebody's copy is no checkpoint
    assert not begun(root, tmp_path / "longer", steps=8, **common).already
    (tmp_path / "longer/step-00000050.bak").rmdir()
    assert_same(tmp_path / "longer", what_is_left(tmp_path / "whole"))


@pytest.mark.parametrize("changes", [{}, {"schedule": "wsd", "decay_share": 0.5}])
def test_a_learning_rate_that_has_fallen_cannot_be_given_more_steps(root: Path, tmp_path: Path,
                                                                    changes: dict[str, object]) -> None:
    begun(root, tmp_path / "run", steps=4, warmup_steps=1, save_every=1, **changes)
    left = what_is_left(tmp_path / "run")
    with pytest.raises(UsageError, match=r"another run is here: .*; steps: 4 -> 8; its learning rate has already "
                                         r"fallen, by schedule = \w+. Give another --out, and begin anew with --from "):
        begun(root, tmp_path / "run", steps=8, warmup_steps=1, save_every=1, **changes)
    assert_same(tmp_path / "run", left)


@settings(max_examples=60)
@given(st.integers(1, 80), st.floats(0, 1), st.sampled_from(["linear", "cosine", "wsd", "constant"]),
       st.floats(0.01, 1))
def test_a_schedule_is_its_definition(steps: int, share: float, schedule: str, decay: float) -> None:
    n_decay = max(round(decay * steps), 1)
    warmup = int(share * (steps - n_decay if schedule == "wsd" else steps))
    config = TrainConfig(steps=steps, warmup_steps=warmup, learning_rate=3.0, schedule=schedule,  # type: ignore[arg-type]
                         **({"decay_share": decay} if schedule == "wsd" else {}))
    for step in range(steps):
        done = (step - warmup) / max(steps - warmup, 1)
        expected = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "constant": 1.0,
                    "wsd": min(1.0, (steps - step) / n_decay)}[schedule] if step >= warmup else (step + 1) / warmup
        assert learning_rate_at(step, config) == pytest.approx(3 * expected, abs=1e-12) and expected > 0


def test_the_warm_up_is_the_papers_or_a_fifth_of_the_run_or_that_of_the_run_that_is_there(root: Path,
                                                                                         tmp_path: Path) -> None:
    given = {**TRAINING, "from": str(root / "run"), "data": root / "b/prepared", "out": tmp_path / "run"}
    for steps, warmup in ((1, 0), (5, 1), (49_999, 9_999), (50_000, 10_000), (125_000, 10_000)):
        assert config_for_data({**given, "steps": steps}).train.warmup_steps == warmup
    lineartime.train({**given, "steps": 2, "warmup_steps": 2}, device="cpu")  # older versions would not take a fifth
    assert lineartime.train({**given, "steps": 2}, device="cpu").already
    with pytest.raises(UsageError, match="another run is here"):  # of more steps, a warm-up among them
        lineartime.train({**given, "steps": 1}, device="cpu")


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=7))
def test_every_text_has_given_its_share_to_within_one_row(weights: list[int]) -> None:
    total, given = sum(weights), [0] * len(weights)
    for row in range(2 * total + 3):
        k, number = place_of(row, tuple(weights))
        assert number == given[k]
        given[k] += 1
        assert all(abs(n - Fraction(w * (row + 1), total)) < 1 for n, w in zip(given, weights, strict=True))


def test_a_mixture_is_read_from_one_word(tmp_path: Path) -> None:
    assert [*read_mixture("a:0.7,b:0.3").items()] == [("a", 7), ("b", 3)] == [*read_mixture("a:70, b:30").items()]
    assert [*read_mixture("a:1,b:.5,c:0.25").items()] == [("a", 4), ("b", 2), ("c", 1)]
    (folder := tmp_path / "a:1,b:2").mkdir()
    assert read_mixture(str(folder)) == {str(folder): 1} and read_mixture("C:/x") == {"C:/x": 1}
    for wrong in ("a,b", "a:0.5,b", "a:0,b:1", "a:1,a:2", "a:1.2.3,b:1", "a:0.333333333,b:0.666666667"):
        with pytest.raises(UsageError):
            read_mixture(wrong)


def test_rows_of_a_mixture_are_rows_of_its_texts(root: Path) -> None:
    both = open_data(f"{root}/a/prepared:2,{root}/b/prepared:1", "train")
    streams = [open_split(root / name / "prepared", "train") for name in "ab"]
    alone = [batch_rows(stream, seed=5, step=0, rows_per_step=400, context=48).tolist() for stream in streams]
    mixed = batch_rows(both, seed=5, step=0, rows_per_step=600, context=48).tolist()  # epochs of 166 rows
    taken = [iter(rows) for rows in alone]
    for row, found in enumerate(mixed):
        assert found == next(taken[place_of(row, (2, 1))[0]])
    for step in (0, 7, 49):
        assert batch_rows(both, seed=5, step=step, rows_per_step=12, context=48).tolist() == mixed[
            step * 12 : (step + 1) * 12]
    assert [text for text, _ in order_of((2, 1))].count(0) == 2


def test_a_mixture_is_trained_resumed_and_scored_by_text(root: Path, tmp_path: Path, call: Call) -> None:
    store = fsspec.filesystem("memory")
    store.put(str(root / "b" / "prepared"), "/mixed-b", recursive=True)
    given = {"data": f"{root}/a/prepared:0.75,memory://mixed-b:0.25", "eval_tokens": 10_000}  # all of them
    done = begun(root, tmp_path / "whole", **given)
    with pytest.raises(Stopped):
        begun(root, tmp_path / "halved", stop_at=3, **given)
    begun(root, tmp_path / "halved", **given)
    assert_same(tmp_path / "halved", what_is_left(tmp_path / "whole"))
    scores, each = done.scores["held_out"], done.scores["by_source"]
    alone = {}
    for name in "ab":
        model, folder = load_model(tmp_path / "whole")[0], root / name / "prepared"
        named = "memory://mixed-b" if name == "b" else str(folder)
        alone[named] = lineartime.evaluate(model, open_split(folder, "validation"))
    assert {name: scored["loss"] for name, scored in each.items()} == pytest.approx(
        {name: scored.loss for name, scored in alone.items()}, rel=1e-6)
    a, b = (scored["loss"] for scored in each.values())
    assert scores["loss"] == pytest.approx(0.75 * a + 0.25 * b) and a != b
    lines = [line["held_out"] for line in read_metrics(tmp_path / "whole") if "held_out" in line]
    assert lines and all(set(line["by_source"]) == set(each) for line in lines)
    assert {name: scored["loss"] for name, scored in lines[-1]["by_source"].items()} == pytest.approx(
        {name: scored["loss"] for name, scored in each.items()})
    assert steps_saved(tmp_path / "whole") == 6
    twice = {**given, "data": f"{root}/a/prepared:0.5,{root}/./a/prepared:0.5"}
    assert begun(root, tmp_path / "twice", **twice).scores["held_out"]["loss"] > 1
    code, said, err = call(*command(given["data"], tmp_path / "short", steps=1, warmup_steps=0, eval_tokens=32))
    assert code == 0 and f"; all of {root}/a/prepared: lineartime evaluate" in said, err
    code, _, err = call("export", tmp_path / "whole", "--out", tmp_path / "export", "--data", given["data"])
    card = (tmp_path / "export/README.md").read_text()
    assert code == 0, err
    assert "75 % of the rows: " in card
    epochs = [6 * 128 * share / open_split(root / name / "prepared", "train").n_tokens
              for name, share in (("a", 0.75), ("b", 0.25))]
    assert f": {epochs[0]:.2f} and {epochs[1]:.2f} times the text" in card
    assert str(root) not in card


def test_texts_of_different_tokenizers_are_not_mixed(root: Path, tmp_path: Path, call: Call) -> None:
    prepare([root / "a/text.txt"], tmp_path / "other", vocab_size=300, held_out=0.2, jobs=1)
    data = f"{root}/a/prepared:1,{tmp_path}/other:1"
    code, _, err = call("train", "flash", "--data", data, "--out", tmp_path / "run")
    assert_refused(code, err, 2, "the data have different tokenizers", f"--tokenizer {root}/a/prepared")
