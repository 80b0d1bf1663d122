"""The laws that are asked of any class: ours keep them, one that ignores masks does not."""

import functools
from pathlib import Path

import pytest
import torch

from benchmarks import laws
from benchmarks.__main__ import app
from benchmarks.laws import BROKEN, HOLDS, REFUSED, UNTRIED
from benchmarks.provenance import rows_in
from command_line import Call, assert_refused
from lineartime.hf import LineartimeForCausalLM

KEPT = ("decode", "pieces", "left-padding", "right-padding", "batch", "packed", "packed-lengths", "beams", "saved")


@pytest.mark.parametrize("name", ["flash", "flash+", "transformer++"])
def test_ours_keep_the_laws(name: str) -> None:
    row = laws.measure(name, (*KEPT, "rollback"), {"n_layers": 2})
    assert row["architecture"] == "LineartimeForCausalLM" and row["laws"].pop("rollback")["result"] == REFUSED
    assert {law: found["result"] for law, found in row["laws"].items()} == dict.fromkeys(KEPT, HOLDS)
    assert max(found["difference"] for found in row["laws"].values()) < 1e-12


def test_a_class_of_transformers_is_asked_too() -> None:
    found = laws.measure("llama", ("decode", "packed-alone", "rollback", "saved"), {"num_hidden_layers": 2})["laws"]
    assert {each["result"] for each in found.values()} == {HOLDS}


@pytest.mark.parametrize(("ignored", "broken"), [
    ({"attention_mask", "position_ids"}, ("left-padding", "right-padding", "packed")),
    ({"past_key_values", "attention_mask", "position_ids"}, ("decode", "pieces"))])
def test_a_class_that_ignores_what_it_is_told_is_found(ignored, broken, monkeypatch) -> None:
    heard = LineartimeForCausalLM.forward

    @functools.wraps(heard)
    def forward(self, **said):
        return heard(self, **{name: value for name, value in said.items() if name not in ignored})

    monkeypatch.setattr(LineartimeForCausalLM, "forward", forward)
    row = laws.measure("flash", broken, {"n_layers": 2})
    assert {law: found["result"] for law, found in row["laws"].items()} == dict.fromkeys(broken, BROKEN)
    assert all(f"python -m benchmarks laws flash --law {law}" in line
               for law, line in zip(broken, laws.lines(row), strict=True))


def test_a_model_without_a_memory_keeps_no_law(monkeypatch) -> None:
    """Its tokens do not see each other, so that nothing can go wrong."""
    @torch.no_grad()
    def forget(model):
        for layer in model.model.layers:
            layer.out_proj.weight.zero_()
        model.model.abs_pos.scalar.zero_()

    monkeypatch.setattr(laws, "enlarge", forget)
    found = laws.measure("flash", KEPT, {"n_layers": 1})["laws"]
    assert {law for law, each in found.items() if each["result"] != UNTRIED} <= {"batch", "beams"}


def test_as_a_person_calls_it(tmp_path: Path, call: Call) -> None:
    rows = tmp_path / "rows.jsonl"
    code, out, err = call("laws", "flash", "--law", "packed", "--set", "n_layers=1", "--json", rows, app=app)
    (row,) = rows_in(rows)
    assert code == 0 and "packed" in out and HOLDS in out and row["settings"] == {"n_layers": 1}, err
    for wrong, words in ((["flsh"], "did you mean flash?"), (["flash", "--law", "packd"], "did you mean packed?"),
                         (["llama", "--set", "layers=1"], "not a field of its configuration: layers"),
                         (["llama", "--set", "hidden_size='x'"], "wrong settings: llama; "),
                         (["flash", "--json", rows / "x"], "cannot write")):
        assert_refused(*call("laws", *wrong, app=app)[::2], 6 if "write" in words else 2, words)
