"""Pictures of runs: what is read, what is drawn, and that a picture is whole or not there."""

import json

import matplotlib
import numpy as np
import pytest
from matplotlib.image import imread

from lineartime.base.errors import UsageError
from lineartime.config import TrainConfig, model_config, to_dict
from lineartime.training.plot import COLOURS, plot_run, plot_side_by_side, read_curves, smoothed

CLOCK = {"time": 1.0, "tokens_per_s": 100.0, "cpu_s": 0.1}


def make_run(folder, *, n_steps=60, held_out=True, result=True, last=False):
    folder.mkdir()
    config = model_config("flash", d_model=32, n_layers=2, vocab_size=100, query_key_dim=16, chunk_size=16, context=64)
    train = TrainConfig(tokens_per_step=4096, steps=max(n_steps, 1), warmup_steps=1)
    described = {"model": to_dict(config), "train": to_dict(train)}
    described |= {"id": "0", "preset": "flash", "task": "wiki40b", "data": "data"}
    (folder / "run.json").write_text(json.dumps(described))
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, n_steps + 1):
            record = {"step": step, "loss": 4 + 3 / step, "learning_rate": 1 / step, "clock": CLOCK}
            file.write(json.dumps(record) + "\n")
            if held_out and step % 20 == 0 and (last or step < n_steps):
                score = {"loss": 4.2 + 3 / step} | ({"n_tokens": 4096, "of_tokens": 9000} if last else {})
                file.write(json.dumps({"step": step, "held_out": score, "clock": CLOCK}) + "\n")
    if result:
        scores = {"loss": 4.25, "bits_per_byte": 2.125}
        (folder / "result.json").write_text(json.dumps({"run": "0", "steps": n_steps, "held_out": scores}))
    return folder


def coloured(path, colour, part=np.s_[:]):
    """How many pixels of a part of a picture are nearly of this colour."""
    return int((np.abs(imread(path)[part][..., :3] - matplotlib.colors.to_rgb(colour)).max(-1) < 0.02).sum())


@pytest.mark.parametrize("last", [False, True])
def test_curves_are_those_of_the_run(last, tmp_path):
    """A last step that was scored has one point; a line that was cut off has none."""
    run = make_run(tmp_path / "run", last=last)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 61, "lo')
    curves = read_curves(run)
    assert curves.tokens.tolist() == pytest.approx([4096e-6 * step for step in range(1, 61)])
    assert curves.loss[[0, 59]].tolist() == [7.0, 4.05]
    assert curves.held_out == [pytest.approx((4096e-6 * step, loss))
                               for step, loss in ((20, 4.35), (40, 4.275), (60, 4.25))]
    assert curves.learning_rate[[0, 59]].tolist() == [1.0, 1 / 60]
    assert curves.part == ("4,096 of 9,000 tokens" if last else "")  # older versions did not say
    assert curves.title == "flash, 17,475 parameters, context 64"
    assert (smoothed(np.ones(300)) == 1).all()  # also where the window is narrower


@pytest.mark.parametrize("options", [{}, {"n_steps": 1, "result": False}, {"n_steps": 30, "held_out": False}])
def test_a_run_at_any_stage_is_drawn_into_its_folder(tmp_path, options):
    run, before = make_run(tmp_path / "run", **options), dict(matplotlib.rcParams)
    files = {*run.iterdir()}
    path = plot_run(run)
    assert path == run / "loss.png" and coloured(path, "#0072B2") > (0 if options else 500)
    assert {*run.iterdir()} == files | {path} and dict(matplotlib.rcParams) == before
    path.unlink()
    path.symlink_to(tmp_path / "file of the user")
    with pytest.raises(UsageError, match=r"a link is in the picture's place: .*loss\.png; remove it"):
        plot_run(run)


@matplotlib.rc_context({"text.usetex": True})
def test_plot_side_by_side_draws_every_run_in_both_panels_and_the_legend(tmp_path):
    runs = {rf"_{i} $\x$": make_run(tmp_path / f"{i}", n_steps=60 - 20 * i) for i in range(3)}
    (notes := tmp_path / "notes.png").write_text("mine")
    with pytest.raises(UsageError, match=r"exists already: .*notes\.png"):
        plot_side_by_side(runs, notes)
    assert notes.read_text() == "mine"
    for _ in range(2):  # its own picture is replaced
        picture = plot_side_by_side(runs, tmp_path / "out.png")
    height, legend = len(imread(picture)), 80  # pixels
    for part in (np.s_[: height * 2 // 3], np.s_[height * 2 // 3 : -legend], np.s_[-legend:]):
        for colour in COLOURS[:3]:
            assert coloured(picture, colour, part) > 20


def test_nothing_to_draw_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="not a run"):
        plot_run(tmp_path)
    with pytest.raises(UsageError, match="nothing to plot yet"):
        plot_run(make_run(tmp_path / "empty", n_steps=0, result=False))
