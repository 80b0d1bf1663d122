"""Time per generated token after contexts of different lengths."""

import itertools
import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks import Row, llama, measure, peers
from benchmarks.measure import Case, Setup, Times
from lineartime.base.settings import require
from lineartime.config import ModelConfig, to_dict
from lineartime.model.attention.combiner import RowCache
from lineartime.model.decoding.cache import ChunkState, KeyValueCache
from lineartime.model.decoding.state import DecodingState
from lineartime.model.language_model import LanguageModel, number_of_parameters
from lineartime.training.runtime import peak_bytes
from lineartime.use.info import decoding_bytes
from lineartime.weights.generation.generate import decode_step
from lineartime.weights.generation.step import DecodeStep

BLOCK_TOKENS = 256  # least tokens of a timed block, which has whole chunks: closing one has a price
PEER_TOKENS = 32  # in llama.cpp, which closes no chunks
FEW = 8  # tokens before the first timed block
Step = Callable[[Tensor], Tensor]  # appends a token to every row; the logits of the next


def whole_chunks(config: ModelConfig) -> int:
    c = config.chunk_size or 1
    return -(-BLOCK_TOKENS // c) * c


def benchmark_decode(configs: Mapping[str, ModelConfig], contexts: Sequence[int], setup: Setup, *, batch_size: int = 1,
                     precisions: Sequence[str] = ("bfloat16",), quadratic_up_to: int = 32768,
                     compiled: bool = False) -> list[Row]:
    """Time per generated token of `batch_size` rows after contexts of so many tokens; a row per
    model, type, context. Blocks of greedy tokens are timed in turns: whole chunks, so that each
    block closes as many as a long text does per token. Weights and the state are random numbers, on
    which the time does not depend. quadratic_up_to: models whose state grows are not measured
    beyond it. compiled: each step is one graph of `torch.compile`, on a GPU a CUDA graph."""
    measure.require_measurable([each for each in precisions if each != llama.QUANTIZED or llama.NAME not in configs],
                               contexts=min(contexts, default=0), repeats=setup.repeats, batch=batch_size)
    if llama.NAME in configs:
        llama.library()
    cases = []
    for label, config in configs.items():
        is_peer = label == llama.NAME
        in_graph = compiled and not is_peer
        longest = quadratic_up_to if is_peer or decoding_bytes(config).per_token else max(contexts)
        types = [each for each in precisions if each != llama.QUANTIZED or label == llama.NAME]
        for precision, n_tokens in itertools.product(types, sorted({n for n in contexts if n <= longest})):
            row = {"model": label, "variant": "compiled" if in_graph else "eager",
                   "label": f"{label}:compiled" if in_graph else label,
                   "attention": "fused" if config.attn_kernel == "softmax" else None,
                   "config": None if is_peer else to_dict(config), **peers.about(label),
                   "n_parameters": number_of_parameters(config), "context_tokens": n_tokens, "context": "filled",
                   "batch_size": batch_size, "dtype": precision, "unit": "token", "block_tokens": whole_chunks(config)}
            if not is_peer:
                row["state_bytes"] = batch_size * decoding_bytes(config, getattr(torch, precision)).at(n_tokens)
            cases.append(Case(decoded_tokens, {
                "label": label, "config": to_dict(config), "n_tokens": n_tokens, "batch_size": batch_size,
                "precision": precision, "repeats": setup.repeats, "compiled": compiled, "place": setup.place},
                row, batch_size))
    require(len(cases) > 0, "nothing to measure", f"{', '.join(map(str, contexts))} tokens",
            "raise --quadratic-up-to for models whose cache grows")
    return measure.side_by_side(cases, "decode", setup, FEW, hold=True)


def decoded_tokens(label: str, config: Row, n_tokens: int, batch_size: int, precision: str, repeats: int,
                   compiled: bool, place: Row) -> Generator[Row, Row, None]:
    """The job of a case: decodes a block whenever it is asked, or a few tokens untimed."""
    on, settings, _ = measure.set_up(**place)
    fields, block_tokens = ModelConfig(**config), PEER_TOKENS
    if label == llama.NAME:
        step, facts = llama.steps(fields, precision, n_tokens, batch_size, 2 * FEW + repeats * (block_tokens + 4))
        other = lambda ids_B: [step(ids_B) for _ in range(4)][-1]  # noqa: E731  # it has no other state
    else:
        model = LanguageModel(fields).to(on, getattr(torch, precision)).eval()
        facts, block_tokens = {}, whole_chunks(fields)
        room = n_tokens + FEW + repeats * block_tokens
        model.check_length(room)
        state = filled_state(model, n_tokens, batch_size, room)
        step = compiled_step(model, state, room) if compiled else partial(decode_step, model, state=state)
        other = lambda ids_B: decode_step(model, ids_B, model.decoding_state(batch_size))  # noqa: E731
    answer: Row = {"settings": settings, "block_tokens": block_tokens, **facts}
    ids_B, times, slowest = torch.zeros(batch_size, dtype=torch.long, device=on), Times(), []
    while True:
        order = yield answer
        # First a token of another state: the weights are then where they are while a text is
        # decoded, whatever other cases have done to the processor's caches.
        other(ids_B)
        measure.wait(on)
        marks = [measure.mark(on)]
        for _ in range(block_tokens if order["timed"] else FEW):
            ids_B = step(ids_B).argmax(-1)
            marks.append(measure.mark(on))
        measure.wait(on)
        if order["timed"]:
            block = Times()
            measure.add_times(block, marks)
            for clock, ms in block.items():  # a row's times are means of blocks
                times.setdefault(clock, []).append(statistics.fmean(ms))
            slowest.append(max(block["gpu_ms" if "gpu_ms" in block else "cpu_ms"]))
            answer = {"times": times, "slowest_token_ms": measure.spread(slowest),
                      "peak_mib": peak_bytes(on) / 2**20}


def compiled_step(model: LanguageModel, state: DecodingState, room: int) -> Step:
    """The step as one graph, which writes the state in place; a CUDA graph is told so."""
    graph = DecodeStep(model, room if any(cache.growing for cache in state.caches) else None)
    run, tensors = torch.compile(graph, mode="reduce-overhead"), graph.to_tensors(state)
    for tensor in tensors.values():
        torch._dynamo.mark_static_address(tensor)
    return torch.inference_mode()(lambda ids_B: run(ids_B, tensors)[0])


@torch.inference_mode()
def filled_state(model: LanguageModel, n_tokens: int, batch_size: int, room: int) -> DecodingState:
    """A state as `n_tokens` tokens in each row leave it, but with random numbers."""
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
                tensor = tensor[:, :kept]
            if tensor.is_floating_point():
                tensor.uniform_(1 / 16, 3 / 16)
        if isinstance(cache, ChunkState):
            cache.kv_BSE *= n_tokens
    return state
