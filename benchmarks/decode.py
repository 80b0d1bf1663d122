"""Time per generated token after contexts of different lengths."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks import Row, measure
from benchmarks.measure import Progress, Times, ignore
from lineartime.attention.combiner import RowCache
from lineartime.config import ModelConfig, to_dict
from lineartime.decoding.cache import ChunkState, DecodingState, KeyValueCache, larger
from lineartime.generation.cuda_graph import CapturedStep
from lineartime.generation.generate import decode_step, prefill
from lineartime.generation.onednn import packed_weights
from lineartime.info import decoding_bytes
from lineartime.model import LanguageModel
from lineartime.runtime import choose_settings, peak_bytes
from lineartime.settings import require

BLOCK_TOKENS = 256
"""Tokens of a timed block where a model has no chunks; else whole chunks, as closing one is part of the price."""
LIMITS = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest error of a decoded logit against a parallel forward in float32, over the largest logit."""
PIECES = 8
"""Turns that a block is decoded in, so that the cases share what the machine does to them."""
FEW = 8
"""Tokens before the first timed block."""


@dataclass
class DecodeCase:
    """One model after one context, and the times of its tokens, block by block."""

    label: str
    model: LanguageModel
    context: int
    how: str
    """"read" token by token as a user's would be, or "filled" with numbers that were never tokens."""
    state: DecodingState
    check: Row
    captured: CapturedStep | None = None
    times: Times = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.next_ids_B = torch.zeros_like(self.state.seq_lens_B)
        self.block_tokens = whole_chunks(self.model.config)

    def decode(self, n_tokens: int, times: Times) -> None:
        """Greedy tokens, one after the other; their times are added."""
        device = self.next_ids_B.device
        measure.wait(device)
        marks = [measure.mark(device)]
        for _ in range(n_tokens):
            logits_BV = (decode_step(self.model, self.next_ids_B, self.state) if self.captured is None
                         else self.captured(self.next_ids_B))
            self.next_ids_B = logits_BV.argmax(-1)
            marks.append(measure.mark(device))
        measure.wait(device)
        measure.add_times(times, marks)

    def time_piece(self, piece: int) -> None:
        """One of a block's pieces. A token of another state comes before, so that the weights are where they are while
        a text is decoded, whatever the case before has done to the processor's memory."""
        decode_step(self.model, self.next_ids_B, self.model.decoding_state(len(self.next_ids_B)))
        self.decode(self.block_tokens * (piece + 1) // PIECES - self.block_tokens * piece // PIECES, self.times)

    def of_blocks(self, clock: str, function: Callable[[Sequence[float]], float]) -> list[float]:
        """A function of the times of each block's tokens."""
        times, n = self.times[clock], self.block_tokens
        return [function(times[i : i + n]) for i in range(0, len(times), n)]


def whole_chunks(config: ModelConfig) -> int:
    """Tokens of a timed block."""
    c = config.chunk_size or 1
    return -(-BLOCK_TOKENS // c) * c


def benchmark_decode(configs: Mapping[str, ModelConfig], contexts: Sequence[int], *, batch_size: int = 1,
                     precisions: Sequence[str] = ("bfloat16",), quadratic_up_to: int = 32768, read_up_to: int = 2048,
                     repeats: int = 2, threads: int = 1, device: str = "cpu", capture: bool = False, seed: int = 0,
                     progress: Progress = ignore) -> list[Row]:
    """Time per generated token of `batch_size` rows after contexts of so many tokens; a row per model, type, context.

    Blocks of greedy tokens are timed, `repeats` of each case, all in turns: whole chunks, so that each block closes as
    many as a long text does per token. Weights are random, which changes no time. A context up to `read_up_to` is read
    and, in a case of its own, filled: what a state holds does not matter to its time, only how much. Longer ones are
    only filled. quadratic_up_to: models whose state grows are not measured beyond it. capture: steps are CUDA graphs.

    Raises UsageError, and NumericsError where a model's logits are not those of a parallel forward."""
    measure.require_measurable(precisions, contexts=min(contexts, default=0), repeats=repeats, threads=threads,
                               batch=batch_size)
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads)
        settings = choose_settings(torch.device(device))
        cases: list[DecodeCase] = []
        for label, config in configs.items():
            longest = quadratic_up_to if decoding_bytes(config).per_token else max(contexts)
            mine = sorted(n for n in set(contexts) if n <= longest)
            for precision in precisions if mine else ():
                torch.manual_seed(seed)
                model = LanguageModel(config).to(device).eval()
                model.check_length(max(mine) + FEW + repeats * whole_chunks(config))
                ids_1T, expected_NV = reference_logits(model)
                model.to(getattr(torch, precision))
                stack.enter_context(packed_weights(model))
                check = check_decoding(model, ids_1T, expected_NV, precision, label)
                for n in mine:
                    room = n + FEW + repeats * whole_chunks(config)
                    made = {"filled": filled_state(model, n, batch_size, room)}
                    if n <= read_up_to:
                        made["read"] = read_state(model, n, batch_size, room, seed)
                    for how, state in made.items():
                        captured = CapturedStep(model, state) if capture else None
                        cases.append(DecodeCase(label, model, n, how, state, check, captured))
                        cases[-1].decode(FEW, {})
                        progress(f"{label}, {precision}: {n:,} tokens {how}")
        require(len(cases) > 0, "nothing to measure", f"{', '.join(map(str, contexts))} tokens",
                "raise --quadratic-up-to for models whose cache grows")
        for repeat in range(repeats):
            progress(f"block {repeat + 1} of {repeats}")
            for piece, case in measure.in_turn(cases, range(PIECES)):
                case.time_piece(piece)
    shared = {"repeats": repeats, "threads": threads, "settings": settings, **measure.facts_of_run()}
    return [row_of(case) | shared for case in cases]


@torch.inference_mode()
def reference_logits(model: LanguageModel) -> tuple[Tensor, Tensor]:
    """A row that ends two tokens into its third block, and the parallel form's logits after its last four."""
    c = model.config.chunk_size or 16
    generator = torch.Generator().manual_seed(1)
    n_tokens = min(2 * c + 2, model.config.max_len or 2 * c + 2)
    ids_1T = torch.randint(1, model.config.vocab_size, (1, n_tokens), generator=generator).to(model.embed.weight.device)
    return ids_1T, model.logits(model.hidden(ids_1T)[0, -4:])


@torch.inference_mode()
def check_decoding(model: LanguageModel, ids_1T: Tensor, expected_NV: Tensor, precision: str, label: str) -> Row:
    """Decode a row's last four tokens, past the end of a chunk. Raises NumericsError where the logits are others."""
    _, state = prefill(model, [ids_1T[0, :-4].tolist()])
    decoded_NV = torch.cat([decode_step(model, id_1, state) for id_1 in ids_1T[:, -4:].unbind(1)])
    error = float((decoded_NV.float() - expected_NV).abs().max() / expected_NV.abs().max())
    return measure.check({"logits": error}, LIMITS[precision], "logits of decode steps against a parallel forward in "
                         "float32, over the largest", label=f"{label} in {precision}, ",
                         otherwise="decoded logits differ from the parallel form's")


def read_state(model: LanguageModel, n_tokens: int, batch_size: int, room: int, seed: int = 0) -> DecodingState:
    """The state after `n_tokens` random tokens in each row."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(model.config.vocab_size, (batch_size, n_tokens), generator=generator).tolist()
    _, state = prefill(model, prompts)
    state.reserve(room)
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
                tensor.uniform_(1 / 16, 3 / 16)
        if isinstance(cache, ChunkState):
            cache.kv_BSE *= n_tokens
    return state


def row_of(case: DecodeCase) -> Row:
    """What a case measured, without what it shares with others."""
    model, weight, batch_size = case.model, case.model.embed.weight, len(case.next_ids_B)
    times = measure.spreads({clock: case.of_blocks(clock, statistics.fmean) for clock in case.times}, batch_size)
    slowest = case.of_blocks(f"{times['clock']}_ms", max)
    variant = "eager" if case.captured is None else "captured"
    return {"benchmark": "decode", "cell": None, "model": case.label, "variant": variant,
            "attention": "fused" if model.config.attn_kernel == "softmax" else None,
            "label": case.label if variant == "eager" else f"{case.label}:{variant}",
            "config": to_dict(model.config), "n_parameters": sum(p.numel() for p in model.parameters()),
            "context_tokens": case.context, "context": case.how, "batch_size": batch_size,
            "dtype": str(weight.dtype).removeprefix("torch."), "device": weight.device.type, "unit": "token",
            "block_tokens": case.block_tokens, "warm_up": FEW, **times, "slowest_token_ms": measure.spread(slowest),
            "state_bytes": decoding_bytes(model.config, weight.dtype).at(case.context),
            "allocated_state_bytes": case.state.n_bytes // batch_size, "peak_mib": peak_bytes(weight.device) / 2**20,
            "check": case.check}
