"""The bits of a stream are those of the whole text, whatever its blocks and stops; and a state that
was saved goes on as if it had never been."""

import copy
import itertools
import json
import math
import random
import re
import signal
import subprocess
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lineartime
from command_line import Call, assert_refused
from lineartime.base.errors import DataError, UsageError
from lineartime.cli.use import block_bytes
from lineartime.data.tokenizer import Tokenizer, byte_tokenizer, train_tokenizer
from lineartime.model.decoding.state import DecodingState
from lineartime.model.language_model import LanguageModel
from lineartime.training.runtime import system_bytes
from lineartime.use.scoring import ScoringState, open_state, score
from lineartime.weights.generation.generate import generate, prefill
from lineartime.weights.load import load_model
from text_files import make
from tiny_checkpoints import write_model
from tiny_models import CONFIGS, random_ids, random_model, with_end

WORDS = ["the", "Reader,", "I'll", "x=1;", "naïve", "世界", "\u00a0", "\u3000", "!\x1c", "...", "\u0085", "a\u200b"]
NEW = {"crc32", "precision"}  # what the state of version 0.2.0 has not
SPACES = [" ", " ", "  ", "\n", "\n", "\n\n", "\r\n", " \n", "\t\n    ", "\n\n\n  ", "\u2028", "\x0b"]


def text_of(n: int, seed: int = 0) -> str:
    made = random.Random(seed)
    return "".join(made.choice(WORDS) * made.choice([1, 1, 2]) + made.choice(SPACES) for _ in range(n)) + "no end"


def model_for(tokenizer: Tokenizer, name: str = "flash") -> LanguageModel:
    return random_model(replace(CONFIGS[name], vocab_size=tokenizer.vocab_size,
                                end_of_document=tokenizer.end_of_document))


def in_blocks(content: bytes, n: int) -> list[bytes]:
    cuts = sorted({0, len(content), *random.Random(n).choices(range(len(content)), k=n)})
    return [content[a:b] for a, b in itertools.pairwise(cuts)]


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), train_tokenizer([text_of(2000)], 400)], ids=["bytes", "bpe"])
def test_bits_are_those_of_the_whole_text(tokenizer: Tokenizer) -> None:
    """A line has those of the tokens from the line before's last word to its own last word."""
    text, model = text_of(300), model_for(tokenizer)
    ids = torch.tensor([tokenizer.end_of_document, *tokenizer.encode(text)])
    with torch.no_grad():
        expected = (model(ids[None, :-1], targets=ids[None, 1:])[0] / math.log(2)).tolist()
    tokens = list(score(model, tokenizer, in_blocks(text.encode(), 150), per="token"))
    assert [row.bits for row in tokens] == pytest.approx(expected, abs=1e-10)
    assert "".join(row.text for row in tokens) == text and tokens[-1].number == len(expected)
    lines = list(score(model, tokenizer, [text]))
    assert [row.text for row in lines] == [line[:80].rstrip() for line in text.split("\n")]
    assert [row.number for row in lines] == list(range(1, len(lines) + 1))
    end, begins = 0, [0, *itertools.accumulate(row.n_bytes for row in tokens)]
    for row in lines:
        at, end = end, end + row.n_bytes
        own = [bits for begin, bits in zip(begins, expected, strict=False) if at <= begin < end]
        assert row.bits == pytest.approx(math.fsum(own), abs=1e-9)
    (whole,) = score(model, tokenizer, [text], per="document")
    assert (whole.bits, whole.n_bytes, end) == (pytest.approx(math.fsum(expected)), len(text.encode()), end)
    assert [row.bits > 0 for row in score(model, tokenizer, ["word\n  \n  "])] == [True, False, False]
    assert [row.n_bytes for row in score(model, tokenizer, ["word\x1c\n\nend\n"])] == [5, 0, 5]
    for bad, words in (("a\ud800", "not valid UTF-8"), ("a\0\ud800", "a NUL byte: this is no text")):
        with pytest.raises(DataError, match=f"{words}: the text, byte 1"):
            list(score(model, tokenizer, [bad]))
    with pytest.raises(UsageError, match="unknown row: lines; did you mean line"):
        list(score(model, tokenizer, [text], per="lines"))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["flash", "flash local key conv", "flash+", "transformer++", "combiner", "performer"])
def test_blocks_and_saves_change_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory holds a part of a long line, and of blank lines without end; here parts are short."""
    monkeypatch.setattr("lineartime.use.scoring.LONG_LINE", 5000)
    tokenizer, path, found = byte_tokenizer(), tmp_path / "state", []
    model, content = model_for(tokenizer, name), "\ufeff" + text_of(100) + "\n"
    if name == "flash":
        content += text_of(1500).replace("\n", " ")[:5600] + "\n" * 5500 + text_of(40) + "\n"
    expected, blocks = list(score(model, tokenizer, [content])), in_blocks(content.encode(), 12)
    for n in range(0, len(blocks), 2):
        state = open_state(model, tokenizer, path)
        found += score(model, tokenizer, blocks[n : n + 2], state=state, keep=True)
        assert len(state.text) <= 5001 and len(state.shown) <= 80
        state.save(path)
    assert [row.bits for row in found] == pytest.approx([row.bits for row in expected], abs=1e-9)
    assert [row._replace(bits=0) for row in found] == [row._replace(bits=0) for row in expected]
    assert (state.n_read, state.n_lines) == (len(content.encode()), content.count("\n"))


def test_memory_is_constant() -> None:
    sizes, content, model = [], text_of(1000), model_for(byte_tokenizer())
    state = open_state(model, byte_tokenizer())

    def blocks() -> Iterator[str]:
        for _ in range(15):
            yield content
            resident = system_bytes("/proc/self/status", "VmRSS") or 0
            sizes.append((tracemalloc.get_traced_memory()[0], resident, state.decoding.n_bytes))

    tracemalloc.start()
    assert sum(1 for _ in score(model, byte_tokenizer(), blocks(), state=state)) > 10_000
    tracemalloc.stop()
    growth = [after - before for before, after in zip(sizes[3], sizes[-1], strict=True)]
    assert growth[0] < 50_000 and growth[1] < 16 << 20 and growth[2] == 0, growth


def test_a_stopped_command_goes_on(call: Call, tmp_path: Path, warm_command: list[str]) -> None:
    """A row comes with its line's end, while the pipe is open. The stop is within a character."""
    write_model(tmp_path / "model")
    content = ("one line\n" + text_of(300)).encode() + b"\n"
    stop, line = content.index(" 世".encode(), 1000) + 2, ["score", tmp_path / "model", "-", "--json"]
    code, expected, err = call(*line, stdin=content.decode())
    assert code == 0 and f"scored   {content.count(10):,} lines" in err and "bits per byte" in err
    found = b""
    for parts, code in (((content[:9], content[9:stop]), 143), ((content[stop:],), 0)):
        with subprocess.Popen([*map(str, [*warm_command, *line, "--state", tmp_path / "state"])], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            for part in parts:
                process.stdin.write(part)
                process.stdin.flush()
                found += b"".join(process.stdout.readline() for _ in range(part.count(10)))
            if code:
                process.send_signal(signal.SIGTERM)
            rest, error = process.communicate(timeout=100)
        assert process.returncode == code and not rest, error
        assert not code or (b"waits in" in error and b"SIGTERM: the same command goes on" in error)
    for ours, theirs in zip(map(json.loads, found.splitlines()), map(json.loads, expected.splitlines()), strict=True):
        near = {name: pytest.approx(theirs[name], abs=2e-3) for name in ("bits", "bits_per_byte")}
        assert ours == theirs | near


def test_the_state_is_saved_now_and_then(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a process that is killed; and what came before a wrong byte is kept."""
    write_model(model := tmp_path / "model")
    line = [model, "-", "--state", tmp_path / "state", "--json"]
    assert call("score", *line, stdin="one\ntwo\n\udcff\n")[0] == 3
    assert json.loads(call("score", *line, stdin="three\n")[1])["number"] == 3
    saved: list[int] = []
    monkeypatch.setattr("lineartime.cli.use.SAVE_SECONDS", 0.0)
    monkeypatch.setattr(ScoringState, "save", lambda self, path: saved.append(self.n_read))
    (book := tmp_path / "book").write_bytes(b"a line\n" * 10_000)
    assert call("score", model, book, "--state", tmp_path / "new")[0] == 0
    assert saved == [1 << 16, 70_000, 70_000]


def test_a_state_knows_its_text_and_its_precision(call: Call, tmp_path: Path) -> None:
    """A text that has grown is the same, another one is not. An older state has no checksum."""
    write_model(model := tmp_path / "model")
    (log := tmp_path / "log").touch()
    state, line = tmp_path / "state", ["score", model, log, "--json", "--state", tmp_path / "state"]
    for number in (0, 1, 2, 3):
        out, err = call(*line)[1:]
        assert json.loads(out)["number"] == number if number else (out, err) == ("", "scored   0 tokens: no text\n")
        log.write_text(log.read_text() + f"{number}\n")
        assert_refused(*call(*line, "--precision", "bfloat16")[::2], 2, "another precision: bfloat16", "has float32")
        old = open_state(*load_model(model)[:2], state)
        facts = {name: fact for name, fact in old.facts().items() if number > 1 or name not in NEW}
        old.decoding.save(state, facts)
    log.write_text(f"a{log.read_text()}b\n")
    assert_refused(*call(*line)[::2], 3, "another text", "name another file")


def test_what_is_said_follows_from_the_bits(call: Call, tmp_path: Path) -> None:
    (text := tmp_path / "text").write_text("It was a dark and stormy night.\n")
    _, out, err = call("score", "small", text, "--per", "token", "--json")
    rows = [json.loads(row) for row in out.splitlines()]
    bits, n_bytes = (sum(row[name] for row in rows) for name in ("bits", "bytes"))
    found = re.search(r"([\d.]+) bits per byte, perplexity ([\d.]+) per token", err)
    assert found is not None and n_bytes == 32 > 2 * len(rows)
    assert block_bytes(load_model("small")[0]) == 4096  # a stop waits for so many bytes
    assert [*map(float, found.groups())] == pytest.approx([bits / 32, 2 ** (bits / len(rows))], abs=0.06)
    assert all(row["bits_per_byte"] == pytest.approx(row["bits"] / row["bytes"], abs=1e-3) for row in rows)


STORY = "It was the 3rd, of May;\n\n  and naïve 世界 Reader's  x=1; " * 20


@pytest.mark.parametrize("n_before", [10, 12])
@pytest.mark.parametrize("name", ["flash", "flash+", "flash-quad", "transformer++", "combiner", "performer"])
def test_prompts_go_on_from_a_saved_state_as_from_the_whole(name: str, n_before: int, tmp_path: Path) -> None:
    """From one row for three prompts; the state stays as it is, and so does a copy."""
    model = random_model(with_end(CONFIGS[name]))
    before, prompts = random_ids(n_before).tolist(), [[3, 4, 5, 6, 7], [8], [9, 0, 2]]
    whole, _ = prefill(model, [before + prompt for prompt in prompts])
    expected = generate(model, [before + prompt for prompt in prompts], max_new_tokens=7)
    _, made = prefill(model, [before])
    copy.deepcopy(made).save(tmp_path / "state")
    for room in range(6):  # which is no part of it
        made.reserve(4 * room * (name != "combiner"))
        made.save(tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == (tmp_path / "state").read_bytes()
    with pytest.raises(UsageError, match="does not know its model"):
        replace(made, model=None).save(tmp_path / "other")
    state = DecodingState.load(tmp_path / "state", model)
    kept = {key: tensor.clone() for key, tensor in state.tensors().items()}
    assert not any(tensor.data_ptr() % 64 for tensor in state.tensors().values())  # else matmuls round otherwise
    for _ in range(2):
        logits_BV, _ = prefill(model, prompts, state=state.repeated(3))
        torch.testing.assert_close(logits_BV, whole, rtol=0, atol=1e-12)
        assert generate(model, prompts, max_new_tokens=7, state=state) == expected
    assert all(torch.equal(tensor, kept[key]) for key, tensor in state.tensors().items())
    for call in (lambda *given, **more: generate(*given, max_new_tokens=1, **more), prefill):
        with pytest.raises(UsageError, match="another batch: 3 rows, the input has 2"):
            call(model, prompts[:2], state=state.repeated(3))
    with pytest.raises(UsageError, match="the state of another model"):
        generate(random_model(with_end(CONFIGS[name]), seed=1), prompts, max_new_tokens=1, state=state)


def test_the_state_of_a_text_is_that_of_the_whole_text_with_what_follows() -> None:
    """A word may go on behind it. The state has one size."""
    for tokenizer in (byte_tokenizer(), train_tokenizer([STORY], 300)):
        model = model_for(tokenizer)
        for text in (STORY * 80, STORY + "Rea", "I", " \n "):
            told: list[tuple[int, ...]] = []
            state = lineartime.read(model, tokenizer, [text[:7], text[7:]],
                                    progress=lambda *now, told=told: told.append(now))
            whole = [[tokenizer.end_of_document, *tokenizer.encode(text + more)] for more in ("der", " and", "", "\n")]
            ids = [tokenizer.encode(state.text + more) for more in ("der", " and", "", "\n")]
            assert [int(state.seq_lens_B) + len(row) for row in ids] == [len(row) for row in whole]
            torch.testing.assert_close(prefill(model, ids, state=state.repeated(4))[0], prefill(model, whole)[0],
                                       rtol=0, atol=1e-10)
            assert told[-1] == (len(text.encode()) - len(state.text.encode()), int(state.seq_lens_B))
            assert state.n_bytes == model.decoding_state(1).n_bytes and len(state.text) < 20
        with pytest.raises(UsageError, match="goes on with texts and its own tokenizer"):
            generate(model, [[1]], max_new_tokens=1, state=state)
        with pytest.raises(DataError, match="no text"):
            lineartime.read(model, tokenizer, [])


def test_generate_goes_on_from_what_read_has_read(call: Call, tmp_path: Path) -> None:
    write_model(model := tmp_path / "model")
    (book := tmp_path / "book.txt").write_text(STORY)
    how = ["--temperature", "0", "--max-new-tokens", "12"]
    code, _, err = call("read", book, "--model", model, "--out", state := tmp_path / "state")
    assert code == 0 and "written" in err
    code, out, _ = call("generate", model, "--state", state, "Who", " is", *how)
    assert code == 0
    for number, (prompt, found) in enumerate(zip(("Who", " is"), out.split("== ")[1:], strict=True), 1):
        whole = call("generate", model, STORY + prompt, *how)[1]
        assert f"{number}\n{whole.removeprefix(STORY)}" == found
    assert call("read", "-", "--model", model, "--out", piped := tmp_path / "piped", stdin=STORY)[0] == 0
    assert piped.read_bytes() == state.read_bytes()
    code, out, err = call("generate", write_model(tmp_path / "t", abs_pos="learned"), "I", "--max-new-tokens", 9999)
    assert (code, out[0], out[-1]) == (2, "I", "\n") and "position table" in err  # the error has a line of its own


def test_what_cannot_be_read_scored_or_gone_on_from_is_one_line(call: Call, tmp_path: Path) -> None:
    model, masked, other = (write_model(tmp_path / name, **fields) for name, fields in (
        ("model", {}), ("masked", {"causal": False}), ("other", {"attn_scale_len": 99})))
    make(tmp_path, {"bad": b"good\n\xff\n", "binary": b"good\n\0\n", "short": "good\n", "rows.csv": "text\na\n",
                    "book": STORY})
    bad, binary, short, rows, book, state, scored, new = (
        tmp_path / name for name in ("bad", "binary", "short", "rows.csv", "book", "state", "scored", "new"))
    assert call("read", book, "--model", model, "--out", state)[0] == 0
    assert call("score", model, short, "--state", scored, "--per", "document")[0] == 0
    short.write_bytes(b"good")
    content, of_score = state.read_bytes(), scored.read_bytes()
    for name, wrong in (("cut", content[:-100]), ("none", b""), ("name", content.replace(b"0.kv_BSE", b"0.kv_BSX")),
                        ("bit", content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]),
                        ("rotten", of_score[:-3] + bytes([of_score[-3] ^ 1]) + of_score[-2:])):
        (tmp_path / name).write_bytes(wrong)
        assert_refused(*call("generate", model, "I", "--state", tmp_path / name)[::2], 4, "damaged", tmp_path / name)
    for arguments, code, words in (
            (["score", model, bad], 3, "bad, byte 5"), (["score", model, binary], 3, "binary, byte 5"),
            (["score", model, model], 3, "Is a directory"), (["score", masked, bad], 2, "only a"),
            (["score", model, bad, "--per", "word"], 2, "--per"),
            (["score", model, short, "--state", scored], 3, "or more of it"),
            (["score", "small", bad, "--state", scored], 4, "another model"),
            (["score", other, bad, "--state", scored], 4, "another model"),
            (["score", model, book, "--state", state], 4, "another command"),
            (["score", model, bad, "--state", tmp_path / "rotten"], 4, "hash"),
            (["score", model, bad, "--state", short], 4, "damaged"),
            (["score", model, bad, "--state", bad / "x"], 2, "no such"),
            (["generate", other, "--state", state], 4, "another model"),
            (["generate", model, "--state", state, "--precision", "bfloat16"], 4, "model or precision"),
            (["generate", model, "--state", scored], 4, "another command"),
            (["generate", model, "--state", tmp_path / "missing"], 4, "No such file"),
            (["read", rows, "--model", model, "--out", new], 2, "many documents"),
            (["read", book, "--model", model, "--out", book], 2, "exists already"),
            (["read", rows / "none", "--model", model, "--out", rows / "new"], 2, "no such folder"),
            (["read", "-", "--model", model, "--out", new], 3, "no text")):
        found, out, err = call(*arguments)
        assert_refused(found, err[err.find("error: "):], code, words)
        assert out.count("good") == words.endswith(", byte 5")  # what is before it is scored
    assert not new.exists() and book.read_text() == STORY
