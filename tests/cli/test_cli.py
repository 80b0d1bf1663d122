"""The command line as a person meets it: verbs, refusals in one line, nothing heavy imported."""

import errno
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import lineartime
from command_line import Call, assert_refused
from lineartime.base.errors import UsageError
from lineartime.base.ranks import launched
from lineartime.cli.terminal import Screen, exit_code
from lineartime.cli.use import before_stop
from lineartime.weights.generation import generate
from tiny_runs import SETTINGS

TEXT = "The quick brown fox jumps over the lazy dog. " * 60


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "run"
    return lineartime.train({"model": "flash", "data": data, "out": out, **SETTINGS, "steps": 6}).out


@pytest.mark.parametrize(("code", "heavy"), [
    ("import lineartime.cli.verbs, lineartime.config",
     {"matplotlib", "numpy", "pyarrow", "tokenizers", "torch", "transformers"}),
    ("import lineartime as l; model, tokenizer, _ = l.load_model('small'); "
     "l.generate(model, ['It was'], tokenizer=tokenizer, max_new_tokens=1)", {"torch._dynamo"})],
    ids=["the command", "generation"])
def test_nothing_heavy_is_imported(code: str, heavy: set[str]) -> None:
    code += f"; import sys; print({heavy} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_arguments_are_checked_before_torch_is_imported(tmp_path: Path) -> None:
    lines = ["--help", "train --help", "", "no-such-verb", "train", "train flash", "train flush --data x --out y",
             "train flash --data nowhere --out y", "train flash --data x --out y --set n_layer=2", "train missing.toml",
             "train flash --data x --out y --set chunk_size=0", "train flash --data x --out y --steps many",
             "info flesh", "evaluate x --data y --batch-rows 0", "plot", "finetune small --out y --learning-rates 2",
             "finetune smal --questions . --validation . --out y", "evaluate small --data nowhere",
             "evaluate small --data x --stride 3", "generate smal", "export smal --out y", "config flesh",
             "plot nowhere", "plot A=nowhere B=nowhere --out y.png"]
    missing = ["score small nowhere", "read nowhere --model small --out y", "prepare nowhere --out y",
               "generate small --prompt-file nowhere", "evaluate small --questions nowhere",
               "finetune small --questions nowhere --validation . --out y"]
    code = ("import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
            "from lineartime.cli.verbs import main\n"
            f"for line in {lines + missing}:\n    sys.argv[1:] = line.split()\n"
            "    try:\n        main()\n"
            "    except SystemExit as e:\n        print(e.code, file=sys.stderr)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    ended = iter(done.stderr.splitlines())
    for line in lines:
        said = next(ended)
        if "--help" in line or not line:
            assert said == "0", line
        else:
            assert said.startswith("error: ") and next(ended) == "2", line
    for line in missing:
        assert next(ended).startswith("error: cannot read: nowhere") and next(ended) == "3", line
    assert next(ended, None) is None and done.stdout.count("Usage") == 3


def test_a_toml_file_and_overrides(data: Path, tmp_path: Path, call: Call) -> None:
    fields = SETTINGS | {"model": "flash", "data": str(data), "out": str(tmp_path / "run"), "warmup_steps": 1,
                         "attn_scale_len": "none"}
    (tmp_path / "run.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items()))
    code, _, err = call("train", tmp_path / "run.toml", "--steps", 2, "--set=learning_rate=1e-3", "--set=clip=none")
    assert code == 0, err
    stored = json.loads((tmp_path / "run" / "run.json").read_text())["train"]
    assert stored["steps"] == 2 and stored["learning_rate"] == 1e-3 and stored["clip"] is None


def test_prepare_says_what_it_held_out(tmp_path: Path, call: Call) -> None:
    (tmp_path / "book.txt").write_text(TEXT)
    prepare = ["prepare", tmp_path / "book.txt", "--out", tmp_path / "data", "--tokenizer", "bytes", "--held-out", 0.2]
    code, out, _ = call(*prepare)
    assert code == 0 and "held out    the end of the only document: 20.0% of the tokens" in out
    assert "train flash --data" in out and "nothing to do" in call(*prepare)[1]
    masked = ["--out", tmp_path / "masked", *prepare[4:], "--mlm", "--task", "pg19"]
    assert "train flash --task pg19 --set causal=false --data" in call(*prepare[:2], *masked)[1]
    assert call("prepare", "-", "--out", tmp_path / "piped", *prepare[4:], stdin=TEXT)[0] == 0
    assert "hold some out: stdin;" in call("prepare", "-", "--out", tmp_path / "x", *prepare[4:], stdin=" \n")[2]
    assert "text: stdin, byte 9" in call("prepare", "-", "--out", tmp_path / "x", *prepare[4:], stdin="x" * 9 + "\0")[2]


def test_evaluate_prints_and_gives_json(run: Path, data: Path, tmp_path: Path, call: Call) -> None:
    code, out, _ = call("evaluate", run, "--data", data)
    assert code == 0 and "bits per byte" in out and "position" in out
    stored = json.loads((run / "result.json").read_text())["held_out"]
    _, out, _ = call("evaluate", run / "latest", "--data", data, "--json", "--batch-rows", 5)
    assert json.loads(out)["bits_per_byte"] == pytest.approx(stored["bits_per_byte"], rel=1e-6)
    found = json.loads(call("evaluate", run, "--data", data, "--json", "--context", 48)[1])
    assert found["split"] == "validation" and found["context"] == found["loss_by_position"][-1]["last"] == 48
    (tmp_path / "genome.txt").write_text("ACGT" * 500)  # a text of one word
    lineartime.prepare([tmp_path / "genome.txt"], tmp_path / "data", tokenizer="bytes", held_out=0.5)
    _, out, _ = call("evaluate", run, "--data", tmp_path / "data", "--json")
    assert json.loads(out, parse_constant=pytest.fail)["word_perplexity"] is None


def test_generate_from_arguments_files_and_stdin(run: Path, tmp_path: Path, call: Call) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfThe quick")
    how = ["--max-new-tokens", 12, "--temperature", 0]
    code, one, _ = call("generate", run, "The quick", *how)
    assert code == 0 and one.startswith("The quick")
    file = ["--prompt-file", tmp_path / "prompt.txt"]
    assert call("generate", run, *file, *how)[1] == call("generate", run, "-", *how, stdin="The quick")[1] == one
    assert call("generate", run, *file, *file, *how)[1] == f"== 1\n{one}== 2\n{one}"
    several = call("generate", run, "The quick", "A much longer prompt than the other", *how)[1]
    assert several.startswith("== 1\n" + one.rstrip("\n")) and "== 2\nA much longer" in several
    drawn = [call("generate", run, "The", *how[:2], "--seed", seed)[1] for seed in (5, 5, 6)]
    assert drawn[0] == drawn[1] != drawn[2]
    likeliest = call("generate", run, "The", *how)[1]
    for option in (["--top-k", 1], ["--top-p", 1e-9]):
        assert call("generate", run, "The", *how[:2], *option)[1] == likeliest


def test_generate_ends_before_a_stop_text(call: Call) -> None:
    """One prompt streams, two do not. The stop text is in several tokens."""
    begin, how = ["generate", "small", "Reader,"], ["--max-new-tokens", 12, "--temperature", 0]
    free = call(*begin, *how)[1].rstrip("\n")
    unfinished, stop = free[-1] + "never", free[-11:-5]
    for stops, text in ((["--stop", unfinished], free),  # what could have begun it is printed at the end
                        (["--stop", unfinished, "--stop", stop], free[: free.index(stop)])):
        assert call(*begin, *how, *stops)[1] == text + "\n"
        assert call(*begin, "The", *how, *stops)[1].startswith(f"== 1\n{text}\n== 2\n")


def test_what_may_begin_a_stop_text_is_held_back() -> None:
    stops = ("<end>", "ndx")
    for text, shown, held, is_over in (("a <", "a ", "<", False), ("a <en", "a ", "<en", False),
                                       ("en", "e", "n", False), ("a <b", "a <b", "", False),
                                       ("a <end> b", "a ", "", True), ("a ndx <end> b", "a ", "", True)):
        assert before_stop(text, stops) == (shown, held, is_over), text


def test_generate_in_another_type(run: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "prefill", spy := Mock(wraps=generate.prefill))
    assert call("generate", run, "The quick", "--max-new-tokens", 12, "--precision", "bfloat16")[0] == 0
    assert str(spy.call_args.args[0].embed.weight.dtype) == "torch.bfloat16"


def test_plot_draws_runs_into_a_file(run: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    other = shutil.copytree(run, tmp_path / "lr=.1" / run.name, ignore=lambda *_: ["loss.png"])
    assert call("plot", f"a={run}", f"b={run}", "--out", tmp_path / "drawn.png")[0] == 0
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
    assert call("plot", f"a={other}")[0] == 0 and (other / "loss.png").exists()
    monkeypatch.setattr("lineartime.training.plot.plot_side_by_side", lambda named, out: named)
    assert call("plot", run, other, "--out", "x.png")[1] == f"{({str(run): run, str(other): other})}\n"


def test_refusals(run: Path, data: Path, tmp_path: Path, call: Call) -> None:
    (tmp_path / "bad.txt").write_bytes(b"good\n\xff\xfe bad")
    short = shutil.copytree(data, tmp_path / "short")
    (short / "manifest.json").write_text((short / "manifest.json").read_text().replace("validation", "validatiom"))
    broken = shutil.copytree(data, tmp_path / "broken")
    (broken / "train-00000.bin").write_bytes(bytes((broken / "train-00000.bin").stat().st_size))
    (tmp_path / "nul.toml").write_text('model = "flash"\ndata = "a\\u0000b"\nout = "c"\n')
    long, evaluate = "x" * 6000, ["evaluate", run, "--data", data]
    for code, words, arguments in [
        (3, ["bad.txt", "byte 5"], ["prepare", tmp_path / "bad.txt", "--out", tmp_path / "x"]),
        (3, ["damaged manifest", "short"], ["evaluate", run, "--data", short]),
        (2, ["'int8' is not one of 'float32', 'bfloat16'"], ["generate", run, "x", "--precision", "int8"]),
        (3, ["damaged or missing file", "broken/train-00000.bin"], ["info", broken, "--verify"]),
        (2, ["--set takes a model or a run", "data"], ["info", data, "--set", "context=8"]),
        (2, ["--task takes the name of a model"], ["info", run, "--task", "c4"]),
        (2, ["cuda"], ["generate", run, "x", "--device", "cuda"]),
        (3, ["not valid UTF-8", "bad.txt, byte 5"], ["generate", run, "--prompt-file", tmp_path / "bad.txt"]),
        (2, ["a stop text is empty"], ["generate", run, "x", "--stop", ""]),
        (2, ["stdin is read once"], ["generate", run, "-", "--prompt-file", "-"]),
        (2, ["--out"], ["plot", run, run]), (2, ["exists already: ."], ["plot", run, "--out", ""]),
        (2, ["the same label", f"a={run}, a={data}"], ["plot", f"a={run}", f"a={data}", "--out", tmp_path / "x"]),
        (2, ["unknown model: run.tml"], ["train", "run.tml"]),
        (2, ["temperature must be 0 or at least"], ["generate", run, "--temperature", "1e-320", "hello"]),
        (2, ["the prompt is not UTF-8"], ["generate", run, "a\udcffb"]),
        (6, ["File name too long"], ["evaluate", long, "--data", long]),
        (2, ["wrong value: data = 'a\\x00b'"], ["train", tmp_path / "nul.toml"]),
        (2, ["na\\x1b[31mve\\u202e"], ["info", "na\x1b[31mve\u202e"]),
        (2, ["d_model is too large"], ["info", "flash", "--set", "d_model=1000000000000"]),
        (2, ["evaluate scores one text", f"{data}:2,{short}:1"], [*evaluate[:3], f"{data}:2,{short}:1"]),
    ]:
        assert_refused(*call(*arguments)[::2], code, *words)
    assert not (tmp_path / "x").exists()


def test_debug_shows_the_traceback(call: Call) -> None:
    code, _, err = call("--debug", "info", "flsh")
    assert code == 2 and "Traceback" in err and err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(("error", "code", "said"), [
    (KeyboardInterrupt(), 130, "interrupted"), (MemoryError(), 6, "error: out of memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), 6, "error: out of memory"),
    (RuntimeError("it failed\nException raised from f at g.cpp:1 (most recent call first):\nframe #0: h + 0x1"), 1,
     "error: internal: RuntimeError: it failed; run again with --debug and report it")])
def test_what_others_raise_has_a_code_and_a_line(error: BaseException, code: int, said: str,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    """Without the stack of PyTorch's C++, whose allocator raises a plain RuntimeError."""
    assert exit_code(Mock(side_effect=error)) == code and capsys.readouterr().err == said + "\n"


def test_a_reader_of_stdout_that_has_gone_is_no_error(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Screen, "write", Mock(side_effect=BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))))
    assert call("config")[0] == 0


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_full_stderr_changes_no_exit_code(
        rank: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    full = Mock(wraps=io.StringIO())
    full.write.side_effect = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for name, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("lineartime.cli.terminal.speaks_first", lambda ranks, error: True)
    assert exit_code(lambda: 1 // 0) == 1
    assert f"(rank {rank} on " in str(capfd.readouterr())  # such an error need not be that of other ranks
    monkeypatch.setattr(sys, "stderr", full)
    monkeypatch.setattr(sys, "__stderr__", full)  # where ranks above 0 write
    assert exit_code(Mock(side_effect=UsageError("it is wrong"))) == 2
    monkeypatch.setenv("WORLD_SIZE", "0")
    with pytest.raises(UsageError, match="torchrun"):
        launched()
