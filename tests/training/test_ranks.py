"""Several processes train one model: they end in one's bits, stop together, and one speaks."""

import json
import signal
import socket
import sys
import time
from contextlib import closing

import pytest
import safetensors.torch
import torch

from lineartime.base.errors import RankError, UsageError
from lineartime.base.ranks import connected
from lineartime.hf import LineartimeForCausalLM
from lineartime.use.export import export
from lineartime.weights import checkpoint
from lineartime.weights.load import load_model
from made_questions import write_questions
from marks import rest
from ranks_here import RanksHere, differences, state_of
from tiny_runs import command, steps_done

SIZES = {"tokens_per_step": 256, "micro_batch_tokens": 32, "steps": 12, "save_every": 5, "eval_every": 4}
"""Eight micro-batches a step."""


@pytest.fixture
def ranks(warm_command, tmp_path):
    with closing(RanksHere(warm_command, tmp_path)) as here:
        yield here


@pytest.fixture
def cold_ranks(tmp_path):
    """Processes of their own, which can be killed."""
    with closing(RanksHere([sys.executable, "-m", "lineartime"], tmp_path)) as here:
        yield here


GLOBAL = {"clip_scope": "global"}
MUON = {"optimizer": "muon"}
SHARDED = GLOBAL | {"shard": True}
DROPS = {"dropout": 0.2, "token_shift": "true"}


@pytest.fixture(scope="module")
def trained(data, warm_command, tmp_path_factory):
    """A run of one process, and one of two that share the model out."""
    folder = tmp_path_factory.mktemp("trained")
    with closing(RanksHere(warm_command, folder)) as here:
        for n_ranks, settings in ((1, {}), (2, SHARDED)):
            codes = here.run(n_ranks, command(data, folder / str(n_ranks), **SIZES, **settings))
            assert codes == [0] * n_ranks, here.printed()
    return folder


@pytest.mark.parametrize(("settings", "numbers", "known"), [({}, [4], "1"), (SHARDED, [1], "2"), *rest(
    ({}, [2, 8], "1"), (SHARDED, [4, 8], "2"), ({"clip": "none", "shard": True}, [1, 2], ""),
    (GLOBAL | {"precision": "bfloat16"}, [1, 2, 4], ""), (MUON | {"precision": "bfloat16"}, [1, 2, 4], ""))], ids=str)
def test_any_number_of_ranks_ends_in_the_same_bits(settings, numbers, known, data, ranks, trained, tmp_path):
    """Those of the first number, or of `trained` on as many as `known` says."""
    expected = known and state_of(trained / known)
    for n_ranks in numbers:
        out = tmp_path / str(n_ranks)
        assert ranks.run(n_ranks, command(data, out, **SIZES, **settings)) == [0] * n_ranks, ranks.printed()
        expected = expected or state_of(out)
        assert not differences(out, expected)


@pytest.mark.rest
def test_a_sharded_run_leaves_no_thread(data, tmp_path):
    """Threads of gloo that go on while Python ends abort the process now and then."""
    script = ("import atexit, os; from lineartime.cli.verbs import main;"
              "atexit.register(lambda: os.write(2, b'threads: %d\\n' % len(os.listdir('/proc/self/task')))); main()")
    with closing(RanksHere([sys.executable, "-c", script], tmp_path)) as ranks:
        codes = ranks.run(2, command(data, tmp_path / "run", **SIZES, **SHARDED))
    assert codes == [0, 0] and ranks.printed().count("threads: 1\n") == 2, ranks.printed()


@pytest.mark.parametrize("seconds", [0.0, float("nan"), float("inf"), 1e20])
def test_a_timeout_that_is_none_is_refused(seconds):
    with pytest.raises(UsageError, match="wrong value: rank_timeout"), connected("cpu", seconds):
        pass


@pytest.mark.parametrize("settings", [{}, MUON | GLOBAL | DROPS, *rest(SHARDED | DROPS)], ids=str)
def test_a_run_goes_on_with_another_number_of_ranks(settings, data, ranks, tmp_path):
    settings = SIZES | settings | {"steps": 40, "eval_every": 20, "save_every": 15}
    assert ranks.run(1, command(data, tmp_path / "whole", **settings)) == [0]
    for n_ranks, until in ((4, 4), (1, 12), (2, None)):
        ranks.start(n_ranks, command(data, tmp_path / "run", **settings))
        if until is not None:
            wait_for_step(ranks, tmp_path / "run", until)
            ranks.processes[-1].send_signal(signal.SIGTERM)  # one rank is asked, all stop
            codes = ranks.end()
            assert codes == [143] * n_ranks, ranks.printed()
            assert len(ranks.errors()) == 1 and "saved at step" in ranks.errors()[0]
        else:
            assert ranks.end() == [0] * n_ranks, ranks.printed()
    assert not differences(tmp_path / "run", state_of(tmp_path / "whole"))


def test_the_weights_of_a_sharded_run_are_exported_as_one_file(trained, tmp_path):
    run = trained / "2"
    assert "load_model; `lineartime export` writes them for transformers)" in (trained / "rank-0.txt").read_text()
    with pytest.raises(UsageError, match="the weights of a sharded run are in parts"):
        LineartimeForCausalLM.from_pretrained(run / "latest")
    export(run, tmp_path / "out", data=None, about="", device=torch.device("cpu"))
    whole = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    model, _, _ = load_model(run)
    assert {name: p.detach().bfloat16().tolist() for name, p in model.named_parameters()} == {
        name: weight.tolist() for name, weight in whole.items()}
    assert LineartimeForCausalLM.from_pretrained(tmp_path / "out").num_parameters() > 0


LOST = ("error: a rank was lost: rank {} of 2 has lost another, MASTER_ADDR = 127.0.0.1, MASTER_PORT = {}; "
        "see torchrun's report; the same command goes on from the last checkpoint")


def wait_for_step(ranks, out, step, timeout=60):
    end = time.monotonic() + timeout
    while steps_done(out) < step:
        assert time.monotonic() < end, ranks.printed()
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, -signal.SIGKILL), (signal.SIGUSR2, None)],
                         ids=["killed", "hangs"])
def test_a_rank_that_is_killed_or_hangs_ends_the_others(number, code, data, ranks, tmp_path):
    """By SIGKILL or SIGSTOP, see `warm_command.SIGNALS`."""
    ranks.start(2, [*command(data, tmp_path / "run", **SIZES | {"steps": 100_000}), "--rank-timeout", 3])
    wait_for_step(ranks, tmp_path / "run", 4)
    began = time.monotonic()
    ranks.processes[1].send_signal(number)
    assert ranks.processes[0].wait(30) == 7, ranks.printed()
    assert (0 if code else 3) <= time.monotonic() - began < 15
    assert code is None or ranks.processes[1].wait(30) == code
    assert ranks.errors() == [LOST.format(0, ranks.port)]


def test_a_store_that_never_answers_is_left_and_said(monkeypatch):
    """PyTorch would wait without end. A group that was never made is not destroyed, an error."""
    monkeypatch.setattr("lineartime.base.ranks.open_store", lambda: time.sleep(10))
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    with pytest.raises(RankError, match="a rank was lost: rank 1 of 2"), connected(timeout_s=0.1):
        raise AssertionError
    assert time.monotonic() - began < 9


@pytest.mark.rest
def test_rank_1_speaks_where_rank_0_and_the_store_are_lost(data, cold_ranks, tmp_path):
    cold_ranks.start(2, command(data, tmp_path / "run", **SIZES | {"steps": 100_000}))
    wait_for_step(cold_ranks, tmp_path / "run", 4)
    cold_ranks.store = None
    cold_ranks.processes[0].kill()
    assert cold_ranks.end(60) == [-signal.SIGKILL, 7], cold_ranks.printed()
    # Nothing else: PyTorch would write the stack of each failed connection.
    assert cold_ranks.printed_by(1).read_text() == LOST.format(1, cold_ranks.port) + "\n"


@pytest.mark.rest
def test_a_port_that_never_answers_is_not_waited_for(data, ranks, tmp_path):
    """Rank 1 alone, with a foreign process in place of rank 0's store."""
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        ranks.port = foreign.getsockname()[1]
        for code, number in ((143, signal.SIGTERM), (130, signal.SIGINT)):
            ranks.start(2, command(data, tmp_path / "run", **SIZES), rank_0=["--help"])
            with foreign.accept()[0]:
                ranks.processes[1].send_signal(number)
                assert ranks.end(60) == [0, code], ranks.printed()
            assert len(ranks.errors()) == 1 and "before the ranks met" in ranks.errors()[0], ranks.printed()


def test_one_error_is_said_once(data, ranks, tmp_path):
    for name, n_ranks, changed, code, expected in (
            ("no data", 2, {"rank_1": command(tmp_path / "nowhere", tmp_path / "run", **SIZES)}, 2, "no such folder"),
            ("other arguments", 2, {"rank_1": command(data, tmp_path / "run", **SIZES, seed=1)}, 2,
             "the ranks were started differently: seed is 0 on rank 0, 1 on rank 1"),
            ("wrong setting", 2, {f"rank_{i}": [*command(data, tmp_path / "run"), "--set", "stepz=1"]
                                  for i in range(2)}, 2, "unknown setting: stepz; did you mean steps?")):
        codes = ranks.run(n_ranks, [*command(data, tmp_path / "run", **SIZES), "--rank-timeout", 3], **changed)
        assert code in codes and 0 not in codes, (name, codes, ranks.printed())
        assert len(ranks.errors()) == 1 and expected in ranks.errors()[0], (name, ranks.printed())
    with checkpoint.lock(tmp_path / "run"):
        codes = ranks.run(2, command(data, tmp_path / "run", **SIZES))
        assert 6 in codes and len(ranks.errors()) == 1 and "the run is in use" in ranks.errors()[0], ranks.printed()
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]
    assert ranks.run(2, ["info", "flash"]) == [2, 2] and len(ranks.errors()) == 1
    assert ranks.run(2, ["--help"]) == [0, 0] and ranks.printed().count("Usage:") == 1


def test_evaluate_divides_the_work(data, ranks, trained):
    printed = []
    for n_ranks in (1, 3):
        arguments = ["evaluate", trained / "1", "--data", data, "--json"]
        assert ranks.run(n_ranks, arguments) == [0] * n_ranks, ranks.printed()
        printed.append(ranks.printed())
    assert printed[0] == printed[1] and json.loads(printed[0])["loss"] > 0


@pytest.mark.parametrize("optimizer", ["adamw", *rest("muon")])
def test_fine_tuning_ends_in_the_same_bits(optimizer, masked_data, ranks, tmp_path):
    assert ranks.run(2, command(masked_data, tmp_path / "pretrained", **SIZES | {"steps": 2}, **SHARDED, causal=False,
                                warmup_steps=1)) == [0, 0], ranks.printed()
    questions = write_questions(tmp_path / "train.json", 0, 12), write_questions(tmp_path / "dev.json", 100, 4)
    for n_ranks in (1, 2):
        options = ("--questions", questions[0], "--validation", questions[1], "--out", tmp_path / str(n_ranks),
                   "--context", 48, "--learning-rates", "1e-2", "--epochs", 1, "--max-answer-tokens", 6,
                   "--set", "chunk_size=4", "--set", "tokens_per_step=192", "--set", "micro_batch_tokens=48",
                   "--set", f"optimizer={optimizer}")
        assert ranks.run(n_ranks, ["finetune", tmp_path / "pretrained", *options]) == [0] * n_ranks, ranks.printed()
    assert not differences(tmp_path / "2" / "lr-1e-02", state_of(tmp_path / "1" / "lr-1e-02"))
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("1", "2")]
    assert results[0] == results[1] and results[0]["best"] == "lr-1e-02"
    assert (tmp_path / "2" / "predictions.json").read_bytes() == (tmp_path / "1" / "predictions.json").read_bytes()


@pytest.mark.rest
def test_a_full_disk_of_one_rank_is_said_by_that_rank(data, cold_ranks, tmp_path, monkeypatch):
    arguments = command(data, tmp_path / "run", **SIZES | {"d_model": 64})
    script = 'if [ "$RANK" = 1 ]; then ulimit -f 8; fi; exec "$@"'  # 8 blocks of 1,024 bytes
    monkeypatch.setattr(cold_ranks, "command", ["bash", "-c", script, "bash", *cold_ranks.command])
    cold_ranks.start(2, arguments)
    assert 6 in cold_ranks.end(60), cold_ranks.printed()
    (line,) = cold_ranks.errors()
    assert "the checkpoint cannot be saved" in line and "free some space" in line and "(rank 1 on " in line
    assert not list((tmp_path / "run").glob("*step-*"))
