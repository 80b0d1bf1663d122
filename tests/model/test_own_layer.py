"""A layer of one's own: the example and two more keep the laws, wrong ones are found; commands take
it by its name, and no folder of weights makes us import anything."""

import dataclasses
import json
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers

import lineartime
import lineartime.hf
from benchmarks import laws
from benchmarks.recall import study
from benchmarks.recall.tasks import TASKS
from command_line import Call, assert_refused
from marks import rest
from own_layers import CausalConv
from tiny_runs import SETTINGS, command, prepare_text

sys.path.append(str((ROOT := Path(__file__).parents[2]) / "examples"))
from own_layer import SlidingWindow


class Forgets(CausalConv):
    def branch(self, normed_BTD, info, cache=None):
        return super().branch(normed_BTD, dataclasses.replace(info, inputs=None), None)


class SeesOtherDocuments(CausalConv):
    def branch(self, normed_BTD, info, cache=None):
        return super().branch(normed_BTD, dataclasses.replace(info, segment_ids_BT=None), cache)


class LooksAhead(CausalConv):
    def branch(self, normed_BTD, info, cache=None):
        return super().branch(normed_BTD + normed_BTD.roll(-1, 1), info, cache)


def asked(layer: type, *names: str) -> set[str]:
    row = laws.measure(f"{layer.__module__}:{layer.__qualname__}", names, {})
    return {found["result"] for found in row["laws"].values()}


@pytest.mark.parametrize("name", ["own_layer:SlidingWindow", "own_layers:CausalConv", "own_layers:SumOfChunks",
                                  *rest("own_layers:GatedDeltaNet")])
def test_layers_keep_the_laws(name: str) -> None:
    names = tuple(laws.OF_LAYERS.keys() - {"export"})
    found = laws.measure(name, names, {})["laws"]
    assert {law: each["result"] for law, each in found.items()} == dict.fromkeys(names, laws.HOLDS)
    assert "Delta" in name or max(each["difference"] for each in found.values()) < 1e-13


def test_wrong_layers_are_found() -> None:
    assert asked(Forgets, "decode", "pieces", "splits", "documents") == {laws.BROKEN}
    assert asked(SeesOtherDocuments, "packed", "packed-alone", "packed-in-row", "documents") == {laws.BROKEN}
    assert asked(LooksAhead, "causal", "splits") == {laws.BROKEN}


@pytest.mark.parametrize("n_tokens", [1, 2, 63, 64, 65, 200])
def test_the_window_is_softmax_over_the_nearest_tokens_of_the_document(n_tokens: int) -> None:
    """By a whole matrix of scores, of two documents in a row."""
    torch.manual_seed(0)
    layer = SlidingWindow(lineartime.ModelConfig(d_model=16, n_heads=1)).double()
    layer.distance_bias.weight.data.normal_()
    x_BTD, ids_BT = torch.randn(2, n_tokens, 16).double(), torch.arange(n_tokens).ge(n_tokens // 3).long().expand(2, -1)
    parts = layer.in_proj(layer.norm(x_BTD)).split(16, -1)
    q_BHTK, k_BHTK, v_BHTK = (layer.heads(part_BTD[:, None])[:, 0] for part_BTD in parts)
    back_TT = torch.arange(n_tokens)[:, None] - torch.arange(n_tokens)
    seen_TT = (back_TT >= 0) & (back_TT < 64) & (ids_BT[0, :, None] == ids_BT[0])
    scores_BHTT = q_BHTK @ k_BHTK.mT / 2 + layer.distance_bias(back_TT.clamp(0, 63)).movedim(-1, 0)
    out_BHTK = scores_BHTT.masked_fill(~seen_TT, -torch.inf).softmax(-1) @ v_BHTK
    expected_BTD = x_BTD + layer.out_proj(out_BHTK.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x_BTD, segment_ids=ids_BT), expected_BTD, rtol=0, atol=1e-13)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    prepare_text(tmp_path)
    return tmp_path


def test_commands_take_a_layer_by_its_name(here: Path, call: Call) -> None:
    """A file of settings, an unfinished run, an export, and transformers."""
    (here / "mine.py").write_text("import own_layer\n\nclass Narrow(own_layer.SlidingWindow):\n    window = 8\n")
    fields = SETTINGS | {"steps": 3, "warmup_steps": 1, "save_every": 1, "model": "flash", "data": "prepared",
                         "layers": ["gau", "attention", "mine:Narrow", "ffn"]}
    del fields["n_layers"], fields["size"]
    (here / "run.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items()))
    assert '"Once more" --temperature 0.8 --import mine\n' in call("train", "run.toml", "--out", "run")[1]
    assert "complete" in call("train", "run.toml", "--out", "run")[1]
    assert "mine:Narrow: position bias" in call("info", "run", "--import", "mine")[1]
    assert call("export", "run", "--out", "exported", "--import", "mine")[0] == 0
    code, scored, _ = call("evaluate", "exported", "--data", "prepared", "--import", "mine", "--json")
    model, held_out = lineartime.load_model("exported")[0], lineartime.open_split("prepared", "validation")
    assert code == 0 and json.loads(scored)["loss"] == lineartime.evaluate(model, held_out).loss
    opened, ids_BT = lineartime.hf.LineartimeForCausalLM.from_pretrained("exported"), torch.arange(40)[None]
    assert torch.equal(opened(ids_BT).logits, model(ids_BT))


def test_rows_of_an_older_hybrid_are_found() -> None:
    rows = study.read_rows(ROOT / "benchmarks" / "rows" / "recall.jsonl")
    config = study.config_of("flash+, full", TASKS["pairs"], {})
    key = study.key_of("flash+, full", "pairs", config, study.training("pairs", TASKS["pairs"], {}))
    assert {row["seed"] for row in rows if row["settings"] == key["settings"]} == {0, 1, 2}


def test_no_folder_of_weights_makes_us_import(here: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "evil", types.SimpleNamespace(Layer=SlidingWindow))
        arguments = command("prepared", "run", layers="gau,evil:Layer", n_layers=2, steps=2, warmup_steps=1)
        assert call(*arguments)[0] == 0 and call("export", "run", "--out", "exported", "--import", "evil")[0] == 0
    (here / "evil.py").write_text("open('imported', 'w').close()")
    sys.path.append(str(here))
    for folder in ("run", "exported"):
        for words in (["evaluate", folder, "--data", "prepared"], ["generate", folder], ["score", folder, "text.txt"],
                      ["read", "text.txt", "--model", folder, "--out", "state"], ["info", folder],
                      ["train", "--from", folder, "--data", "prepared", "--out", "other"],
                      ["finetune", folder, "--questions", "text.txt", "--validation", "text.txt", "--out", "qa"],
                      *[["export", "run", "--out", "e"], ["plot", "run"], command("prepared", "run", steps=4)] * (
                          folder == "run")):
            assert_refused(*call(*words)[::2], 4, "evil:Layer", "add --import evil\n")
        for opened in (lineartime.load_model, lineartime.load_span_model):
            with pytest.raises(lineartime.LineartimeError, match="`import evil` before"):
                opened(folder)
    for kind in ("AutoConfig", "AutoModelForCausalLM", "AutoModel", "AutoModelForQuestionAnswering"):
        with pytest.raises(lineartime.LineartimeError, match="`import evil` before"):
            getattr(transformers, kind).from_pretrained("exported", trust_remote_code=True)
    assert not (here / "imported").exists() and "evil" not in sys.modules


@pytest.mark.parametrize(("text", "words"), [
    ("raise OSError('no disk')", "cannot import the module: bad; OSError: no disk"),
    ("import sys; sys.exit('end')", "cannot import the module: bad; SystemExit: end"),
    ("def f(:", "cannot import the module: bad; SyntaxError"), ("", "no such layer: bad:Layer"),
    ("Layer = 3", "not a layer: bad:Layer"), ("class Layer: pass", "not a layer: bad:Layer"),
    ("class Layer(ResidualLayer):\n def __init__(self, config): 1 / 0", "bad.py:3: ZeroDivisionError"),
    ("class Layer(ResidualLayer):\n def branch(self, x, info, cache=None): 1 / 0", "bad.py:3: ZeroDivisionError"),
    ("import dataclasses, lineartime\nclass Layer(lineartime.GatedAttentionUnit):\n"
     " def __init__(self, config): super().__init__(dataclasses.replace(config, rope_base=9.0))",
     "a layer's heads and RoPE are the model's: "),
    ("class Layer(ResidualLayer): pass", "this layer has no branch: Layer")])
def test_a_wrong_module_is_one_line(text: str, words: str, here: Path, call: Call, monkeypatch) -> None:
    (here / "bad.py").write_text(f"from lineartime import ResidualLayer\n{text}")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    code, _, err = call(*command("prepared", "run", layers="gau,bad:Layer", n_layers=2))  # after progress, perhaps
    sys.modules.pop("bad", None)
    assert_refused(code, "error: " + err.rpartition("error: ")[2], 1 if "Zero" in words else 2, words)
