"""The kernels in C on ARM: an emulator repeats each call on a copy of memory (make ecosystem)."""

import ctypes
import gc
import itertools
import shutil
from subprocess import PIPE, Popen

import pytest
import torch

from lineartime.config import model_config
from lineartime.model.language_model import LanguageModel
from lineartime.ops import compiled
from tiny_models import drawn

pytestmark = pytest.mark.ecosystem
CROSS, EMULATOR = "aarch64-linux-gnu-gcc", ["qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu"]
BASE, LONGEST = 1 << 36, 24  # where memory lies in the emulator; the most arguments of a function
ERROR = {torch.bfloat16: 1e-3, torch.float32: 1e-5, torch.float64: 1e-12}
MAIN = f"""
#include <dlfcn.h>
#include <stdio.h>
#include <sys/mman.h>
int main(int n, char **args) {{
  char f[64], *memory = mmap((void *){BASE}, 1 << 28, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  for (long size, a[{LONGEST}]; fread(f, 64, 1, stdin) && fread(&size, 8, 1, stdin) && fread(a, sizeof a, 1, stdin);) {{
    fread(memory, size, 1, stdin);
    ((void (*)())dlsym(dlopen(args[1], RTLD_NOW), f))({", ".join(f"a[{i}]" for i in range(LONGEST))});
    fwrite(memory, size, 1, stdout), fflush(stdout);
  }}
}}"""


def call_both(library, emulator, name, args):
    """Call a function here and in the emulator, and compare what they write into tensors."""
    # A struct becomes a tensor, so that it is found among the others and its pointers are moved.
    args = [torch.frombuffer(bytearray(x), dtype=torch.int64) if isinstance(x, bytes) else x for x in args]
    word_N = torch.tensor([x.data_ptr() if isinstance(x, torch.Tensor) else x.value or 0 for x in args])
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.device.type == "cpu"]
    spans, at = [], 0
    for start, (dtype, size) in {(y := x.untyped_storage()).data_ptr(): (x.dtype, y.nbytes()) for x in tensors}.items():
        if start and size and size % dtype.itemsize == 0:
            spans.append((start, at, dtype, size))
            at += size + -size % 64

    def moved(word_N):
        return sum((((word_N >= start) & (word_N < start + size)) * (BASE + at - start)
                    for start, at, _, size in spans), word_N).numpy().tobytes()

    def memory():
        parts = [(bytearray(ctypes.string_at(start, size)), dtype) for start, _, dtype, size in spans]
        parts = [moved(torch.frombuffer(x, dtype=dtype)) if dtype == torch.int64 else x for x, dtype in parts]
        return bytearray().join(x.ljust(len(x) + -len(x) % 64, b"\0") for x in parts)

    before, words = memory(), moved(word_N).ljust(8 * LONGEST, b"\0")
    emulator.stdin.write(name.encode().ljust(64, b"\0") + at.to_bytes(8, "little") + words + before)
    emulator.stdin.flush()
    getattr(library, name)(*map(ctypes.c_int64, word_N.tolist()))
    copies = before, memory(), bytearray(emulator.stdout.read(at))
    for _, first, dtype, size in spans:
        old, here, there = (torch.frombuffer(x, dtype=dtype, count=size // dtype.itemsize, offset=first).double()
                            for x in copies)
        written = ((here != old) | (there != old)) & ~(here.isnan() & there.isnan())  # memory may begin as NaN
        assert (here - there)[written].norm() <= ERROR.get(dtype, 0) * here[written].norm(), (name, dtype)


def test_arm_does_what_this_processor_does(tmp_path, monkeypatch):
    library, called = compiled.library(), set()
    if not shutil.which(CROSS) or not shutil.which(EMULATOR[0]) or library is None:
        pytest.skip("install gcc, gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user-static")
    monkeypatch.setenv(compiled.CACHE, str(tmp_path))
    made = compiled.made_or_kept([CROSS, *compiled.FLAGS, "-fopenmp"], tmp_path)
    (tmp_path / "main.c").write_text(MAIN)
    compiled.output_of([CROSS, "-fopenmp", "-Wl,--no-as-needed", "main.c", "-o", "main", "-ldl"], tmp_path)
    with Popen([*EMULATOR, tmp_path / "main", made], stdin=PIPE, stdout=PIPE) as emulator:
        both = type("Both", (), {"__getattr__": lambda _, name: (
            lambda *args: called.add(name) or call_both(library, emulator, name, args))})
        monkeypatch.setattr(compiled, "library", both)
        gc.freeze()  # so that each call looks among newer objects only
        for dtype, preset, causal in itertools.product(ERROR, ("flash", "flash+"), (True, False)):
            model = drawn(LanguageModel(model_config(preset, causal=causal, n_layers=2, d_model=16, query_key_dim=16,
                                                     chunk_size=8, vocab_size=20)).to(dtype))
            id_BT, state = torch.randint(20, (3, 29)), model.decoding_state(3) if causal else None
            model(id_BT)[0].sum().backward()
            for id_B1 in id_BT.split(1, 1) if state and dtype != torch.float64 else ():
                with torch.no_grad():
                    model.logits(model.extend(id_B1, None, state)[0][:, 0])
    gc.unfreeze()
    assert len(called) == 7 * 3 + 2 * 2, called  # each function of training.c and of decode.c
