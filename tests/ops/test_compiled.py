"""The kernels in C: made once, a file of this user's own; without a compiler there are none."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lineartime.ops import compiled, windows

needs_compiler = pytest.mark.skipif(compiled.library() is None, reason=compiled.in_words())


@pytest.fixture
def anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and the commands that are called from now on stand in its file `commands`."""
    monkeypatch.setenv(compiled.CACHE, str(tmp_path / "cache"))
    plain = compiled.output_of

    def output_of(command: list[str], folder: Path | None = None) -> str:
        with open(tmp_path / "commands", "a") as log:
            log.write("made\n" if "-o" in command else "asked\n")
        return plain(command, folder)

    monkeypatch.setattr(compiled, "output_of", output_of)
    return tmp_path


def times_made(folder: Path) -> int:
    return (folder / "commands").read_text().count("made")


@needs_compiler
def test_numbers_are_those_of_pytorch() -> None:
    """NaN and infinities stay what they are; bfloat16 is rounded once."""
    x = torch.cat([torch.linspace(-100, 100, 40_001), torch.tensor([torch.nan, torch.inf, -torch.inf, 1e38, -1e38])])
    for dtype, error in ((torch.float32, 3e-7), (torch.bfloat16, 2**-8), (torch.float64, 1e-15)):
        for given in (x.to(dtype)[None, :, None], x.to(dtype)[None, None]):  # one by one, and in vectors
            windows.call("gate", given, *given.shape, given, windows.NO_TOKENS, out := torch.empty_like(given))
            torch.testing.assert_close(out.double(), F.silu(given.double()), rtol=error, atol=1e-30, equal_nan=True)


@needs_compiler
def test_it_is_made_once_and_again_where_others_can_write(anew: Path) -> None:
    assert compiled.loaded.__wrapped__()[0] is not None
    once = times_made(anew)  # twice where the first, with threads, cannot be loaded
    assert compiled.loaded.__wrapped__()[0] is not None and times_made(anew) == once
    kept, *more = (anew / "cache").iterdir()  # nothing else is left there
    assert 1 + len(more) == once <= 2
    kept.parent.chmod(0o777)
    assert compiled.loaded.__wrapped__()[0] is not None and times_made(anew) == 2 * once
    kept.parent.chmod(0o700)
    elsewhere = anew / "elsewhere.so"
    kept.rename(elsewhere)
    kept.symlink_to(elsewhere)
    assert not compiled.is_own(kept)


@needs_compiler
def test_a_cache_that_cannot_be_written_is_done_without(anew: Path) -> None:
    (anew / "cache").write_text("a file is in its place")
    assert compiled.loaded.__wrapped__()[0] is not None and times_made(anew) <= 2


def test_without_a_compiler_there_is_no_library(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for compiler, reason in (("no-such-compiler", "No such file"), ("false", "non-zero exit status"),
                             ("'", "No closing quotation")):
        monkeypatch.setenv("CC", compiler)
        library, words = compiled.loaded.__wrapped__()
        assert library is None and words.startswith("PyTorch (") and reason in words and "\n" not in words
    monkeypatch.setenv(compiled.NO_C, "1")
    assert compiled.library() is None and compiled.NO_C in compiled.in_words()
    assert not (anew / "cache").exists()
