"""The bits of a stream are those of the whole text, whatever its blocks and stops."""

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

from benchmarks.measure import rss_bytes
from command_line import Call, assert_refused
from lineartime.base.errors import DataError, UsageError
from lineartime.cli.use import block_bytes
from lineartime.data.tokenizer import Tokenizer, byte_tokenizer, train_tokenizer
from lineartime.model.language_model import LanguageModel
from lineartime.use.scoring import ScoringState, open_state, score
from lineartime.weights.load import load_model
from tiny_checkpoints import write_model
from tiny_models import CONFIGS, random_model

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
            sizes.append((tracemalloc.get_traced_memory()[0], rss_bytes() or 0, state.decoding.n_bytes))

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


def test_what_cannot_be_scored_is_one_line(call: Call, tmp_path: Path) -> None:
    write_model(model := tmp_path / "model")
    write_model(masked := tmp_path / "masked", causal=False)
    bad, short, state = tmp_path / "bad", tmp_path / "short", tmp_path / "state"
    bad.write_bytes(b"good\n\xff\n")
    short.write_bytes(b"good\n")
    assert call("score", model, short, "--state", state, "--per", "document")[0] == 0
    short.write_bytes(b"good")
    content = state.read_bytes()
    (binary := tmp_path / "binary").write_bytes(b"good\n\0\n")
    (rotten := tmp_path / "rotten").write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    for arguments, code, words in (
            ([model, bad], 3, "bad, byte 5"), ([model, model], 3, "Is a directory"), ([masked, bad], 2, "only a"),
            ([model, binary], 3, "binary, byte 5"),
            ([model, short, "--state", state], 3, "or more of it"), ([model, bad, "--per", "word"], 2, "--per"),
            (["small", bad, "--state", state], 4, "another model"), ([model, bad, "--state", rotten], 4, "hash"),
            ([model, bad, "--state", short], 4, "damaged"), ([model, bad, "--state", bad / "x"], 2, "no such")):
        code_said, out, err = call("score", *arguments)
        assert_refused(code_said, err[err.find("error: "):], code, words)
        assert out.count("good") == words.endswith(", byte 5")  # what is before it is scored
