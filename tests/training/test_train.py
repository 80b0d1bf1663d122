"""Training: one step by its equations, what changes no result, and faults."""

import errno
import io
import itertools
import json
import math
import os
import shutil
import signal
from collections import defaultdict
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import lineartime
from command_line import assert_refused
from disk import Died
from lineartime.base.errors import CheckpointError, LineartimeError, NumericsError, ResourceError, Stopped
from lineartime.base.files import _hidden
from lineartime.config import PRESETS, ModelConfig, TrainConfig, model_config, stored_config
from lineartime.data.tokens import batch_rows, open_split, read_manifest
from lineartime.folders import read_metrics
from lineartime.model.language_model import LanguageModel
from lineartime.ops.compiled import NO_C
from lineartime.training import objectives
from lineartime.training.gradient import compute_gradient
from lineartime.training.language import new_model, train
from lineartime.training.loop import Callbacks, Setup, fit
from lineartime.training.objectives import NextToken
from lineartime.training.optimizers import Muon, make_optimizer
from lineartime.training.ordered import parameter_parts
from lineartime.training.run import Run
from lineartime.training.run_config import RunConfig, run_config
from lineartime.training.runtime import StopSignal
from lineartime.weights import checkpoint
from tiny_models import CONFIGS, case_of, random_ids, random_model
from tiny_runs import SETTINGS, assert_same, command, prepare_text, steps_done, steps_saved, touched, what_is_left

CPU = torch.device("cpu")
GOLDEN, OLD = Path(__file__).parents[1] / "golden", Path(__file__).parent / "run_of_1ec0ebd4"


def configuration(data, out, model="flash", **changes):
    return run_config({"model": model, "data": str(data), "out": str(out), **SETTINGS, "vocab_size": 257,
                       "end_of_document": 256, **changes})


@pytest.fixture(autouse=True)
def no_warning(caplog):
    """A warning fails a test. One that expects it clears the log."""
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.levelname == "WARNING"] == []


def run_fit(data, out, *, on_step=None, stop=None, **changes):
    """`fit` in this process."""
    out.mkdir(exist_ok=True)
    manifest = read_manifest(data)
    run = Run(out, configuration(data, out, **changes), {"data_sha256": manifest.sha256})
    task = NextToken(run.config, open_split(data, "train"), open_split(data, "validation"))
    setup = Setup(new_model(run.config), task, {"tokenizer.json": "{}"})
    return fit(run, setup, CPU, Callbacks(stop or StopSignal(), on_step))


def train_lines(out):
    return [line for line in read_metrics(out) if "loss" in line]


@pytest.mark.parametrize("preset", PRESETS)
def test_matrices_and_embeddings_decay_and_nothing_else(preset):
    heads = {} if PRESETS[preset].ffn == "gau" else {"n_heads": 2}
    chunks = {"chunk_size": 4} if preset == "flash" else {}
    model = LanguageModel(model_config(preset, n_layers=1, d_model=8, context=16, vocab_size=11, **heads, **chunks))
    names = {id(p): name for name, p in model.named_parameters()}
    groups = make_optimizer(parameter_parts(model), TrainConfig()).param_groups
    decayed, others = ({names[id(p)] for p in group["params"]} for group in groups)
    layers = {"layers.0.in_proj.weight", "layers.0.out_proj.weight"}
    if heads:
        layers |= {name.replace("0", "1") for name in layers}
    if preset == "combiner":
        layers |= {"layers.0.summary_proj.weight", "layers.0.summary_key.weight"}
    table = {"abs_pos.weight"} if preset == "transformer" else set()
    assert decayed == {"embed.weight"} | layers | table
    assert decayed | others == set(names.values()) and not decayed & others


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def orthogonal(x):
    """Newton-Schulz as Muon does it: five steps in bfloat16 on the wide side."""
    x, is_tall = x.bfloat16(), x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        a = x @ x.T
        x = torch.addmm(x, torch.addmm(a, a, a, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return (x.T if is_tall else x).double()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_is_the_equations(optimizer, float64, data, tmp_path):
    """Five steps written out: rows, losses, clipping, learning rate, AdamW and Muon."""
    beta1, beta2, clip, decay, peak = 0.9, 0.99, 1.0, 0.1, 0.01
    trained = run_fit(data, tmp_path / "run", steps=5, warmup_steps=2, eval_every=100, clip=clip, weight_decay=decay,
                      adam_beta1=beta1, adam_beta2=beta2, learning_rate=peak, seed=3, optimizer=optimizer,
                      **({"muon_learning_rate": 2 * peak} if optimizer == "muon" else {}))
    torch.manual_seed(3)
    model = LanguageModel(configuration(data, tmp_path).model)
    first, second = ({name: torch.zeros_like(p) for name, p in model.named_parameters()} for _ in range(2))
    stream, lines, all_norms = open_split(data, "train"), [], []
    for t in range(1, 6):
        rows = torch.from_numpy(batch_rows(stream, seed=3, step=t - 1, context=32, rows_per_step=4))
        total, losses, norms = {name: 0.0 for name in first}, [], []
        for micro in (rows[:2], rows[2:]):
            p = model(micro[:, :-1]).softmax(-1).gather(2, micro[:, 1:, None])
            loss = -p.log().sum() / 64
            gradient = dict(zip(first, torch.autograd.grad(loss, model.parameters()), strict=True))
            norm = math.sqrt(sum((g * g).sum().item() for g in gradient.values()))
            total = {name: total[name] + g * min(1.0, clip / norm) / 2 for name, g in gradient.items()}
            losses.append(loss.item())
            norms.append(norm)
        all_norms += norms
        rate = peak * (t / 2 if t <= 2 else (6 - t) / 3)
        lines.append({"step": t, "loss": sum(losses) / 2, "learning_rate": rate, "grad_norm": sum(norms) / 2,
                      "tokens": 128 * t})
        with torch.no_grad():
            for name, p in model.named_parameters():
                if optimizer == "muon" and name.endswith("_proj.weight"):
                    first[name] = 0.95 * first[name] + 0.05 * total[name]
                    # u, v and z are three matrices of one parameter.
                    e = model.config.d_inner
                    sizes = (e, e, len(p) - 2 * e) if "in_proj" in name else (len(p),)
                    matrices = (0.05 * total[name] + 0.95 * first[name]).split(sizes)
                    update = torch.cat([0.2 * math.sqrt(max(m.shape)) * orthogonal(m) for m in matrices])
                    p -= 2 * rate * (update + decay * p)
                    continue
                first[name] = beta1 * first[name] + (1 - beta1) * total[name]
                second[name] = beta2 * second[name] + (1 - beta2) * total[name] ** 2
                update = first[name] / (1 - beta1**t) / ((second[name] / (1 - beta2**t)).sqrt() + 1e-6)
                is_matrix = name == "embed.weight" or name.endswith("_proj.weight")
                p -= rate * (update + (decay * p if is_matrix else 0))
    assert min(all_norms) < clip < max(all_norms)  # some are clipped, and some are not
    for line, found in zip(lines, read_metrics(tmp_path / "run"), strict=True):
        assert {k: v for k, v in found.items() if k != "clock"} == pytest.approx(line, rel=1e-9)
    for (name, p), found in zip(model.named_parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(found, p, rtol=1e-8, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


def test_muon_keeps_no_gradient_through_the_next_step():
    model = random_model(CONFIGS["flash"])
    muon = Muon(model, parameter_parts(model, muon=True), TrainConfig(), defaultdict(dict))
    for parameter in muon.matrices:
        parameter.grad = torch.ones_like(parameter)
    muon.update()
    assert all(matrix.grad is None for matrices in muon.matrices.values() for matrix in matrices)


@pytest.mark.parametrize("name", [*map(case_of, CONFIGS)])
def test_recomputed_activations_give_the_same_gradient(name):
    model, rows = random_model(CONFIGS[name]).train(), random_ids(8, 25)
    config = TrainConfig(tokens_per_step=8 * 24, micro_batch_tokens=8 * 24)
    calls, gradients = [], []
    for layer in model.layers:
        layer.in_proj.register_forward_pre_hook(lambda *_: calls.append(1))
    for model.activation_checkpointing in (False, True):
        compute_gradient(model, NextToken(None, None, None), [rows], 8, config)
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *gradients)) and len(calls) == 3 * len(model.layers)


def test_bfloat16_trains_float32_weights(data, tmp_path):
    trained = run_fit(data, tmp_path / "bfloat16", precision="bfloat16", activation_checkpointing=True)
    assert trained.activation_checkpointing
    run_fit(data, tmp_path / "float32")
    assert {p.dtype for p in trained.parameters()} == {torch.float32}
    low, full = ([line["loss"] for line in train_lines(tmp_path / name)] for name in ("bfloat16", "float32"))
    assert low != full and low == pytest.approx(full, rel=0.02)
    assert low[-1] < 0.8 * low[0]


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch hides it where it is shown, not raised
def test_compiled_losses_are_the_losses(data, tmp_path):
    """About a minute of processor time, nearly all of it the compiler's."""
    for compiled in (False, True):
        run_fit(data, tmp_path / str(compiled), compile=compiled, steps=6, eval_every=100)
    plain, found = (train_lines(tmp_path / name) for name in ("False", "True"))
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in plain], rel=1e-4)
    assert [line["grad_norm"] for line in found] == pytest.approx([line["grad_norm"] for line in plain], rel=1e-3)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """What a run of eight steps leaves."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run_fit(data, out, steps=8)
    return what_is_left(out)


@pytest.mark.parametrize(("how", "stops", "changes"), [
    ("asked", [1, 2, 3, 4, 5, 6, 7, 8], {}), ("dies", [3, 4, 6], {}),
    ("dies", [4], {"optimizer": "muon", "dropout": 0.2})])
def test_resumed_at_any_step_it_is_the_uninterrupted_run(how, stops, changes, data, tmp_path, whole, caplog):
    out = tmp_path / "run"
    if changes:
        run_fit(data, tmp_path / "whole", steps=8, **changes)
        whole = what_is_left(tmp_path / "whole")
    for k in stops:
        stop = StopSignal()

        def on_step(record, k=k, stop=stop):
            if record["step"] == k and how == "dies" and (k < 6 or "held_out" in record):
                raise Died
            if record["step"] == k and how == "asked":
                stop.number = signal.SIGTERM

        with pytest.raises(Died if how == "dies" else Stopped) as stopped:
            run_fit(data, out, steps=8, on_step=on_step, stop=stop, **changes)
        if how == "dies":  # while it wrote a line, and a file
            with open(out / "metrics.jsonl", "a") as file:
                file.write('{"step": 6, "loss": 3.1')
            _hidden(out / "metrics.jsonl", "tmp").write_text('{"step"')
        else:
            assert stopped.value.exit_code == 143 and f"saved at step {k} of 8" in str(stopped.value)
            assert steps_saved(out) == steps_done(out) == k
    run_fit(data, out, steps=8, **changes)
    assert_same(out, whole)
    if how == "dies":
        caplog.clear()


def test_a_stop_does_not_wait_for_the_end_of_a_batch(data, tmp_path, monkeypatch, whole):
    """Asked in the first of the two micro-batches of step 4, it saves step 3 and ends."""
    out, stop, true_losses, calls = tmp_path / "run", StopSignal(), NextToken.losses, itertools.count(1)

    def losses(self, model, *batch, ranks):
        assert model.training  # behind scores too
        if next(calls) == 7:
            stop.number = signal.SIGTERM
        return true_losses(self, model, *batch, ranks=ranks)

    monkeypatch.setattr(NextToken, "losses", losses)
    with pytest.raises(Stopped, match="saved at step 3 of 8"):
        run_fit(data, out, steps=8, stop=stop)
    assert next(calls) == 8 and steps_saved(out) == steps_done(out) == 3
    run_fit(data, out, steps=8)
    assert_same(out, whole)


def without_a_field(result):
    """The texts of a result file that has lost a field, or one of its scores."""
    for where in (result, result["held_out"]):
        for name in {*where} - {"sha256"}:
            value = where.pop(name)
            yield json.dumps(result)
            where[name] = value


def test_a_finished_run_says_so_and_is_left_alone(data, tmp_path, call):
    out = tmp_path / "run"
    lineartime.train(configuration(data, out, steps=4, warmup_steps=1), device=CPU)
    again = command(data, out, steps=4, warmup_steps=1)

    def is_complete():
        code, printed, _ = call(*again)
        return code == 0 and printed.startswith(f"complete: {out} was trained to step 4")

    before = touched(out)
    assert is_complete() and touched(out) == before
    result = json.loads((out / "result.json").read_text())
    (out / "metrics.jsonl").unlink()
    for step in (2, 4):
        shutil.rmtree(out / f"step-0000000{step}")
    assert is_complete()
    for text in ("", "[]", json.dumps(result | {"run": "0123456789abcdef"}), json.dumps(result | {"steps": 3}),
                 json.dumps(result | {"held_out": {"loss": math.nan}}), *without_a_field(result)):
        (out / "result.json").write_text(text)
        before = touched(out)
        assert_refused(*call(*again)[::2], 4, f"error: damaged: {out / 'result.json'}; ")
        assert touched(out) == before
    described = json.loads((out / "run.json").read_text())
    for wrong in ({"preset": None}, {"train": {"warmup_steps": "x"}}, {"from": "x"}):
        (out / "run.json").write_text(json.dumps(described | wrong))
        assert_refused(*call(*again)[::2], 4, f"error: damaged: {out / 'run.json'}; ")


def test_latest_is_the_newest_checkpoint_at_the_end(data, tmp_path, call, monkeypatch):
    """Also if the disk was full when the last checkpoint should have been linked. Metrics reach the
    disk before the checkpoint of their step."""
    symlink, failed, flush, flushed = os.symlink, [], os.fsync, []

    def once_full(target, link):
        if str(target) == "step-00000004" and not failed:
            failed.append(target)
            raise OSError(errno.ENOSPC, "No space left on device")
        symlink(target, link)

    monkeypatch.setattr(os, "symlink", once_full)
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(Path(f"/dev/fd/{file}").resolve().name) or flush(file))
    assert call(*command(data, tmp_path / "run", steps=4, warmup_steps=1))[0] == 0
    assert failed and os.readlink(tmp_path / "run/latest") == "step-00000004"
    assert flushed.index("metrics.jsonl") < flushed.index("model.safetensors")


@pytest.fixture(scope="module")
def unfinished(data, tmp_path_factory):
    """The command line's run, stopped at step 4 of 8."""
    out, stop = tmp_path_factory.mktemp("unfinished") / "run", StopSignal()

    def on_step(record):
        stop.number = signal.SIGTERM if record["step"] == 4 else None

    with pytest.raises(Stopped):
        train({"model": "flash", "data": str(data), "out": str(out), **SETTINGS, "steps": 8}, stop=stop,
              on_step=on_step)
    return out


def test_another_run_is_refused_with_the_difference(data, unfinished, tmp_path, call):
    other = prepare_text(tmp_path, first=20_001)
    before = touched(unfinished)
    for words, where, model, changes in (
            ("learning_rate: 0.01 -> 0.02", data, "flash", {"learning_rate": 0.02}),
            ("d_model: 16 -> 32", data, "flash", {"d_model": 32}), ("steps: 8 -> 9", data, "flash", {"steps": 9}),
            ("clip: 0.1 -> None", data, "flash", {"clip": "none"}), ("data_sha256: ", other, "flash", {}),
            ("preset: flash -> flash-quad", data, "flash-quad", {"chunk_size": "none"})):
        again = command(where, unfinished, model, **{"steps": 8, **changes})
        assert_refused(*call(*again)[::2], 2, "error: another run is here: ", words)
        assert touched(unfinished) == before


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_without_a_checkpoint_gives_way_to_another(steps, data, tmp_path, whole):
    stop = StopSignal()
    stop.number = None if steps else signal.SIGINT
    with pytest.raises(Died if steps else Stopped, match=None if steps else "before step 1"):
        run_fit(data, tmp_path / "run", stop=stop, on_step=Mock(side_effect=Died))
    run_fit(data, tmp_path / "run", steps=8)
    assert_same(tmp_path / "run", whole)


@pytest.mark.parametrize("left", ["metrics.jsonl", "result.json", "step-00000002"])
def test_what_a_run_left_without_its_description_is_not_taken_over(left, data, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / left).mkdir() if left.startswith("step") else (out / left).write_text("{}")
    with pytest.raises(CheckpointError, match=r"run\.json is missing"):
        run_fit(data, out)
    assert [path.name for path in out.iterdir()] == [left]


@pytest.mark.parametrize("name", ["run.json", "sample.txt", "loss.png", "manifest.json"])
def test_a_file_of_somebody_else_is_not_overwritten(name, data, tmp_path):
    (tmp_path / name).write_text('{"my": "own"}')
    with pytest.raises(LineartimeError, match=name):
        run_fit(data, tmp_path)
    assert (tmp_path / name).read_text() == '{"my": "own"}'


@pytest.mark.parametrize(("value", "place", "micro_batch", "clipping"), [
    (math.nan, "loss", 0, {}), (math.inf, "gradient norm", 1, {"clip_scope": "global"}),
    (math.nan, "gradient norm", 1, {"clip": None})])
def test_what_is_not_finite_ends_the_run_and_is_not_saved(value, place, micro_batch, clipping, data, tmp_path,
                                                          monkeypatch):
    """The value is in the loss, or in one entry of a gradient, in the third step."""
    out, true_losses, calls = tmp_path / "run", objectives.token_losses, itertools.count()

    def losses(model, rows, ranks):
        bad = next(calls) == 2 * 2 + micro_batch
        if bad and place != "loss":
            model.layers[0].out_proj.bias.register_hook(lambda g: g.index_fill(0, torch.tensor([0]), value))
        return true_losses(model, rows) + (value if bad and place == "loss" else 0)

    monkeypatch.setattr(objectives, "token_losses", losses)
    with pytest.raises(NumericsError) as error:
        run_fit(data, out, steps=4, eval_every=100, save_every=1, **clipping)
    assert error.value.exit_code == 5
    assert str(error.value) == (f"the {place} is not finite: step 3; the checkpoint of step 2 is good; "
                                "try a lower learning_rate (now 0.01)")
    for stem in ("model", "optimizer"):
        checkpoint.read_tensors(out / "step-00000002", stem)  # it raises where a number is not finite
    assert steps_saved(out) == read_metrics(out)[-1]["step"] == 2


def test_weights_that_the_optimizer_spoils_are_not_saved(data, tmp_path, call):
    out = tmp_path / "run"
    code, _, err = call(*command(data, out, steps=1, save_every=1, learning_rate=1e39, warmup_steps=0))
    assert code == 5 and "error: the weights are not finite: step 1; there is no checkpoint yet; try a l" in err
    assert not list(out.glob("step-*")) and not (out / "result.json").exists()


class CompilerError(RuntimeError):
    __module__ = "torch._inductor.exc"


@pytest.mark.parametrize(("error", "kind", "words"), [
    (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to"), ResourceError, "out of memory: micro_batch"),
    (torch.OutOfMemoryError("CUDA out of memory."), ResourceError, "batch_tokens = 64, context = 32; lower micro"),
    (RuntimeError("Triton Error [CUDA]: out of memory"), ResourceError, "out of memory: micro_batch_tokens = 64"),
    (CompilerError("no C compiler\n\nSet TORCHDYNAMO_VERBOSE=1"), ResourceError,
     "^torch.compile failed: no C compiler; set compile = false$"),
    (RuntimeError("shapes cannot be multiplied"), RuntimeError, "^shapes")])
def test_without_memory_or_compiler_the_settings_that_ask_for_it_are_named(error, kind, words, data, tmp_path,
                                                                          monkeypatch):
    monkeypatch.setattr(LanguageModel, "compile_layers", lambda self: None)
    monkeypatch.setattr(objectives, "token_losses", Mock(side_effect=error))
    with pytest.raises(kind, match=words):
        run_fit(data, tmp_path / "run", steps=3, compile=True)


def test_with_little_memory_it_ends_in_one_line(data, processes, tmp_path):
    # The projection of 131,072 tokens, what attention keeps and gradients are more.
    arguments = command(data, tmp_path / "run", context=256, tokens_per_step=512 * 256, steps=2, warmup_steps=1,
                        micro_batch_tokens=512 * 256)
    printed = tmp_path / "printed"
    assert processes.run(arguments, printed, memory=100 << 20) == 6
    assert "error: out of memory: micro_batch_tokens = 131072, context = 256; lower" in printed.read_text()


def test_a_full_disk_ends_the_run_and_half_a_line_is_taken_back(data, tmp_path, monkeypatch, whole, caplog):
    class Filling(io.TextIOWrapper):
        def write(self, text):
            if text.startswith('{"step": 5'):
                super().write(text[:17])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(text)

    with monkeypatch.context() as patch:
        patch.setattr("lineartime.training.run.open", lambda path, mode: Filling(open(path, "ab")), raising=False)
        with pytest.raises(ResourceError, match=r"the metrics cannot be written: .*metrics\.jsonl: No space left"):
            run_fit(data, tmp_path / "run", steps=8)
    assert steps_saved(tmp_path / "run") == 4
    run_fit(data, tmp_path / "run", steps=8)
    assert_same(tmp_path / "run", whole)
    caplog.clear()


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_newest_checkpoint_costs_a_warning_and_damage_of_all_ends_the_run(data, unfinished, tmp_path,
                                                                                   call, caplog):
    """Both of a run that finds the same data in another folder."""
    moved = shutil.copytree(data, tmp_path / "moved")
    for name in ("one", "all"):
        shutil.copytree(unfinished, tmp_path / name, symlinks=True)
        damage(tmp_path / name / "step-00000004" / "optimizer.safetensors")
    code, _, err = call(*command(moved, tmp_path / "one", steps=8))
    warning = next(line for line in err.splitlines() if line.startswith("warning"))
    assert code == 0 and warning.startswith("warning: going back to step 2, newer checkpoints are damaged (step 4: ")
    call(*command(data, tmp_path / "whole", steps=8))
    assert_same(tmp_path / "one", what_is_left(tmp_path / "whole"))
    damage(tmp_path / "all" / "step-00000002" / "model.safetensors")
    before = touched(tmp_path / "all")
    code, _, err = call(*command(moved, tmp_path / "all", steps=8))
    assert_refused(code, err, 4, "no checkpoint can be used: ", "step-00000002", "step-00000004")
    assert touched(tmp_path / "all") == before
    shutil.copytree(tmp_path / "whole" / "step-00000008", tmp_path / "all" / "step-00000008")
    assert_refused(*call(*command(moved, tmp_path / "all", steps=8))[::2], 4, "a checkpoint of another run: ")
    caplog.clear()


GOLDEN_MODELS = {"flash": {}, "flash-quad": {"chunk_size": None},
                 "transformer++": {"chunk_size": None, "n_heads": 2, "query_key_dim": 128}}


@pytest.mark.parametrize(("model", "record"), [*zip(GOLDEN_MODELS, GOLDEN_MODELS, strict=True),
                                               ("flash", "flash-in-c")])
def test_ten_losses_are_those_on_record(model, record, data, tmp_path, monkeypatch):
    """Tokenizer, rows, initial weights, model, gradient, optimizer: a change in any shows."""
    monkeypatch.setenv(NO_C, "0" if record == "flash-in-c" else "1")
    recorded = [float(line) for line in (GOLDEN / f"{record}.txt").read_text().splitlines() if line[0] != "#"]
    run_fit(data, tmp_path / "run", model=model, steps=10, eval_every=100, n_layers=2, **GOLDEN_MODELS[model])
    assert [line["loss"] for line in train_lines(tmp_path / "run")] == pytest.approx(recorded, rel=1e-5)


@pytest.mark.parametrize("name", ["flash+", "flash-quad"])  # with muon and scale_norm
def test_a_run_of_1ec0ebd4_goes_on_to_the_losses_that_it_had_there(name, tmp_path, monkeypatch):
    """That commit made the folders, stopped at step 4 of 8, and went on, float32 on one thread."""
    monkeypatch.chdir(tmp_path)
    prepare_text(tmp_path)
    shutil.copytree(OLD / name, tmp_path / name)
    expected = json.loads((tmp_path / name / "expected.json").read_text())
    stored = json.loads((tmp_path / name / "run.json").read_text())
    model, trained = stored_config(ModelConfig(), stored["model"]), stored_config(TrainConfig(), stored["train"])
    config = RunConfig(model, trained, stored["preset"], stored["task"], stored["data"], name)
    lineartime.train(config, device="cpu")
    assert json.loads((tmp_path / name / "run.json").read_text()) == stored
    found = [{name: value for name, value in line.items() if name != "clock"} for line in read_metrics(Path(name))]
    for line, old in zip(found, expected["metrics"], strict=True):  # sums have another order, here and elsewhere
        assert line.pop("held_out", {}) == pytest.approx(old.pop("held_out", {}), rel=1e-5)
        assert line == pytest.approx(old, rel=1e-5)
