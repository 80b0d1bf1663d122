"""What every kernel takes of a GPU that need not be here: registers, spills, shared memory, tensor-core instructions.

`python tools/kernel_resources.py` calls the ops, forward and backward, on tensors in main memory. Instead of being
launched, each kernel is compiled as that launch would have it compiled, for every architecture asked for; nothing is
run, and what the ops return is not looked at. `--into docs/tuning.md` writes the table there.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402
from torch import Tensor  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

from lineartime.benchmark.markdown import folded, markdown  # noqa: E402
from lineartime.ops import decode_step, mixed_chunk, norm, quadratic  # noqa: E402
from lineartime.ops.dispatch import MUCH_SHARED_KIB  # noqa: E402

SHARED_KIB = {80: 163, 90: 227, 86: 99, 89: 99, 100: 227, 120: 99}
"""Shared memory that one program can have, by architecture."""
SHOWN = (80, 90)
"""The architectures of the table in docs/tuning.md."""

PLACE = re.compile(r"(<!-- resources: begin -->\n).*?(<!-- resources: end -->)", re.DOTALL)
DTYPES = ("bfloat16", "float16", "float32")
CHUNKS = (256, 128, 512)
D_INNER, S = 1536, 128
LONG_ROW = 2**14
"""Tokens of a row whose chunk states take two levels."""


@dataclass(frozen=True)
class Case:
    """One call of an op, forward and backward."""

    op: str
    dtype: str
    chunk: int | None = None
    """Tokens in a chunk, where the op has them."""
    causal: bool | None = True
    documents: bool | None = True
    n_tokens: int = 1024
    """In a row."""
    past: bool = False
    """Whether a state enters the rows, which are parts of rows."""

    @property
    def default(self) -> bool:
        """What a training run has unless it asks for something else."""
        return self.dtype == "bfloat16" and self.usual and not self.past

    @property
    def usual(self) -> bool:
        """But for its type."""
        return self.chunk in (None, 256) and False not in (self.causal, self.documents) and self.n_tokens < LONG_ROW


CASE = [field.name for field in fields(Case)]
"""Columns of a row that are of its case, and not of its program."""

Program = dict[str, Any]
"""A kernel compiled for one architecture: `kernel`, `arch`, `options` (its other constants that are true), `tiles`,
`warps`, `stages`; `registers` and `spilled` bytes of a thread, `shared` bytes of a program, and `tensor_cores`, the
instructions that use them; and what `pipeline_of` and `instructions_of` read."""


@contextlib.contextmanager
def recording(arch: int, known: dict[tuple[object, ...], Program]) -> Iterator[list[Program]]:
    """The programs of the launches inside, in place of making them, for an architecture. known: gets each program by
    what was compiled, which is compiled once."""
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

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(JITFunction, "run", record))
        for name, module in list(sys.modules.items()):
            if name.startswith("lineartime.ops.") and hasattr(module, "tile_class"):
                kind = "small" if SHARED_KIB[arch] < MUCH_SHARED_KIB else "hopper" if arch == 90 else "large"
                stack.enter_context(patch.object(module, "tile_class", lambda device, kind=kind: kind))
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
    true = [name for name, value in named.items() if value is True and name not in ("CAUSAL", "DOCUMENTS")]
    tiles = [f"{name} {value}" for name, value in named.items()
             if type(value) is int and re.fullmatch(r"B[A-Z]|BLOCK|N|KEPT|ROUND", name)]
    return {"kernel": kernel.__name__, "arch": arch, "options": ", ".join(true).lower().replace("_", " "),
            "tiles": " ".join(tiles), "warps": options.num_warps, "stages": options.num_stages,
            "registers": used["REG"], "spilled": used["STACK"] + used["LOCAL"], "shared": made.metadata.shared,
            "tensor_cores": len(re.findall(r"\bHG?MMA\b", listing)), **pipeline_of(made.asm["ttgir"]),
            **instructions_of(listing)}


def pipeline_of(code: str) -> dict[str, int]:
    """How a program overlaps copies and products, from its code before registers are given out: `in_flight`, the most
    copies that a loop lets go on while it multiplies, and `rows_of_warps`, the rows that its warps cover at once."""
    waits = re.findall(r"async_wait\b.*num = (\d+)", code)
    warps = re.findall(r"nvidia_mma<.*?warpsPerCTA = \[(\d+)", code)
    return {"in_flight": max(map(int, waits), default=0), "rows_of_warps": 16 * max(map(int, warps), default=0)}


def instructions_of(listing: str) -> dict[str, int]:
    """Instructions in the assembler's listing, a warp's: `instructions`, all; `in_loop`, those of the longest loop that
    has no other inside, 0 without one; `special`, those of the loop, or without one of all, that make special
    functions."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", listing)
    places = {int(address, 16): i for i, (address, _) in enumerate(lines)}
    jumps = [(places.get(int(to, 16), i), i) for i, (_, text) in enumerate(lines)
             for to in re.findall(r"\bBRA\b.*?(0x[0-9a-f]+)", text)]
    loops = [(first, last) for first, last in jumps if first < last]
    inner = [(first, last) for first, last in loops
             if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops)]
    first, last = max(inner, key=lambda loop: loop[1] - loop[0], default=(0, -1))
    counted = lines[first : last + 1] or lines
    return {"instructions": len(lines), "in_loop": last + 1 - first,
            "special": sum("MUFU" in text for _, text in counted)}


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype).requires_grad_()


def gated_attention(case: Case) -> Tensor:
    """By chunks where the case has them; parameters and angles in float32 as in training."""
    t, n_rows, n_heads = case.n_tokens, 1 if case.n_tokens >= LONG_ROW else 2, 4 if case.chunk else 2
    inputs = (numbers(n_rows, t, 2 * D_INNER + S, dtype=getattr(torch, case.dtype)), numbers(n_heads, S),
              numbers(n_heads, S), torch.zeros(1, t, S // 2), torch.ones(1, t, S // 2),
              numbers(2 * (case.chunk or t) - 1))
    mask = {"causal": case.causal,
            "segment_ids_BT": torch.zeros(n_rows, t, dtype=torch.long) if case.documents else None}
    if case.chunk:
        exchange = (lambda leaving_DBF, passes_B: leaving_DBF) if case.past else None
        return mixed_chunk.gated_chunk_attention(*inputs, chunk_size=case.chunk, exchange=exchange, **mask)
    return quadratic.gated_quadratic_attention(*inputs, scale_len=512, **mask)


def add_norm(case: Case) -> Tensor:
    """LayerNorm as in training, where what layers add is `dtype` and the residual stream float32; or ScaleNorm, all in
    one type."""
    dtype, one_type = getattr(torch, case.dtype), case.op == "add_norm, one type"
    x, delta = numbers(2, 512, 768, dtype=dtype if one_type else torch.float32), numbers(2, 512, 768, dtype=dtype)
    weights = (numbers(1, dtype=dtype), None) if one_type else (numbers(768), numbers(768))
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32 and not one_type):
        total, normed = norm.add_norm(x, delta, *weights)
    return total.sum() + normed.sum()


def one_token(case: Case) -> Tensor:
    """64 rows at once, all in the type of a model cast for decoding but the sums and the bias; with heads that are made
    in the kernel, or before it."""
    assert case.chunk is not None
    n, c, kind = 64, case.chunk, getattr(torch, case.dtype)
    place = torch.zeros(n, dtype=torch.long)
    rest = (torch.zeros(c), *(torch.zeros(n, c, width, dtype=kind) for width in (S, S, D_INNER)),
            torch.zeros(n, S, D_INNER), place, place, torch.zeros(n))
    if case.op == "head_decode_step":
        uv_BF, heads_4BS = (torch.zeros(shape, dtype=kind) for shape in ((n, 2 * D_INNER), (4, n, S)))
        return decode_step.head_decode_step(uv_BF, heads_4BS, *rest)
    return decode_step.chunk_decode_step(
        torch.zeros(n, 2 * D_INNER + S, dtype=kind), *(torch.zeros(4, S, dtype=kind) for _ in range(2)),
        *(torch.zeros(n, S // 2, dtype=kind) for _ in range(2)), *rest)


OPS: dict[str, Callable[[Case], Tensor]] = {
    "gated_chunk_attention": gated_attention, "gated_quadratic_attention": gated_attention,
    "add_norm": add_norm, "add_norm, one type": add_norm, "chunk_decode_step": one_token,
    "head_decode_step": one_token}


def cases() -> list[Case]:
    """Every case of the table, those of a training run first."""
    both = (True, False)
    made = [Case("gated_chunk_attention", *rest) for rest in itertools.product(DTYPES, CHUNKS, both, both)]
    # Long rows sum their chunks in two levels.
    made += [Case("gated_chunk_attention", dtype, 256, n_tokens=n, past=past) for dtype in DTYPES
             for n, past in ((LONG_ROW, False), (Case.n_tokens, True), (LONG_ROW, True))]
    made += [Case("gated_quadratic_attention", *rest) for rest in itertools.product(DTYPES, (None,), both, both)]
    made += [Case(op, dtype, None, None, None) for op in ("add_norm", "add_norm, one type") for dtype in DTYPES]
    made += [Case(op, dtype, chunk, None, None) for op in ("chunk_decode_step", "head_decode_step") for dtype in DTYPES
             for chunk in CHUNKS]
    return sorted(made, key=lambda case: not case.default)


QUICK = ("push", "usual", "everywhere")
"""Selections smaller than everything. The first two are for the architectures `SHOWN`."""


def selected(case: Case, arch: int, quick: str | None) -> bool:
    """Whether a case is compiled for an architecture: "usual" leaves out what trains seldom (float32 has many rounds
    where chunks are larger), "push" also types other than bfloat16 and states that enter; "everywhere" is what "usual"
    has in bfloat16, for every architecture."""
    if quick is None:
        return True
    if quick != "everywhere" and arch not in SHOWN:
        return False
    if quick == "everywhere" and case.dtype != "bfloat16":
        return False
    if quick == "push" and (case.dtype != "bfloat16" or case.past):
        return False
    if case.op == "gated_chunk_attention" and case.dtype == "float32":
        return replace(case, chunk=256).usual and case.chunk == 128
    return case.usual and (case.dtype != "float16" or case.op == "add_norm")


def measure(quick: str | None) -> list[dict[str, Any]]:
    """A row for every program of every selected case and architecture."""
    wanted = [case for case in cases() if any(selected(case, arch, quick) for arch in SHARED_KIB)]
    known: dict[tuple[object, ...], Program] = {}
    rows = []
    for number, case in enumerate(wanted, 1):
        print(f"{number} of {len(wanted)}: {case}", file=sys.stderr, flush=True)
        for arch in (arch for arch in SHARED_KIB if selected(case, arch, quick)):
            with recording(arch, known) as launches:
                out = OPS[case.op](case)
                if out.requires_grad:
                    out.sum().backward()
            rows += [{**asdict(case), **program} for program in launches]
    return rows


def case_text(cases: Sequence[dict[str, Any]]) -> str:
    """Which calls a line is of: "bfloat16, C 128/256, causal, documents"; what makes no difference is left out."""
    chunks = sorted({case["chunk"] for case in cases if case["chunk"]})
    words = [cases[0]["dtype"]] + ["C " + "/".join(map(str, chunks))] * bool(chunks)
    for name, yes, no in (("causal", "causal", "bidirectional"), ("documents", "documents", "one document")):
        found = {case[name] for case in cases}
        words += [yes] * (found == {True}) + [no] * (found == {False})
    words += ["long rows"] * all(case["n_tokens"] >= LONG_ROW for case in cases)
    return ", ".join([*words, *["parts of rows"] * all(case["past"] for case in cases)])


def lines_of(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """What a reader is shown: a line for each program, those of a kernel side by side, cases alike in one line."""
    kernels = list(dict.fromkeys((row["kernel"], row["options"]) for row in rows))
    alike: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: kernels.index((row["kernel"], row["options"]))):
        program = tuple(value for name, value in row.items() if name in ("op", "dtype") or name not in CASE)
        alike.setdefault(program, []).append(row)
    lines = []
    for row, *others in alike.values():
        name = f"`{row['kernel']}`" + (f" ({row['options']})" if row["options"] else "")
        spilled = f"**{row['spilled']}**" if row["spilled"] else "0"
        lines.append([name, f"sm_{row['arch']}", row["tiles"], f"{row['warps']}, {row['stages']}",
                      str(row["registers"]), spilled, f"{row['shared'] / 1024:.3g}", str(row["tensor_cores"]),
                      f"{row['instructions']}, {row['in_loop']}, {row['special']}", case_text([row, *others])])
    return lines


def section(rows: Sequence[dict[str, Any]]) -> str:
    """The place in the log: what training uses, then the rest, folded."""
    parts = [f"Triton {triton.__version__}, {len(rows):,} programs. Registers and spilled bytes are a thread's, KiB of "
             "shared memory a program's. Of instructions: those for the tensor cores; all, those of the longest loop "
             "without another inside, and of these, or without a loop of all, those for special functions."]
    head = ["kernel", "for", "tiles", "warps, stages", "registers", "spilled", "KiB", "tensor cores",
            "instructions, in the loop, special", "of"]
    for op in OPS:
        mine = [row for row in rows if row["op"] == op]
        default = [row for row in mine if Case(**{name: row[name] for name in CASE}).default]
        rest = [row for row in mine if row not in default]
        parts += [f"**{op}**, as a training run has it:", markdown(head, lines_of(default))]
        parts += [folded(f"{op}, the rest", markdown(head, lines_of(rest)))] * bool(rest)
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="What every kernel takes of a GPU that need not be here.")
    parser.add_argument("--quick", choices=QUICK, help="only what a push compiles, or what usual runs do")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    parser.add_argument("--into", type=Path, help="write the table into this page")
    given = parser.parse_args()
    page = given.into.read_text(encoding="utf-8") if given.into else ""
    if given.into and not PLACE.search(page):
        sys.exit(f"error: no place for the table: {given.into}; add <!-- resources: begin -->, <!-- resources: end -->")
    with tempfile.TemporaryDirectory(prefix="lineartime-") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        rows = measure(given.quick)
    if given.json:
        given.json.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    text = section(rows)
    if given.into:
        given.into.write_text(PLACE.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page), encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
