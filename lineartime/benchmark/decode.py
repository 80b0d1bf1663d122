"""Time per generated token after contexts of different lengths."""

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lineartime.attention.combiner import RowCache
from lineartime.benchmark import Row, measure
from lineartime.benchmark.measure import Progress, Stopwatch, ignore
from lineartime.config import ModelConfig, to_dict
from lineartime.decoding.cache import ChunkState, DecodingState, KeyValueCache, larger
from lineartime.errors import NumericsError
from lineartime.generation.cuda_graph import CapturedStep
from lineartime.generation.generate import PIECE_TOKENS, decode_step
from lineartime.generation.onednn import packed_weights
from lineartime.info import decoding_bytes, mib
from lineartime.model import LanguageModel
from lineartime.runtime import choose_settings, peak_rss_bytes
from lineartime.settings import require

CONTEXTS = (2048, 8192, 32768, 131072)
BLOCK_TOKENS = 256
"""Tokens of a timed block where a model has no chunks; else whole chunks, as closing one is part of the price."""
DTYPES = ("float32", "bfloat16")
LIMITS = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest error of a decoded logit against a parallel forward in float32, over the largest logit."""
PIECES = 8
"""Turns that a block is decoded in, so that the cases share what the machine does to them."""
FEW = 8
"""Tokens that choose a type, and tokens before the first timed block."""


@dataclass
class DecodeCase:
    """One model after one context: its rows, and the times of its blocks by clock."""

    label: str
    model: LanguageModel
    context: int
    how: str
    """"read" token by token as a user's would be, or "filled" with numbers that were never tokens."""
    state: DecodingState
    dtype_ms: dict[str, float]
    check: Row
    captured: CapturedStep | None = None
    token_ms: dict[str, list[float]] = field(default_factory=dict)
    """By clock: of every timed token, block by block."""

    def __post_init__(self) -> None:
        self.next_ids_B = torch.zeros_like(self.state.seq_lens_B)
        self.block_tokens = whole_chunks(self.model.config)

    def decode(self, n_tokens: int) -> Stopwatch:
        """Greedy tokens, one after the other: the times of each."""
        watch = Stopwatch(self.next_ids_B.device)
        watch.wait()
        marks = [watch.mark()]
        for _ in range(n_tokens):
            logits_BV = (decode_step(self.model, self.next_ids_B, self.state) if self.captured is None
                         else self.captured(self.next_ids_B))
            self.next_ids_B = logits_BV.argmax(-1)
            marks.append(watch.mark())
        watch.add(marks)
        return watch

    def time_piece(self, piece: int) -> None:
        """One of a block's pieces. A token of another state comes before, so that the weights are where they are while
        a text is decoded, whatever the case before has done to the processor's memory."""
        decode_step(self.model, self.next_ids_B, self.model.decoding_state(len(self.next_ids_B)))
        n_tokens = self.block_tokens * (piece + 1) // PIECES - self.block_tokens * piece // PIECES
        for clock, times in self.decode(n_tokens).times.items():
            self.token_ms.setdefault(clock, []).extend(times)

    def of_blocks(self, clock: str, function: Callable[[Sequence[float]], float]) -> list[float]:
        """A function of the times of each block's tokens."""
        times, n = self.token_ms[clock], self.block_tokens
        return [function(times[i : i + n]) for i in range(0, len(times), n)]


def whole_chunks(config: ModelConfig) -> int:
    """Tokens of a timed block."""
    c = config.chunk_size or 1
    return -(-BLOCK_TOKENS // c) * c


def benchmark_decode(configs: Mapping[str, ModelConfig], contexts: Sequence[int] = CONTEXTS, *, batch_size: int = 1,
                     dtype: str = "fastest", quadratic_up_to: int = 32768, read_up_to: int = 2048, repeats: int = 2,
                     threads: int = 1, device: str = "cpu", capture: bool = False, seed: int = 0,
                     progress: Progress = ignore) -> list[Row]:
    """Time per generated token of `batch_size` rows after contexts of so many tokens; a row per model and context.

    Blocks of greedy tokens are timed, `repeats` of each case, all in turns: whole chunks, so that each block closes as
    many as a long text does per token. Weights are random, which changes no time. A context up to `read_up_to` is read
    and, in a case of its own, filled: what a state holds does not matter to its time, only how much. Longer ones are
    only filled. dtype: "float32", "bfloat16", or "fastest": whichever is, at the model's longest context.
    quadratic_up_to: models whose state grows are not measured beyond it. capture: steps are CUDA graphs.

    A model's logits are compared with those of a parallel forward before it is timed. Raises UsageError, and
    NumericsError where the logits differ."""
    measure.require_positive(contexts=min(contexts, default=0), repeats=repeats, threads=threads, batch=batch_size)
    require(dtype in ("fastest", *DTYPES), "wrong value", f"precision = {dtype}",
            "it takes fastest, float32 or bfloat16")
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with ExitStack() as stack:
            settings = choose_settings(torch.device(device))
            cases: list[DecodeCase] = []
            for label, config in configs.items():
                longest = quadratic_up_to if decoding_bytes(config).per_token else max(contexts)
                mine = sorted(n for n in set(contexts) if n <= longest)
                if mine:
                    torch.manual_seed(seed)
                    model = LanguageModel(config).to(device).eval()
                    cases += cases_of(label, model, mine, batch_size, dtype, read_up_to, repeats, capture, stack,
                                      progress)
            for repeat in range(repeats):
                progress(f"block {repeat + 1} of {repeats}")
                for piece, case in measure.in_turn(cases, range(PIECES)):
                    case.time_piece(piece)
    finally:
        torch.set_num_threads(threads_before)
    shared = {"repeats": repeats, "threads": threads, "settings": settings, **measure.facts_of_run()}
    return [row_of(case) | shared for case in cases]


def cases_of(label: str, model: LanguageModel, contexts: Sequence[int], batch_size: int, dtype: str, read_up_to: int,
             repeats: int, capture: bool, stack: ExitStack, progress: Progress) -> list[DecodeCase]:
    """A model's cases, ready to be timed: type chosen, output checked, contexts there, a few tokens decoded."""
    room = max(contexts) + FEW + repeats * whole_chunks(model.config)
    model.check_length(room)
    ids_1T, expected_NV = reference_logits(model)
    dtype_ms: dict[str, float] = {}
    for candidate in DTYPES if dtype == "fastest" else ():
        tried = copy.deepcopy(model).to(getattr(torch, candidate))
        with packed_weights(tried):
            state = filled_state(tried, max(contexts), batch_size, room)
            case = DecodeCase(label, tried, max(contexts), "filled", state, {}, {})
            case.decode(2)
            dtype_ms[candidate] = statistics.median(case.decode(FEW).compared())
        progress(f"{label}: {candidate} takes {dtype_ms[candidate]:.1f} ms a token after {max(contexts):,}")
    chosen = min(dtype_ms, key=dtype_ms.__getitem__) if dtype_ms else dtype
    model.to(getattr(torch, chosen))
    stack.enter_context(packed_weights(model))
    check = check_decoding(model, ids_1T, expected_NV, chosen, label)
    cases = []
    for n in contexts:
        room = n + FEW + repeats * whole_chunks(model.config)
        made = {"filled": filled_state(model, n, batch_size, room)}
        if n <= read_up_to:
            made["read"] = read_state(model, n, batch_size, room)
        for how, state in made.items():
            captured = CapturedStep(model, state) if capture else None
            case = DecodeCase(label, model, n, how, state, dtype_ms, check, captured)
            case.decode(FEW)
            cases.append(case)
            progress(f"{label}: {n:,} tokens {how}")
    return cases


@torch.inference_mode()
def reference_logits(model: LanguageModel) -> tuple[Tensor, Tensor]:
    """A row that ends two tokens into its third block, and the parallel form's logits after its last four."""
    c = model.config.chunk_size or 16
    generator = torch.Generator().manual_seed(1)
    n_tokens = min(2 * c + 2, model.config.max_len or 2 * c + 2)
    ids_1T = torch.randint(1, model.config.vocab_size, (1, n_tokens), generator=generator).to(model.embed.weight.device)
    return ids_1T, model.logits(model.hidden(ids_1T)[0, -4:])


@torch.inference_mode()
def check_decoding(model: LanguageModel, ids_1T: Tensor, expected_NV: Tensor, dtype: str, label: str) -> Row:
    """Decode a row's last four tokens, past the end of a chunk. Raises NumericsError where the logits are others."""
    state = model.decoding_state(1)
    model.extend(ids_1T[:, :-4], torch.tensor([ids_1T.shape[1] - 4], device=ids_1T.device), state)
    decoded_NV = torch.cat([decode_step(model, id_1, state) for id_1 in ids_1T[:, -4:].unbind(1)])
    error = float((decoded_NV.float() - expected_NV).abs().max() / expected_NV.abs().max())
    if not error <= LIMITS[dtype]:
        raise NumericsError("decoded logits differ from the parallel form's", f"{label} in {dtype}",
                            f"by {error:.1e} of the largest, {LIMITS[dtype]:.0e} is allowed")
    return {"what": "logits of decode steps against a parallel forward in float32, over the largest", "error": error,
            "limit": LIMITS[dtype]}


@torch.inference_mode()
def read_state(model: LanguageModel, n_tokens: int, batch_size: int, room: int, seed: int = 0) -> DecodingState:
    """The state after `n_tokens` random tokens in each row, read piece by piece."""
    device, generator = model.embed.weight.device, torch.Generator().manual_seed(seed)
    state = model.decoding_state(batch_size)
    state.reserve(room)
    ids_BT = torch.randint(model.config.vocab_size, (batch_size, n_tokens), generator=generator).to(device)
    if model.config.end_of_document is not None:
        ids_BT[ids_BT == model.config.end_of_document] += 1 if model.config.end_of_document == 0 else -1
    for ids_BN in ids_BT.split(PIECE_TOKENS, dim=1):
        model.extend(ids_BN, torch.full((batch_size,), ids_BN.shape[1], device=device), state)
    return state


@torch.inference_mode()
def filled_state(model: LanguageModel, n_tokens: int, batch_size: int, room: int) -> DecodingState:
    """A state of the shape and type that `n_tokens` tokens in each row leave, with random numbers in it."""
    state, c = model.decoding_state(batch_size), model.config.chunk_size or 1
    state.reserve(room)
    state.seq_lens_B.fill_(n_tokens)
    for cache in state.caches:
        kept = n_tokens if isinstance(cache, KeyValueCache) else n_tokens // c
        if isinstance(cache, RowCache):
            cache.n_full_B.fill_(kept)
            cache.n_open_B.fill_(n_tokens % c)
        for name, tensor in cache.tensors().items():
            if name in cache.growing:
                tensor = larger(tensor, kept)
                setattr(cache, name, tensor)
                tensor = tensor[:, :kept]
            if tensor.is_floating_point():
                fill(tensor)
        if isinstance(cache, ChunkState):
            cache.kv_BSE *= n_tokens
    return state


def fill(x_BL: Tensor) -> None:
    """Small positive random numbers, drawn for some of a long tensor and repeated."""
    piece = 1024
    drawn = torch.rand_like(x_BL[:, :piece]) / 8 + 1 / 16
    for start in range(0, x_BL.shape[1], piece):
        x_BL[:, start : start + piece] = drawn[:, : x_BL.shape[1] - start]


def row_of(case: DecodeCase) -> Row:
    model, weight, batch_size = case.model, case.model.embed.weight, len(case.next_ids_B)
    times = measure.spreads({clock: case.of_blocks(clock, statistics.fmean) for clock in case.token_ms})
    slowest = case.of_blocks(f"{times['clock']}_ms", max)
    variant = "eager" if case.captured is None else "captured"
    return {"benchmark": "decode", "cell": None, "model": case.label, "variant": variant,
            "attention": "fused" if model.config.attn_kernel == "softmax" else None,
            "label": case.label if variant == "eager" else f"{case.label}:{variant}",
            "config": to_dict(model.config), "n_parameters": sum(p.numel() for p in model.parameters()),
            "context_tokens": case.context, "context": case.how, "batch_size": batch_size,
            "dtype": str(weight.dtype).removeprefix("torch."), "dtype_ms": case.dtype_ms, "device": weight.device.type,
            "unit": "token", "block_tokens": case.block_tokens, "warm_up": FEW, **times,
            "slowest_token_ms": measure.spread(slowest),
            "tokens_per_s": measure.tokens_per_s(times, batch_size),
            "state_bytes": decoding_bytes(model.config, weight.dtype).at(case.context),
            "allocated_state_bytes": case.state.n_bytes // batch_size, "peak_mib": peak_rss_bytes() / 2**20,
            "check": case.check}


def filled_ms(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """By model and context: the median time per token after contexts that were filled."""
    medians: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["context"] == "filled":
            medians.setdefault(row["label"], {})[row["context_tokens"]] = measure.compared_ms(row)["median"]
    return medians


def flatness(rows: Sequence[Row]) -> dict[str, float]:
    """By model: the largest over the smallest median time per token of all contexts that were filled, less 1."""
    return {label: max(ms.values()) / min(ms.values()) - 1 for label, ms in filled_ms(rows).items()}


def speedups(rows: Sequence[Row]) -> list[tuple[str, str, int, float]]:
    """How many times as long as the first model's token each other's takes: the two, the context, the ratio."""
    (first, base), *others = filled_ms(rows).items()
    return [(first, label, context, ms[context] / base[context])
            for label, ms in others for context in ms if context in base]


def print_decode(rows: Sequence[Row]) -> None:
    """Print `benchmark_decode`'s rows as a table, how flat each model's are, and how they compare."""
    first = rows[0]
    measure.print_runs(f"Milliseconds per generated token, batch of {first['batch_size']}", {
        "model": "{label}", "type": "{dtype}", "context": "{context_tokens:,}", "": "{context}",
        "median": "{ms[median]:.2f}", "slowest": "{slowest_token_ms[max]:.2f}", "state a row": "{state}"},
        [row | {"state": mib(row["state_bytes"])} for row in rows])
    print(f"Averages over whole chunks ({first['block_tokens']} tokens), and the slowest token.\n"
          "A filled context was never read: its state holds random numbers.")
    for label, flat in flatness(rows).items():
        mine = [row["context_tokens"] for row in rows if row["label"] == label]
        print(f"{label}: medians from {min(mine):,} to {max(mine):,} tokens lie within {flat:.1%}")
    for one, other, context, ratio in speedups(rows):
        print(f"{one} over {other} at {context:,}: {ratio:.2f}")
