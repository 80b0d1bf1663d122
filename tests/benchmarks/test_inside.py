"""studies/inside.py reads gates and heads where they are made, and closes the gates that it says."""

import json
import subprocess
import sys

import pytest
import torch

from lineartime.gau import GatedAttentionUnit
from lineartime.model import LanguageModel
from lineartime.ops.reference import split_uvz
from scripts import ROOT, loaded

inside = loaded("studies", "inside")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LanguageModel(inside.config_of("flash+", inside.PAIRS, {})).eval()


@torch.inference_mode()
def heads_of(model, rows, closed=None):
    """Heads of all layers, with the gates of noise closed in one."""
    with inside.noted_heads() as noted, inside.closed_gates(model, closed):
        model.hidden(rows.ids_BT)
    return noted


@pytest.mark.parametrize("closed", (0, 1))
def test_closed_gates_are_those_of_noise_in_one_layer(model, closed):
    rows = inside.some_rows(4, 128)
    noise_BT = inside.is_noise(rows.ids_BT)
    for layer, ((_, open_BTS, _), (_, k_BTS, _)) in enumerate(
            zip(heads_of(model, rows), heads_of(model, rows, closed), strict=True)):
        assert open_BTS[noise_BT].abs().min() > 0
        assert bool((k_BTS[noise_BT] == 0).all()) == (layer == closed)
        if layer == 0:  # a later layer reads what this one says
            assert torch.equal(k_BTS[~noise_BT], open_BTS[~noise_BT])
    assert torch.equal(heads_of(model, rows)[1][1], heads_of(model, rows)[1][1]), "nothing stays changed"


def test_a_query_matches_its_key_where_both_begin_alike():
    same, apart = (inside.match_at_start(name, 0)["match"] for name in ("mc-tfm++, all, k = q", "mc-tfm++, all"))
    assert same > 2 and abs(apart) < 0.5


def test_what_is_read_is_the_linear_half(model):
    """Of one question by the formula: the sum of k v over the noise, and over the facts; keys of questions are none."""
    told, rows = inside.read_from(model), inside.some_rows(inside.N_FACTS, inside.FARTHER[-1] * 128, n_rows=2)
    projected, layer = [], next(module for module in model.modules() if isinstance(module, GatedAttentionUnit))
    layer.in_proj.register_forward_hook(lambda *call: projected.append(call[-1]))
    q_BTS, k_BTS, _ = heads_of(model, rows)[0]
    _, v_BTE, _ = split_uvz(projected[0], model.config.query_key_dim)
    n, read = 2 * inside.N_FACTS, {}
    for name, at in {"facts": slice(0, n), "noise": slice(n, -32)}.items():
        state_BSE = k_BTS[:, at].mT @ v_BTE[:, at]
        read[name] = (q_BTS[:, -32:] @ state_BSE).square().mean().sqrt()
    assert told["noise_over_facts"] == pytest.approx((read["noise"] / read["facts"]).item(), rel=1e-3)
    assert all(0.3 < gate < 0.7 for gate in told["gates"].values()), "gates of a new model are near one half"


def test_asked_far_with_all_gates_is_asked_as_trained(model, monkeypatch):
    """A layer that does not exist has no gate to close."""
    monkeypatch.setattr(inside, "FARTHER", (1, 2))
    as_trained = inside.far(model, None, lambda: None)
    assert inside.far(model, 5, lambda: None) == as_trained and len(as_trained) == 2


def test_tables_have_what_the_rows_have():
    gates = {"value": 0.98, "key": 0.001, "noise": 2e-5}
    row = {"kind": "reach", "model": "flash+", "learning_rate": 3e-3, "seed": 0, "as_trained": [1.0, 0.5, 0.061, 0.0],
           "closed": {"0": [1.0] * 4, "1": [0.994] * 4}, "noise_over_facts": 0.123, "gates": gates}
    assert inside.table_of_reach([row]).splitlines()[-1] == (
        "| flash+ | 0.003 | 0 | 1 .50 .06 .00 | 1 1 1 1 | .99 .99 .99 .99 | 0.12 | 0.98 | 0.001 | 0.00002 |")
    row = {"kind": "company", "order": [1, 2, 4, 8], "seed": 0, "passed": None, "accuracy": {"1": 1.0, "2": 0.25},
           "gates": [[66, 0.5, 0.5], [133, 0.4, 0.6]]}
    assert "| 1, 2, 4, 8 | never | 1 .25 | 0.400 / 0.60 |" in inside.table_of_company([row])
    rows = [{"kind": "start", "model": "flash+", "seed": seed, "match": seed / 2} for seed in (2, 0, 1)]
    assert "| flash+ | 0.00 | 0.50 | 1.00 |" in inside.table_of_start([{"kind": "weights"}, *rows])


def test_the_page_has_the_tables_of_the_rows(tmp_path):
    page, text = tmp_path / "memory.md", (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    page.write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, ROOT / "studies" / "inside.py", "--into", page], check=True)
    assert page.read_text(encoding="utf-8") == text


def test_rows_that_are_there_are_left_out(tmp_path):
    rows, command = tmp_path / "rows.jsonl", [sys.executable, ROOT / "studies" / "inside.py", "start", "--rows"]
    subprocess.run([*command, rows], check=True, capture_output=True)
    lines = rows.read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["start"] * 12 + ["weights"]
    assert subprocess.run([*command, rows], check=True, capture_output=True).stdout == b""
    assert rows.read_text().splitlines() == lines
    wrong = subprocess.run([*command[:2], "stat"], capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: unknown part: stat")
    assert wrong.stderr.count("\n") == 1
