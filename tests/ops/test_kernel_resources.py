"""Kernels compiled without a GPU, for six architectures: they fit, nothing spills, and they use the
tensor cores.

A process of its own compiles them, because tests have Triton interpret kernels: `python
test_kernel_resources.py ROWS.jsonl few 90 80` calls the ops, forward and backward, and compiles
each kernel for the architectures named as that call would have it, in place of a launch. Nothing is
computed. ROWS.jsonl gets a line for each program. `everything` compiles more cases than `few`."""

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from lineartime.ops import decode_step, mixed_chunk, quadratic
from lineartime.ops.dispatch import MUCH_SHARED_KIB
from lineartime.ops.reference import HeadsFromZ

SHARED_KIB = {80: 163, 90: 227, 86: 99, 89: 99, 100: 227, 120: 99}
"""Shared memory that one program can have, by architecture: by NVIDIA's table."""
PRODUCTS = {"add_up", "attend_queries", "differentiate_head", "differentiate_keys", "differentiate_scores",
            "walk_states", "weigh"}
"""Kernels that multiply matrices, and so must use the tensor cores in types of 16 bits."""
CHUNKED = {"attend_queries", "differentiate_keys", "walk_states"}
KNOWN_SPILLS = {("attend_queries", 90, 512): 112, ("differentiate_keys", 80, 128): 8}
"""Bytes of a thread by kernel, architecture and chunk. The tiles were chosen for chunks of 256."""
OTHERS = {"base_gradient_kernel", "decode_columns", "make_heads_kernel"}
D_INNER, S = 1536, 128
LONG_ROW = 2**14  # tokens of a row whose chunk states take two levels


class Case(NamedTuple):
    """One call of an op, forward and backward."""

    op: str
    dtype: str = "bfloat16"
    chunk: int | None = 256  # tokens in a chunk, where the op has them
    causal: bool = True
    n_tokens: int = 1024  # in a row


Program = dict[str, Any]
"""A kernel compiled for one architecture: `kernel`, `arch`, `tile_rows`; `registers` and `spilled`
bytes of a thread, `shared` bytes of a program, `tensor_cores`, the instructions that use them; and
what `pipeline_of` reads."""


@contextlib.contextmanager
def recording(arch: int, known: dict[tuple[object, ...], Program]) -> Iterator[list[Program]]:
    """The programs of the launches inside, in place of making them, for an architecture. known:
    gets each program by what was compiled, which is compiled once."""
    launches: list[Program] = []
    backend = make_backend(GPUTarget("cuda", arch, 32))

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        # As in JITFunction.run, for a device that is not here.
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, options = bind(*args, debug=False, instrumentation_mode="", **kwargs)
        key = (arch, kernel.cache_key, str(specialization), str(options))
        if key not in known:
            known[key] = compiled(kernel, arch, *kernel._pack_args(backend, options, bound, specialization, options))
        if known[key] not in launches:
            launches.append(known[key])

    kind = "small" if SHARED_KIB[arch] < MUCH_SHARED_KIB else "hopper" if arch == 90 else "large"
    with patch.object(JITFunction, "run", record), patch.object(mixed_chunk, "tile_class", lambda device: kind):
        yield launches


def compiled(kernel: JITFunction, arch: int, options: Any, signature: dict[str, str], constants: dict[Any, Any],
             attributes: dict[Any, Any]) -> Program:
    """Compile for an architecture and read what the assembler made of it."""
    made = triton.compile(ASTSource(kernel, signature, constants, attributes), target=GPUTarget("cuda", arch, 32),
                          options=options.__dict__)
    names = list(signature)
    named = {names[path[0]]: value for path, value in constants.items() if signature[names[path[0]]] == "constexpr"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(made.asm["cubin"])
        listing = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file],
                                 capture_output=True, text=True, check=True).stdout
    used = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", listing)}
    return {"kernel": kernel.__name__, "arch": arch, "tile_rows": named.get("BM"), "registers": used["REG"],
            "spilled": used["STACK"] + used["LOCAL"], "shared": made.metadata.shared,
            "tensor_cores": len(re.findall(r"\b(?:UTC)?HG?MMA\b", listing)), **pipeline_of(made.asm["ttgir"])}


def pipeline_of(code: str) -> dict[str, int]:
    """How a program overlaps copies and products, from its code before registers are given out:
    `in_flight`, the most copies that a loop lets go on while it multiplies, and `rows_of_warps`,
    the rows that its warps cover at once."""
    waits = re.findall(r"async_wait\b.*num = (\d+)", code)
    warps = re.findall(r"nvidia_mma<.*?warpsPerCTA = \[(\d+)", code)
    return {"in_flight": max(map(int, waits), default=0), "rows_of_warps": 16 * max(map(int, warps), default=0)}


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype).requires_grad_()


def gated_attention(case: Case) -> Tensor:
    """Parameters and angles in float32 as in training."""
    t, n_rows, n_heads = case.n_tokens, 1 if case.n_tokens == LONG_ROW else 2, 4 if case.chunk else 2
    heads = HeadsFromZ(numbers(n_heads, S), numbers(n_heads, S), torch.zeros(1, t, S // 2), torch.ones(1, t, S // 2))
    inputs = (numbers(n_rows, t, 2 * D_INNER + S, dtype=getattr(torch, case.dtype)), heads,
              numbers(2 * (case.chunk or t) - 1))
    mask = {"causal": case.causal, "segment_ids_BT": torch.zeros(n_rows, t, dtype=torch.long)}
    if case.op == "chunk_attention":
        z_BTS = numbers(n_rows, t, S, dtype=getattr(torch, case.dtype))
        return mixed_chunk.chunk_attention(inputs[0][..., :D_INNER], [z_BTS] * 4, chunk_size=case.chunk, **mask)
    if case.chunk:
        return mixed_chunk.gated_chunk_attention(*inputs, chunk_size=case.chunk, **mask)
    return quadratic.gated_quadratic_attention(*inputs, scale_len=512, **mask)


def one_token(case: Case) -> Tensor:
    """64 rows at once, all of a short type but the sums and the bias."""
    n, c, kind = 64, case.chunk, getattr(torch, case.dtype)
    place = torch.zeros(n, dtype=torch.long)
    rest = (torch.zeros(c), *(torch.zeros(n, c, width, dtype=kind) for width in (S, S, D_INNER)),
            torch.zeros(n, S, D_INNER), place, place, torch.zeros(n))
    uvz_B1F, heads_4B1S = torch.zeros(n, 1, 2 * D_INNER + S, dtype=kind), torch.zeros(4, n, 1, S, dtype=kind)
    if case.op == "chunk_decode_step, made heads":
        return decode_step.chunk_decode_step(uvz_B1F[..., : 2 * D_INNER], heads_4B1S, *rest)
    scale_4S, angle_B1R = torch.zeros(4, S, dtype=kind), torch.zeros(n, 1, S // 2, dtype=kind)
    return decode_step.chunk_decode_step(uvz_B1F, HeadsFromZ(scale_4S, scale_4S, angle_B1R, angle_B1R), *rest)


OPS: dict[str, Callable[[Case], Tensor]] = {
    "gated_chunk_attention": gated_attention, "gated_quadratic_attention": gated_attention,
    "chunk_decode_step": one_token, "chunk_decode_step, made heads": one_token, "chunk_attention": gated_attention}


def cases_for(arch: int, everything: bool) -> list[Case]:
    """What a training run has, for a Hopper, and what has other tiles on a GPU with little shared
    memory. `everything`: for all, and for two also other types, chunks, masks, and long rows."""
    usual = [Case(op, chunk=None if op.startswith("gated_quadratic") else 256) for op in OPS]
    if not everything:
        return usual if arch == 90 else usual[:1]
    if arch not in (80, 90):
        return usual
    made = [usual[0]._replace(chunk=chunk, causal=causal)
            for chunk, causal in itertools.product((256, 128, 512), (True, False))]
    # Chunks of 128 alone in float32: larger ones take minutes of the assembler.
    made += [usual[0]._replace(n_tokens=LONG_ROW), usual[0]._replace(dtype="float16"),
             usual[0]._replace(dtype="float32", chunk=128), usual[1]._replace(causal=False)]
    return made + [case._replace(dtype=dtype) for case in usual[1:] for dtype in ("bfloat16", "float16", "float32")]


def main(path: Path, everything: bool, archs: list[int]) -> None:
    known: dict[tuple[object, ...], Program] = {}
    with path.open("w", encoding="utf-8") as file, tempfile.TemporaryDirectory(prefix="lineartime-") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for arch in archs:
            for case in cases_for(arch, everything):
                with recording(arch, known) as launches:
                    out = OPS[case.op](case)
                    if out.requires_grad:
                        out.sum().backward()
                file.writelines(json.dumps({**case._asdict(), **program}) + "\n" for program in launches)


@pytest.fixture(scope="module", params=[
    pytest.param((90, 80), marks=pytest.mark.rest),
    *(pytest.param((arch,), marks=pytest.mark.campaign) for arch in SHARED_KIB)], ids=str)
def rows(request, tmp_path_factory):
    """Every program of the selected cases. `make test-all` has few, the campaign all."""
    path = tmp_path_factory.mktemp("resources") / "rows.jsonl"
    selection = "everything" if len(request.param) == 1 else "few"
    done = subprocess.run([sys.executable, __file__, path, selection, *map(str, request.param)], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_kernels_compile_fit_and_do_not_spill(rows):
    """All kernels for a Hopper, and for the others what has other tiles there."""
    compiled = {arch: {row["kernel"] for row in rows if row["arch"] == arch} for arch in SHARED_KIB}
    first, *others = filter(None, (compiled[arch] for arch in (90, 80, 86, 89, 100, 120)))
    assert first - {"scan_states"} == PRODUCTS | OTHERS
    assert all(kernels >= CHUNKED for kernels in others)
    if any(row["n_tokens"] > 2**13 for row in rows):
        assert "scan_states" in first
    for row in rows:
        assert row["spilled"] <= KNOWN_SPILLS.get((row["kernel"], row["arch"], row["chunk"]), 0), row
        assert row["shared"] <= SHARED_KIB[row["arch"]] * 1024, row


def test_products_are_made_once_by_tensor_cores_while_copies_are_in_flight(rows):
    """In types of 16 bits. A program's warps cover no more rows than its tile has, but for
    bidirectional tiles of a GPU with little shared memory: others of that size spill."""
    for row in rows:
        short = row["dtype"] != "float32"
        assert row["kernel"] not in PRODUCTS or (row["tensor_cores"] > 0) == short, row
        if row["kernel"] in CHUNKED:
            assert row["in_flight"] > 0 or not short, row
            if row["causal"] or row["arch"] in (90, 100):
                assert row["rows_of_warps"] <= (row["tile_rows"] or 128), row


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "everything", [int(arch) for arch in sys.argv[3:]])
