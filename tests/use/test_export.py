"""A folder to give away: its content is the run's, its card is true. And the model that ships with
the package: small, whole, better than a compressor."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
import typer
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.dynamic_module_utils import get_imports

import lineartime.hf
from command_line import Call, assert_refused
from lineartime.base.errors import CONTROL, CheckpointError, UsageError
from lineartime.base.files import read_toml
from lineartime.base.stores import hash_of
from lineartime.cli import verbs
from lineartime.config import TrainConfig, to_dict
from lineartime.data.prepare import prepare
from lineartime.data.tokens import open_split
from lineartime.folders import read_run
from lineartime.training.evaluation import evaluate
from lineartime.training.run_config import parse_setting, run_config
from lineartime.weights import checkpoint
from tiny_runs import STEPS, command, prepare_text

ROOT = Path(__file__).parents[2]
SAVED = 10  # the step of the newest checkpoint that is left
LOADS = (lineartime.load_model, AutoModelForCausalLM.from_pretrained)
PROMPT = "Reader, I"


def run_verb(*arguments: object) -> None:
    """A verb in this process; where it fails its error is raised."""
    typer.main.get_command(verbs.app).main([*map(str, arguments)], standalone_mode=False)


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has lost its last checkpoint: its metrics go on after the newest that is left."""
    out = tmp_path_factory.mktemp("export") / "run"
    run_verb(*command(data, out, save_every=5, keep=3))
    shutil.rmtree(out / f"step-{STEPS:08d}")
    return out


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    (run.parent / "about.md").write_text("# Tiny\n\nIt knows one book.\n")
    out = run.parent / "models" / "tiny"
    run_verb("export", run, "--out", out, "--about", run.parent / "about.md")
    return out


def test_the_weights_are_the_runs_in_bfloat16(run: Path, exported: Path) -> None:
    assert {path.name for path in exported.iterdir()} == {
        "MANIFEST.json", "README.md", "config.json", "model.safetensors", "modeling_lineartime.py", "tokenizer.json",
        "tokenizer_config.json"}
    assert {weight.dtype for weight in load_file(exported / "model.safetensors").values()} == {torch.bfloat16}
    ours, tokenizer, facts = lineartime.load_model(str(run))
    model, same_tokenizer, where = lineartime.load_model(str(exported))
    assert facts["step"] == SAVED and where == {"checkpoint": str(exported)}
    assert model.config == ours.config and same_tokenizer.sha256 == tokenizer.sha256 and not model.training
    for (name, expected), (same_name, found) in zip(ours.named_parameters(), model.named_parameters(), strict=True):
        assert name == same_name and found.dtype == torch.float32
        assert torch.equal(found, expected.bfloat16().float())


OPEN = """
import sys, transformers
trust = sys.argv[1] == "trust"
for folder in sys.argv[2:]:
    if trust:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        assert type(model).__module__ == "lineartime.hf", type(model)
        model.save_pretrained(sys.argv[3])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    assert trust == (type(tokenizer).__name__ == "LineartimeTokenizer"), type(tokenizer)
    batch = tokenizer(["Reader, I", "I"], padding=True)
    print(batch["input_ids"], batch["attention_mask"], tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    assert trust == ("lineartime" in sys.modules)
"""


def test_a_program_with_another_default_dtype_and_device_gets_the_same_model(run: Path, exported: Path) -> None:
    expected = [lineartime.load_model(folder)[0].state_dict() for folder in (run, exported)]
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = [lineartime.load_model(folder)[0].state_dict() for folder in (run, exported)]
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_transformers_open_it_without_an_import(exported: Path, tmp_path: Path) -> None:
    """Without trust a plain tokenizer gives the same ids. So does what is saved again."""
    ours = AutoTokenizer.from_pretrained(exported)
    batch = ours(["Reader, I", "I"], padding=True)
    expected = (f"{batch['input_ids']} {batch['attention_mask']} {ours.bos_token} {ours.eos_token} {ours.pad_token}\n")
    saved = tmp_path / "saved"
    ours.save_pretrained(saved)
    for how in ("trust", "plain"):
        done = subprocess.run([sys.executable, "-c", OPEN, how, exported, saved], capture_output=True, text=True,
                              cwd=tmp_path, env=os.environ | {
                                  "HF_HOME": str(tmp_path / "cache"),
                                  "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])})
        assert done.stdout == 2 * expected, done.stderr
    assert (saved / "modeling_lineartime.py").read_text() == (exported / "modeling_lineartime.py").read_text()
    assert not (saved / "hf.py").exists()
    again, _, _ = lineartime.load_model(saved)
    assert torch.equal(again.head_bias, lineartime.load_model(exported)[0].head_bias)


def test_without_the_package_it_says_where_to_find_it(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would say to install by name what is imported outside of `try`."""
    code = exported / "modeling_lineartime.py"
    assert get_imports(code) == []
    monkeypatch.setitem(sys.modules, "lineartime.hf", None)
    with pytest.raises(ImportError, match="install lineartime from its repository or a wheel, see its README"):
        exec(code.read_text())


def test_the_card_is_true(exported: Path, run: Path, data: Path, call: Call) -> None:
    card = (exported / "README.md").read_text()
    score = json.loads(call("evaluate", exported, "--data", data, "--json")[1])
    assert "|  | validation |" in card and "test |" not in card
    for name, value in [("bits per byte", f"{score['bits_per_byte']:.3f}"), ("nats per token", f"{score['loss']:.4f}"),
                        ("perplexity per word", f"{score['word_perplexity']:.1f}"),
                        ("tokens", f"{score['n_tokens']:,}"), ("bytes", f"{score['n_bytes']:,}")]:
        assert f"| {name} | {value} |" in card
    _, text, _ = call("generate", exported, "", "--max-new-tokens", 120, "--temperature", 0.8)
    sample = CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), card)
    assert f"at temperature 0.8 with seed 0, not chosen:\n\n```text\n{text}```" in sample
    description, n_parameters = read_run(run), sum(p.numel() for p in lineartime.load_model(run)[0].parameters())
    front = re.match(r"---\n(.*?)\n---\n\n(.*)", card, re.DOTALL)
    assert front is not None and front[2].startswith("# Tiny\n\nIt knows one book.\n\n## Model\n")
    assert yaml.safe_load(front[1]) == {"library_name": "lineartime", "pipeline_tag": "text-generation",
                                        "tags": ["flash", "gated-attention-unit", "linear-attention"]}
    assert f"| Steps | {SAVED} of {STEPS}, of 128 tokens |" in card and f"| Tokens | {SAVED * 128:,}: " in card
    assert f"| Parameters | {n_parameters:,} |" in card and description["data_sha256"] in card
    (settings,) = [line for line in card.splitlines() if line.startswith("| Settings | ")]
    named = dict(map(parse_setting, re.findall(r"`(\w+=.*?)`", settings)))
    assert to_dict(TrainConfig(**named)) == description["train"]
    assert str(run.parent) not in card and str(data.parent) not in card


def test_a_masked_model(tmp_path: Path, call: Call) -> None:
    data, run, out = prepare_text(tmp_path, mlm=True), tmp_path / "run", tmp_path / "out"
    run_verb(*command(data, run, causal="false", steps=3))
    assert call("export", run, "--out", out, "--data", data)[0] == 0
    card = (out / "README.md").read_text()
    assert "\npipeline_tag: fill-mask\n" in card and "\n---\n\n# flash, " in card
    assert "| nats per masked token |" in card and "per byte" not in card and "Sample" not in card
    assert not lineartime.load_model(out)[0].config.causal


def test_a_shipped_model_by_its_name(run: Path, exported: Path, data: Path, call: Call, tmp_path: Path,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lineartime.folders.MODELS", exported.parent)
    assert lineartime.model_folder("tiny") == exported
    how, score = [PROMPT, "--max-new-tokens", 8], ["--data", data]
    assert call("generate", "tiny", *how) == call("generate", exported, *how)
    assert call("evaluate", "tiny", *score) == call("evaluate", exported, *score)
    code, out, _ = call("info", "tiny", "--set", "context=512")
    assert code == 0 and re.search(r"context +512\b", out) and re.search(r"Hidden size +16\b", out)
    assert call("info", exported)[1].split("\n", 1)[1] == call("info", "tiny")[1].split("\n", 1)[1]
    assert_refused(*call("generate")[::2], 2, "Missing argument 'MODEL'")
    assert_refused(*call("export", "tiny", "--out", run / "x")[::2], 2, "an exported folder already", exported)
    assert_refused(*call("evaluate", "tinny", *score)[::2], 2, "no weights here: tinny", "shipped model: tiny")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()  # a folder of that name: which of the two is meant is said
    code, _, err = call("generate", "tiny", "--max-new-tokens", 1)
    assert code == 0 and "warning: tiny is the model that ships with the package; write ./tiny for the folder" in err
    assert_refused(*call("generate", "./tiny")[::2], 2, "not a run: tiny")
    (tmp_path / "tiny/adapter_config.json").touch()
    assert_refused(*call("generate", "./tiny")[::2], 2, "an adapter of PEFT, without the model: tiny; open it with")


def test_an_export_into_a_store_is_that_into_a_folder(run: Path, exported: Path, data: Path, call: Call, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    store = fsspec.filesystem("memory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    to_store = ("export", run, "--out", "memory://models/tiny", "--about", run.parent / "about.md")
    assert call(*to_store)[0] == 0
    for name in ("model.safetensors", "config.json", "tokenizer.json", "MANIFEST.json"):
        assert store.cat(f"/models/tiny/{name}") == (exported / name).read_bytes()
    assert_refused(*call(*to_store)[::2], 2, "the output exists already: memory://models/tiny")
    store.put(f"{data}/", "/models/data", recursive=True)
    for own, there in ((exported, "memory://models/tiny"), (data, "memory://models/data")):
        assert call("info", there) == (0, call("info", own)[1].replace(str(own), there), "")
    assert_refused(*call("prepare", run.parent / "about.md", "--tokenizer", "bytes", "--out", to_store[3])[::2], 2,
                   "the output exists and is not a prepared folder: memory://models/tiny; choose another")
    with monkeypatch.context() as patch:  # an upload that is cut off has no manifest
        names: list[str] = []
        patch.setattr(type(store), "put", lambda self, own, there, **how: names.append(there))
        assert call(*to_store[:3], "memory://models/again")[0] == 0 and names[-1].endswith("again/MANIFEST.json")
    assert not list(tmp_path.rglob("*.safetensors"))  # weights are not copied to be described
    how = (PROMPT, "--max-new-tokens", 3, "--temperature", 0)
    assert call("generate", "memory://models/tiny", *how) == call("generate", exported, *how)
    for verb, name in (("info", "models"), ("generate", "models/data")):
        assert_refused(*call(verb, f"memory://{name}")[::2], 2, f"no config.json here: memory://{name}; give the")
    assert_refused(*call("info", "memory://none")[::2], 3, "cannot read: memory://none; no such file or folder")


def test_refusals(data: Path, run: Path, exported: Path, tmp_path: Path, call: Call,
                  monkeypatch: pytest.MonkeyPatch) -> None:
    """One line and an exit code, before the scores, which take long; nothing is left behind."""
    (tmp_path / "latin1.md").write_bytes(b"caf\xe9")
    (tmp_path / "nul.md").write_bytes(b"# A\0")
    monkeypatch.setattr("lineartime.use.export.evaluate_data", pytest.fail)
    (tmp_path / "text").mkdir()
    other, out = prepare_text(tmp_path / "text", first=40_000), tmp_path / "new" / "out"
    description, described = json.loads((run / "run.json").read_text()), []
    no_hash = {name: value for name, value in description.items() if name != "data_sha256"}
    address = "ftp://user:pw@127.0.0.1:9/x"
    for name, content in (("lost", no_hash), ("moved", description | {"data": "not/here"}),
                          ("stranger", description | {"data": f"{data}:0.5,{address}:0.5"}),
                          ("began", description | {"from": "small", "from_model": description["model"]})):
        shutil.copytree(run, tmp_path / name, symlinks=True)
        (tmp_path / name / "run.json").write_text(json.dumps(content))
        described.append(tmp_path / name)
    lost, moved, stranger, began = described
    for code, words, arguments in [
        (2, ["--out"], [run]),
        (2, ["the output exists already"], [run, "--out", exported]),
        (6, ["cannot write"], [run, "--out", tmp_path / "latin1.md" / "out"]),
        (2, ["not a run"], [run / f"step-{SAVED:08d}", "--out", out]),
        (2, ["an exported folder already"], [exported, "--out", out]),
        (2, ["not the run's data", other], [run, "--out", out, "--data", other]),
        (2, ["the run's data are not here: not/here", "--data"], [moved, "--out", out]),
        (2, [f"the run names data at an address: {address} in {stranger / 'run.json'}; ", "yourself with --data"],
         [stranger, "--out", out]),
        (3, ["nowhere.md"], [run, "--out", out, "--about", tmp_path / "nowhere.md"]),
        (3, ["latin1.md"], [run, "--out", out, "--about", tmp_path / "latin1.md"]),
        (3, ["a NUL byte: this is no text", "nul.md, byte 3"], [run, "--out", out, "--about", tmp_path / "nul.md"]),
        (4, [f"damaged: {lost / 'run.json'}; 'data_sha256' is missing"], [lost, "--out", out]),
        (4, [f"damaged: {began / 'run.json'}; 'from_sha256' is missing"], [began, "--out", out]),
    ]:
        assert_refused(*call("export", *arguments)[::2], code, *words)
    assert not out.parent.exists()


def spoil(path: Path) -> None:
    """Flip the lowest bit of the last byte of a file."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_a_damaged_newest_checkpoint_is_said(run: Path, tmp_path: Path, call: Call) -> None:
    shutil.copytree(run, damaged := tmp_path / "damaged", symlinks=True)
    spoil(damaged / f"step-{SAVED:08d}" / "model.safetensors")
    for arguments in (["generate", damaged, "--max-new-tokens", 2], ["export", damaged, "--out", tmp_path / "out"]):
        code, _, err = call(*arguments)
        (line,) = [line for line in err.splitlines() if line.startswith("warning: ")]
        assert code == 0 and line.startswith("warning: using step 5 of ") and f"(step {SAVED}: " in line
        assert "model.safetensors: it is not the file" in line


def set_width(path: Path, d_model: object = 32) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"d_model": d_model}))


DAMAGE = {
    "a flipped bit": ("model.safetensors", spoil), "a missing file": ("model.safetensors", Path.unlink),
    "another configuration": ("config.json", set_width),
    "another tokenizer": ("tokenizer.json", lambda path: path.write_text("{}")),
    "a damaged manifest": ("MANIFEST.json", lambda path: path.write_text("{}"))}


@pytest.mark.parametrize(("kind", "damage"), [
    *(("exported", damage) for damage in DAMAGE), ("shipped", "a flipped bit"), ("checkpoint", "a flipped bit")])
def test_what_the_manifest_does_not_match_is_refused(kind: str, damage: str, run: Path, exported: Path,
                                                     tmp_path: Path) -> None:
    original = {"exported": exported, "shipped": lineartime.model_folder("small"),
                "checkpoint": run / f"step-{SAVED:08d}"}[kind]
    folder = Path(shutil.copytree(original, tmp_path / original.name))
    file, change = DAMAGE[damage]
    change(folder / file)
    for load in (lineartime.load_model,
                 (AutoTokenizer if damage == "another tokenizer" else AutoModelForCausalLM).from_pretrained):
        with pytest.raises(CheckpointError) as refusal:
            load(folder)
        assert str(refusal.value).startswith("damaged checkpoint: ") and f"/{file}; " in str(refusal.value)


def test_a_card_may_be_edited_a_download_opens_and_transformers_save_over_it(exported: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "copy"))
    (folder / "README.md").write_text("# Mine\n")
    (folder / ".gitattributes").write_text("")
    links = tmp_path / "download"  # is a folder of links
    links.mkdir()
    for path in folder.iterdir():
        (links / path.name).symlink_to(path)
    for each in (folder, links):
        model = AutoModelForCausalLM.from_pretrained(each)
        assert lineartime.load_model(each)[0].config == model.model.config
    with torch.no_grad():
        model.model.head_bias.fill_(2.0)
    model.save_pretrained(folder)
    assert (lineartime.load_model(folder)[0].head_bias == 2).all()
    assert (AutoModelForCausalLM.from_pretrained(folder).model.head_bias == 2).all()


def test_an_export_without_a_manifest_opens_and_its_numbers_are_checked(run: Path, exported: Path,
                                                                        tmp_path: Path) -> None:
    """As earlier versions made it; a checkpoint without one does not open."""
    step = Path(shutil.copytree(run / f"step-{SAVED:08d}", tmp_path / "step"))
    (step / "MANIFEST.json").unlink()
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json is missing"):
        AutoModelForCausalLM.from_pretrained(step)
    folder = Path(shutil.copytree(exported, tmp_path / "copy"))
    (folder / "MANIFEST.json").unlink()
    for load in LOADS:
        load(folder)
    weights = load_file(folder / "model.safetensors")
    for change, words in ((lambda bias: bias.index_fill(0, torch.tensor(3), math.inf), "not finite: .*head_bias"),
                          (lambda bias: torch.zeros(len(bias) + 1), "not this model's: .*head_bias is .*258")):
        save_file(weights | {"head_bias": change(weights["head_bias"])}, folder / "model.safetensors", {"format": "pt"})
        for load in LOADS:
            with pytest.raises(CheckpointError, match=words):
                load(folder)
    set_width(folder / "config.json", "wide")
    for load in (*LOADS, AutoTokenizer.from_pretrained):
        with pytest.raises(UsageError, match=r"d_model = 'wide' in .*/copy/config\.json"):
            load(folder)


def test_weights_of_a_run_that_are_another_runs_or_not_finite_are_refused(run: Path, tmp_path: Path) -> None:
    """A checkpoint whose manifest says that these are the weights."""
    saved = checkpoint.check(run / f"step-{SAVED:08d}")
    tensors = {stem: checkpoint.read_tensors(saved.path, stem) for stem in ("model", "optimizer")}
    files = {path.name: path.read_text() for path in saved.path.glob("*.json") if path.name != checkpoint.MANIFEST}
    checkpoint.save(tmp_path / "other", SAVED, run="0", tensors=tensors, files=files, keep=1)
    shutil.copy(run / "run.json", tmp_path / "other")
    with pytest.raises(CheckpointError, match="a checkpoint of another run"):
        lineartime.load_model(tmp_path / "other")
    tensors["model"]["norm.weight"][1] = math.nan
    step = checkpoint.save(tmp_path, SAVED, run=saved.run, tensors=tensors, files=files, keep=1)
    shutil.copy(run / "run.json", tmp_path)
    for load, folder in ((lineartime.load_model, tmp_path), (lineartime.load_model, step),
                         (AutoModelForCausalLM.from_pretrained, step)):
        with pytest.raises(CheckpointError, match=r"not finite: .*/model.safetensors: (model\.)?norm.weight;"):
            load(folder)


def test_everything_that_is_not_code_is_packaged() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["lineartime"]
    package = ROOT / "lineartime"
    packaged = {path for pattern in patterns for path in package.glob(pattern)}
    others = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others - packaged == set()


SMALL = ROOT / "lineartime" / "models" / "small"
CARD = (SMALL / "README.md").read_text(encoding="utf-8")
SCRIPT = (ROOT / "studies/small.sh").read_text(encoding="utf-8")


def test_its_files_are_those_of_its_manifest() -> None:
    files = {name: hash_of(SMALL / name) for name in (
        "config.json", "modeling_lineartime.py", "tokenizer.json", "tokenizer_config.json", "model.safetensors")}
    assert (SMALL / "MANIFEST.json").read_bytes() == checkpoint.manifest_of({"format": 1, "files": files})
    assert files["model.safetensors"]["bytes"] <= 15_000_000


def test_it_predicts_a_book_that_it_has_not_seen(tmp_path: Path) -> None:
    """xz that has read the rest of the book needs 2.502 bits per byte."""
    model, _, _ = lineartime.load_model(SMALL)
    prepare([], tmp_path / "data", sample=True, tokenizer=SMALL / "tokenizer.json", held_out=0.1, jobs=1)
    score = evaluate(model, open_split(tmp_path / "data", "validation"), context=2048, max_tokens=8192)
    assert 1.0 < score.bits_per_byte < 2.0


def test_its_card_says_how_it_was_made() -> None:
    assert re.search(r"^\| bits per byte \| 1\.\d{3} \| 1\.\d{3} \|$", CARD, re.MULTILINE)
    assert CARD.startswith((ROOT / "studies" / "small.md").read_text(encoding="utf-8"))
    printed = dict(map(parse_setting, re.findall(r"`(\w+=[^`]+)`", CARD[CARD.index("| Settings |"):])))
    where = {"data": "DATA", "out": "RUN"}
    source = replace(run_config(read_toml(ROOT / "studies/small_names.toml") | where).model, context=8192)
    last = SCRIPT[SCRIPT.index("\nlineartime train studies/small.toml"):].replace("--steps ", "--set steps=")
    changed = map(parse_setting, re.findall(r"--set (\w+=\S+)", last))
    recipe = read_toml(ROOT / "studies/small.toml") | dict(changed) | where
    config = run_config({"from": "WEIGHTS"} | where | printed, source)
    assert config == run_config({"from": "WEIGHTS"} | recipe, source)
    assert f"| Steps | {config.train.steps:,} of {config.train.steps:,}, " in CARD and "+changes" not in CARD
