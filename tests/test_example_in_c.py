"""`examples/flash.c` writes as the package does, goes on from a file, refuses damage in a line."""

import random
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch

import lineartime
from lineartime.data.tokenizer import PROBES, byte_tokenizer, load_tokenizer, train_tokenizer
from lineartime.use.export import write_folder
from tiny_models import BOTH_GRIDS, random_model

pytestmark = [pytest.mark.rest, pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")]
SOURCE, SMALL = (Path(__file__).parents[1] / name for name in ("examples/flash.c", "lineartime/models/small"))
CHECKS = ["-O1", "-w", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SHOW_IDS = f'#define main other\n#include "{SOURCE}"\n#undef main\n' """int main(int n, char **words) {
  I size, *ids = room_for(1 << 20, 8); vocab = atol(words[2]), load_tokenizer(words[1]);
  for (n = encode(read_file("", words[3], &size), ids); n-- > 0; ids++) printf("%d ", (int)*ids); }"""


def run(*command: object) -> tuple[bytes, bytes]:
    """What a program says. If it fails it is by one line of its own, not by a sanitizer's."""
    done = subprocess.run(["env", "ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1", *map(str, command)],
                          capture_output=True, timeout=60, check=False)
    assert re.fullmatch(b"flash: .*\n" if done.returncode == 1 else b"", done.stderr), done.stderr
    return done.stdout, done.stderr


def test_tiny_models_and_damage(tmp_path: Path) -> None:
    program, state, draw = tmp_path / "flash.exe", tmp_path / "state", random.Random(0)
    run("cc", *CHECKS, SOURCE, "-o", program, "-lm")
    for name in ("flash", "flash sum", "flash key conv", "flash write gate", "flash+, own grid", "flash+"):
        model = random_model(replace(BOTH_GRIDS[name], vocab_size=257, end_of_document=256)).float()
        model.head_bias.data[256], model.end_tokens = 3, set()
        write_folder(folder := tmp_path / name, model, byte_tokenizer(), "")
        safetensors.torch.save_file(dict(model.named_parameters()), folder / "model.safetensors")
        ids = [i for i in lineartime.generate(model, [[256, *b"It was"]], max_new_tokens=200)[0] if i < 256]
        assert len(ids) < 200 and run(program, folder, "It was", "-n", 200, "-d", 300)[0][6:-1] == bytes(ids), name
        for options in (("-d", 99), ("-d", 99, "-t", 0.9)):  # the text goes on as if it had not stopped
            whole, first, rest = (run(program, folder, text, "-n", n, *options, *more)[0] for text, n, *more in (
                ("It was", 99), ("It was", 50, "-o", state), ("", 49, "-i", state)))
            assert first[:-1] + rest == whole
    assert b"another model's" in run(program, tmp_path / "flash", "", "-i", state)[1]
    for path in [*(folder / name for name in ("config.json", "model.safetensors", "tokenizer.json")), state] * 12:
        good = path.read_bytes()
        for changed in (good[: draw.randrange(len(good) - 2)], bytes(draw.choice([b] * 99 + [7]) for b in good),
                        re.sub(rb"\d+", lambda n: draw.choice([n[0]] * 9 + [b"9" * 30, b"-1", b"65536"]), good)):
            path.write_bytes(changed)
            may_pass = changed == good or (path != state and len(changed) > len(good) - 99)
            assert run(program, folder, "It was", "-n", 9, "-i", state)[1] or may_pass
        path.write_bytes(good)


def test_small_and_the_ids_of_texts(tmp_path: Path) -> None:
    run("cc", "-O3", "-march=native", SOURCE, "-o", tmp_path / "flash", "-lm")
    model, tokenizer, _ = lineartime.load_model("small")
    written = lineartime.generate(model, ["It was"], tokenizer=tokenizer, max_new_tokens=800)[0]
    assert run(tmp_path / "flash", SMALL, "It was", "-n", 800)[0].decode() == f"It was{written}\n"
    text = "\n".join((*PROBES, SOURCE.read_text(), "don't 's 'll  \n\n  “Ça” — 3½°, 10 %…", written)).replace("\0", "")
    for name, content in (("ids.c", SHOW_IDS), ("text", text), ("tokenizer.json", train_tokenizer([text], 900).json)):
        (tmp_path / name).write_text(content, encoding="utf-8")
    run("cc", *CHECKS, tmp_path / "ids.c", "-o", tmp_path / "ids", "-lm")
    for folder, own in ((SMALL, tokenizer), (tmp_path, load_tokenizer(tmp_path / "tokenizer.json"))):
        shown, _ = run(tmp_path / "ids", folder, own.vocab_size, tmp_path / "text")
        assert [*map(int, shown.split())] == own.encode(text)
