"""Checkpoints survive what happens to processes and disks, and nothing damaged is ever loaded."""

import errno
import itertools
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lineartime
from disk import Died, Faults, PowerLoss
from lineartime.base.errors import CheckpointError, ResourceError
from lineartime.weights import checkpoint
from lineartime.weights.checkpoint import MANIFEST, check, check_tensors, lock, newest, read_parts, read_tensors
from marks import rest
from text_files import contents

LEFTOVERS = (".tmp-", ".trash-")
RUN = "run-of-the-tests"


def state(step):
    """What the tests save at a step: tensors and files."""
    generator = torch.Generator().manual_seed(step)
    weights = {"w": torch.randn(16, 8, generator=generator), "b": torch.randn(7, generator=generator).bfloat16()}
    moments = {"m.w": torch.randn(16, 8, generator=generator), "step": torch.tensor(step)}
    files = {"config.json": '{"d_model": 8}', "state.json": json.dumps({"step": step, "note": "schöne Zahl"})}
    return {"tensors": {"model": weights, "optimizer": moments}, "files": files}


def save(run_dir, step, keep=2):
    return checkpoint.save(Path(run_dir), step, run=RUN, keep=keep, **state(step))


def bits(named):
    """Tensors by name, to compare them bit for bit."""
    flat = {name: torch.empty(x.numel(), dtype=x.dtype).copy_(x.detach().reshape(-1)) for name, x in named.items()}
    return {name: (x.dtype, x.shape, flat[name].view(torch.uint8).tolist()) for name, x in named.items()}


def holds(found, step):
    """Whether a valid checkpoint is the whole of what the tests save at `step`; read by the
    library, not by us."""
    saved = state(step)
    return (found.step == step and found.run == RUN
            and all((found.path / name).read_text() == text for name, text in saved["files"].items())
            and all(bits(load_file(found.path / f"{stem}.safetensors")) == bits(named)
                    for stem, named in saved["tensors"].items()))


@pytest.fixture
def never_flush(monkeypatch):
    """Flushing takes most of a small save's time, and only a power loss could tell."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def step_names(run_dir):
    return sorted(path.name for path in run_dir.iterdir() if path.name.startswith("step-"))


def leftovers(run_dir):
    return [name for name in os.listdir(run_dir) if name.startswith(LEFTOVERS)]


def refused(function, *arguments):
    """The one line with which a checkpoint is refused. All else fails the test."""
    with pytest.raises(CheckpointError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_saved_is_there_bit_for_bit_and_saved_again_as_the_same_bytes(tmp_path):
    values = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-45])
    odd = {"nan": (torch.arange(2**16).to(torch.int32) << 16).view(torch.float32), "values": values,
           "half": torch.arange(-2**15, 2**15).to(torch.int16).view(torch.bfloat16), "scalar": torch.tensor(3.5),
           "empty": torch.zeros(0, 3), "none": torch.zeros(2, 0, dtype=torch.int64), "sliced": torch.arange(10)[::3],
           "one sliced": torch.arange(10)[::3][1:2], "later": torch.arange(10).bfloat16()[3:],
           "parameter": torch.nn.Parameter(torch.ones(2)), "expanded": torch.ones(1, 3).expand(4, 3),
           **{f"schöne Zahl/{dtype}": torch.arange(6).view(2, 3).to(dtype).T for dtype in checkpoint.DTYPES}}
    saved = {"run": "r", "files": {"state.json": "ä\n"}, "keep": 1}
    first = checkpoint.save(tmp_path / "a", 10**12, tensors={"model": odd, "random": {}}, **saved)
    assert newest(tmp_path / "a") == check(first) == (first, 10**12, "r", {})
    loaded = {stem: load_file(first / f"{stem}.safetensors") for stem in ("model", "random")}
    assert bits(loaded["model"]) == bits(odd) and loaded["random"] == {}
    assert contents(first) == contents(checkpoint.save(tmp_path / "b", 10**12, tensors=loaded, **saved))
    with pytest.raises(ValueError, match="cannot be stored"):
        checkpoint.save(tmp_path / "run", 1, tensors={"x": {"y": torch.ones(1).cfloat()}}, **saved)
    assert not any((tmp_path / "run").iterdir())


def test_tensors_are_read_whole_and_in_parts(tmp_path):
    model = {"w": torch.randn(4, 3), "b": torch.tensor(2.0), "none": torch.zeros(0, 3)}
    path = checkpoint.save(tmp_path, 1, run="r", tensors={"model": model}, files={}, keep=1)
    assert bits(read_tensors(path, "model")) == bits(model)
    found = read_parts(path, "model", {"w": ((4, 3), 2, 8), "b": ((), 0, 1), "none": ((0, 3), 0, 0)})
    assert bits(found) == bits({"w": model["w"].flatten()[2:8], "b": torch.tensor([2.0]), "none": torch.zeros(0)})
    for name, shape in (("x", (2,)), ("w", (3, 4))):
        assert f"not this model's: {path}: {name}" in refused(read_parts, path, "model", {name: (shape, 0, 2)})
    for parts in (7, [["model.safetensors", 0]], [["model.safetensors", 3, 12]], [["none.safetensors", 0, 12]]):
        (path / "model.json").write_text(json.dumps({"w": {"shape": [4, 3], "parts": parts}}))
        assert str(path) in refused(read_tensors, path, "model")
    (path / "model.json").unlink()
    (path / "model.safetensors").write_bytes(b"[]" * 99)
    assert "the tensors cannot be read" in refused(read_tensors, path, "model")


def test_tensors_must_match_exactly(tmp_path):
    model = state(1)["tensors"]["model"]
    check_tensors(model, {name: tensor.to("meta") for name, tensor in model.items()}, tmp_path)
    for other, expected in (({"w": model["w"]}, "b is missing"), ({**model, "x": model["w"]}, "x is float32[16, 8], e"),
                            ({**model, "b": model["b"].float()}, "b is float32[7], expected bfloat16[7]"),
                            ({**model, "w": model["w"].T}, "w is float32[8, 16], expected float32[16, 8]")):
        assert expected in refused(check_tensors, other, model, tmp_path)
    many = refused(check_tensors, {}, {f"n{i}": model["w"] for i in range(9)}, tmp_path)
    assert many.count("is missing") == 5 and "n4" in many and "n5" not in many and "4 more" in many
    for value in (float("nan"), float("-inf")):
        model["w"][3, 2] = value
        found = refused(check_tensors, model, model, tmp_path)
        assert found.startswith(f"weights that are not finite: {tmp_path}: w;")


def test_the_newest_valid_ones_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=3)
    assert step_names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]
    (tmp_path / "step-00000003" / "config.json").write_text("{}")
    save(tmp_path, 5, keep=3)  # 3 is damaged: 2 still counts
    assert step_names(tmp_path) == [f"step-0000000{step}" for step in (2, 3, 4, 5)]
    save(tmp_path, 6, keep=1)
    assert step_names(tmp_path) == ["step-00000006"]
    assert os.readlink(tmp_path / "latest") == "step-00000006"
    save(tmp_path, 4, keep=1)  # an earlier step than the newest removes nothing that is newer, and not itself
    assert step_names(tmp_path) == ["step-00000004", "step-00000006"]


def test_stray_names_and_leftovers_are_never_counted_and_leftovers_are_cleaned(tmp_path):
    save(tmp_path, 1)
    for name in (".tmp-step-00000010-0123456789abcdef", ".trash-step-00000011-0123456789abcdef", "step-10.bak",
                 "step-12", "step-000000013", "step-00000014x"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
        refused(check, tmp_path / name)
    (tmp_path / ".tmp-step-link-0123456789abcdef").symlink_to("step-10.bak")
    (tmp_path / ".tmp-notes").write_text("the user's")
    assert newest(tmp_path) == (tmp_path / "step-00000001", 1, RUN, {})
    before = {name for name in os.listdir(tmp_path) if not name.startswith(checkpoint.LEFTOVERS)}
    save(tmp_path, 2)
    assert set(os.listdir(tmp_path)) == before | {"step-00000002"} >= {".tmp-notes", "step-10.bak"}


def test_a_valid_checkpoint_that_is_there_already_is_trusted_and_another_runs_never_replaced(tmp_path, monkeypatch):
    save(tmp_path, 1)
    before = contents(save(tmp_path, 2))
    monkeypatch.setattr(checkpoint, "hashed_stream", None)
    save(tmp_path, 2, keep=1)
    assert contents(tmp_path / "step-00000002") == before and step_names(tmp_path) == ["step-00000002"]
    with pytest.raises(CheckpointError, match=f"run '{RUN}', this run is 'other'"):
        checkpoint.save(tmp_path, 2, run="other", keep=1, **state(2))
    assert contents(tmp_path / "step-00000002") == before


def two(run_dir):
    save(run_dir, 1)
    save(run_dir, 2)


def damaged_target(run_dir):
    two(run_dir)
    os.truncate(run_dir / "step-00000002" / "model.safetensors", 50)


SAVES = {"later": (lambda run_dir: save(run_dir, 1), 2, 2), "retention": (two, 3, 1),
         "overwrite": (damaged_target, 2, 1), "again": (two, 2, 1)}
BY_DEFAULT = [("later", "nothing"), ("retention", "all"), ("overwrite", "names")]


@pytest.mark.parametrize(("case", "loss"), [*BY_DEFAULT, *rest(*(
    pair for pair in itertools.product(SAVES, ("all", "names", "nothing")) if pair not in BY_DEFAULT))])
def test_a_save_that_dies_leaves_the_old_or_the_new_checkpoint(tmp_path, never_flush, case, loss):
    """The process dies before each operation of a save; `loss` is what a power loss leaves."""
    prepare, step, keep = SAVES[case]
    prepare(tmp_path / "before")
    old = newest(tmp_path / "before").step
    outcomes, died, last = [], True, 0
    while died:
        last += 1
        run_dir = tmp_path / str(last) / "run"
        shutil.copytree(tmp_path / "before", run_dir, symlinks=True)
        disk, died = PowerLoss(run_dir, last, loss), False
        try:
            with disk:
                save(run_dir, step, keep)
            disk.lose()
        except Died:
            died = True
        found = newest(run_dir)
        outcomes.append(found.step)
        assert found.step in (old, step) and holds(found, found.step)
        assert not found.damaged or case == "overwrite"
        save(run_dir, step + 1, keep=1)  # the next save works and cleans up
        assert newest(run_dir) == (run_dir / f"step-{step + 1:08d}", step + 1, RUN, {})
        assert not leftovers(run_dir) and set(step_names(run_dir)) == {f"step-{step + 1:08d}"}
        shutil.rmtree(tmp_path / str(last))
    assert outcomes[-1] == step  # a save that returned is never lost
    assert last > (4 if case == "again" else 10)
    new = outcomes.index(step)
    assert outcomes == [old] * new + [step] * (last - new)


def test_any_damage_is_refused_and_the_checkpoint_before_it_counts(tmp_path):
    other = contents(save(tmp_path, 1))
    path = save(tmp_path, 2)
    good = contents(path)
    for name, data in good.items():
        place = len(data) // 3
        for changed in (
                data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], data[:-1], b"", data + b"\n", other[name],
                None, 100 << 30):
            if changed == data:  # the other one has the same text
                continue
            if changed is None:
                (path / name).unlink()
            elif isinstance(changed, int):  # so many bytes, which nobody waits for to be hashed
                os.truncate(path / name, changed)
            else:
                (path / name).write_bytes(changed)
            assert refused(check, path).startswith("damaged checkpoint: ")
            found = newest(tmp_path)
            assert found.step == 1 and list(found.damaged) == [2] and str(path) in found.damaged[2]
            (path / name).write_bytes(data)
    assert holds(check(path), 2)  # it was the damage that was refused
    # So is one under another's name, or a run would go on from a wrong step.
    for step, target in ((1, 3), (2, 1), (3, 2)):
        os.rename(tmp_path / f"step-0000000{step}", tmp_path / f"step-0000000{target}")
    assert "expected step 2 of a run, found step 1" in refused(newest, tmp_path)


def test_a_manifest_that_is_none_or_of_a_newer_version_is_refused(tmp_path):
    path = save(tmp_path, 1)
    good = (path / MANIFEST).read_bytes()
    for raw in (b"", b"null", b"[" * 10**5, b"\xff\xfe", b'{"sha256": NaN}', good + b"\n",
                json.dumps(json.loads(good)).encode()):
        (path / MANIFEST).write_bytes(raw)
        assert MANIFEST in refused(check, path) and MANIFEST in refused(newest, tmp_path)
    (path / MANIFEST).write_bytes(checkpoint.manifest_of({"format": 7, "anything": [1, 2]}))
    assert "newer" in refused(check, path) and "format 7" in refused(newest, tmp_path)
    whole = {name: value for name, value in json.loads(good).items() if name != "sha256"}
    for forged in ([{name: whole[name] for name in whole if name != lost} for lost in whole]
                   + [whole | {name: value} for name in whole for value in (None, [], "x", {"model.json": 7})]):
        if forged != whole | {"run": "x"}:
            (path / MANIFEST).write_bytes(checkpoint.manifest_of(forged))
            assert MANIFEST in refused(check, path) or "model.json" in refused(check, path), forged


@pytest.mark.parametrize(("number", "lasting"), [(errno.ENOSPC, True), *rest((errno.EIO, False))])
def test_a_disk_that_fails_while_saving_costs_no_earlier_checkpoint(tmp_path, never_flush, number, lasting):
    """Each operation of a save fails, once or from then on; removals work on a full disk."""
    two(tmp_path / "before")
    for at in itertools.count(1):
        run_dir = tmp_path / str(at)
        shutil.copytree(tmp_path / "before", run_dir, symlinks=True)
        disk = Faults(run_dir, at, error=number, stays=lasting)
        with disk:
            try:
                save(run_dir, 3, keep=1)
            except ResourceError as error:
                message = str(error)
                assert error.exit_code == 6 and "\n" not in message
                assert str(run_dir / "step-00000003") in message and os.strerror(number) in message
        found = newest(run_dir)
        assert found.step in (2, 3) and holds(found, found.step) and not found.damaged
        assert found.step == 3 or lasting or not [name for name in leftovers(run_dir) if name.startswith(".tmp-step")]
        save(run_dir, 3, keep=1)
        assert newest(run_dir).step == 3 and not leftovers(run_dir) and step_names(run_dir) == ["step-00000003"]
        shutil.rmtree(run_dir)
        if disk.count < at:
            break
    assert at > 25


def test_an_interrupted_save_leaves_nothing_behind(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    for function in (lambda path: save(path, 1), lambda path: lock(path).__enter__()):
        with pytest.raises(ResourceError, match="file/run"):
            function(tmp_path / "file" / "run")


def test_a_second_holder_is_told_who_holds_the_run(tmp_path):
    with lock(tmp_path / "a" / "run"):
        for _ in range(2):
            with pytest.raises(ResourceError, match=rf"in use by pid {os.getpid()} on host \S+ since 2") as caught, \
                    lock(tmp_path / "a" / "run"):
                pass
            assert caught.value.exit_code == 6 and "\n" not in str(caught.value)
    with lock(tmp_path / "a" / "run"):
        pass


def test_no_pickle_is_reachable():
    """Nothing in the package reads or writes a file that can carry code, or sends it."""
    banned = re.compile(r"^\s*(import|from) (pickle|marshal|shelve|dill|cloudpickle|joblib)\b"
                        r"|(?<![\w.])((torch|np|numpy)\.load|torch\.save|eval|exec|__import__)\(", re.M)
    package = Path(lineartime.__file__).parent
    assert not [path for path in package.rglob("*.py") if banned.search(path.read_text())]
