"""The verbs that measure, as a person calls them."""

from pathlib import Path

import pytest
import typer

from benchmarks import cells, verbs
from benchmarks.__main__ import app
from benchmarks.cells import LISTS, SHAPES, named_calls, shaped_config
from benchmarks.op import OPS
from benchmarks.peers import parse_label
from benchmarks.provenance import append_json_lines, rows_in
from command_line import Call, assert_refused
from lineartime.base.errors import ResourceError
from lineartime.config import PRESETS
from lineartime.use.info import describe
from workers_here import work_here


def test_every_named_call_can_be_made() -> None:
    commands, labels, names = typer.main.get_command(app).commands, set(), []
    for name, (verb, *rest) in named_calls([*LISTS]).items():
        names.append(name)
        given = commands[verb].make_context(verb, [*rest, "--device", "cpu", "--json", "rows.jsonl"]).params
        for label in given.get("labels") or given.get("models") or []:
            labels.add(parse_label(label).model)
        assert verb != "op" or given["name"] in OPS
        assert given.get("shape") in (None, *SHAPES)
    assert len(names) == sum(map(len, LISTS.values())) and labels >= set(PRESETS)
    small = [describe(shaped_config(name, shape=SHAPES["small"])).n_parameters for name in ("flash", "transformer++")]
    assert small[0] == pytest.approx(small[1], rel=0.01)
    assert list(named_calls(["paper-latency"])) == [f"paper-latency/{n}-bfloat16" for n in (512, 1024, 2048, 4096)]


def test_named_calls_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    """The rows of one get its name, all of them or none; another one's failure does not stop it."""
    rows, told = tmp_path / "rows.jsonl", list[str]()
    monkeypatch.setitem(LISTS, "short", {"a/wrong": "step flash --contexts many", "b/16": "decode flash"})

    def run(command: list[str]) -> int:
        append_json_lines(Path(command[-1]), [{"model": model} for model in "xy"])
        return 2 * ("many" in command)

    monkeypatch.setattr(cells, "run", run)
    monkeypatch.setattr(verbs, "note", told.append)
    for made in (["a/wrong", "b/16"], ["a/wrong"]):
        told.clear()
        with pytest.raises(ResourceError, match="calls failed: a/wrong"):
            verbs.benchmark_run(("short",), rows, 1, "cpu")
        assert [line.partition(" (")[0] for line in told] == made
    assert [(row["cell"], row["model"]) for row in rows_in(rows)] == [("b/16", "x"), ("b/16", "y")]
    assert [*tmp_path.iterdir()] == [rows]
    assert_refused(*call("run", "shrt", app=app)[::2], 2, "unknown name of cells: shrt; did you mean short?")


def test_a_measurement_is_printed_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    work_here(monkeypatch)
    sizes = ("n_layers=1", "d_model=16", "query_key_dim=8", "n_heads=2", "chunk_size=8")
    code, out, err = call("step", "flash", "transformer++", "--contexts", 16, "--tokens", 32, "--repeats", 2,
                          *(f"--set={size}" for size in sizes), "--json", tmp_path / "rows.jsonl", app=app)
    assert code == 0 and "step: time of a step" in out and "round 2 of 2" in err, err
    assert [row["label"] for row in rows_in(tmp_path / "rows.jsonl")] == ["flash", "transformer++"]
    assert_refused(*call("step", "flash", "--contexts", "16,many", app=app)[::2], 2, "16,many")
    for wrong, words in (("--repeats", "repeats = 0"), ("--precision", "precision: 0"), ("--threads", "threads = 0")):
        assert_refused(*call("step", "flash", wrong, "0", app=app)[::2], 2, words)
