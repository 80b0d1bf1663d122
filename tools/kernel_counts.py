"""What FLASH's layer moves and computes on a GPU, counted by hand from its kernels: for tools/kernel_times.py.

A `Launch` is one of a Triton kernel, a `Pass` one of cuBLAS, PyTorch or torch.compile. Bytes are those of bfloat16
under autocast, of causal rows of ROW tokens with documents. n: tokens of a call. A test compares the launches' programs
with those of the ops, and the bytes with docs/kernels.md.
"""

from typing import Literal, NamedTuple

import torch

from lineartime import ModelConfig
from lineartime.ops import gradients, mixed_chunk, norm
from lineartime.ops.cross_entropy import default_chunk_tokens
from lineartime.ops.dispatch import TileClass

BF16, S, ROW = torch.bfloat16, 128, 2048
"""S is `query_key_dim`."""
EXTRA_FORWARD, EXTRA_BACKWARD, EXTRA_COMPILED = 30, 22, 4
"""Operations of PyTorch on a few numbers beside a layer's kernels, which take a launch and little else: the documents
laid out; sums of partial gradients; and those that are left of the compiled reference's."""


class Launch(NamedTuple):
    """Counts are of all programs; waits and trips are those of one program."""

    kernel: str
    """And its options, as docs/tuning.md has them."""
    programs: int
    dram: float
    """Bytes of GPU memory, each counted once: programs that run side by side find others' in the cache."""
    cache: float
    """Bytes between the multiprocessors and the second-level cache."""
    flop: float = 0.0
    width: int = 128
    """Columns of a product."""
    waits: float = 0.0
    """Waits for GPU memory outside of the loop, one after another."""
    waits_in_loop: float = 0.0
    """The same inside: loads that are not copied ahead."""
    near: float = 0.0
    """Waits in a loop for the second-level cache, or for a sum over the threads."""
    trips: float = 0.0
    """Times round the loop."""
    ahead: bool = True
    """Whether the loop's copies are made ahead."""
    rest: float = 1.0
    """How often the instructions outside of the loop run."""
    busy: float = 1.0
    """Share of the programs that do not end at once."""
    round: int = 0


class Pass(NamedTuple):
    """Counts are per token."""

    bytes: float
    flop: float = 0.0
    chunked: bool = False
    """A matmul for each chunk, not one for all tokens."""


def attention(config: ModelConfig, n: int, kind: TileClass, of: Literal["out", "queries", "keys"]) -> list[Launch]:
    """`attend_queries`, forward or for gradients, or `differentiate_keys`: a launch for each round.

    Row tile m of a chunk has the tiles of the other side that causality leaves, `kept` of them in a round."""
    tiles = mixed_chunk.attention_tiles(BF16, True, of, kind)
    kernel = {"out": "attend_queries", "queries": "attend_queries (backward)", "keys": "differentiate_keys"}[of]
    c, e, rows, others = chunk_of(config), config.d_inner, tiles.rows, tiles.keys
    wanted = [c // others - m * rows // others if of == "keys" else -(-(m + 1) * rows // others)
              for m in range(c // rows)]
    launches = []
    for number in range(mixed_chunk.n_rounds(tiles, c, True)):
        here = [min(max(count - number * tiles.kept, 0), tiles.kept) for count in wanted]
        first, n_busy = number == 0, sum(count > 0 for count in here)
        mine, loaded, unique = n_busy * rows / c, sum(here) * others / c, max(here) * others / c
        # Rows of width E: the gate and the result; of a later round the result before; dout, or the keys' own v.
        wide = 2 + (not first) + (of == "queries" or (of == "keys" and first))
        # Heads: q or k; and in the first round those of the linear part, and their gradient.
        own = mine * (2 * e * wide + 2 * S * (1 + first * (1 if of == "out" else 2)))
        state = first * 2 * S * e / c
        # Backward, u and dout are loaded twice in the first round; then they are in the cache.
        again = of == "queries" and first
        scores, trips = sum(here) * rows * others / c, e / tiles.columns
        flop = 2 * scores * (S + e) + first * mine * 2 * S * e * (1 if of == "out" else 2)
        launches.append(Launch(
            kernel, n // rows, n * (own + unique * 2 * (S + e) + state),
            n * (own + loaded * 2 * (S + e) + state * len(here) + again * mine * 4 * e), n * flop, tiles.columns,
            waits=3 + sum(here) / n_busy, waits_in_loop=trips * ((not again) + (not first)), near=trips * again,
            trips=trips, busy=mine, round=number))
    return launches


def walk(config: ModelConfig, n: int, kind: TileClass, backward: bool) -> Launch:
    """`walk_states` in one level; a chunk begins with two waits: for its bounds, and for the first copies.

    Raises ValueError where the states are made in two levels."""
    c, e, tiles = chunk_of(config), config.d_inner, mixed_chunk.state_tiles(BF16, kind)
    n_tiles, n_chunks = e // tiles.columns, ROW // c
    if n_chunks > mixed_chunk.MANY_CHUNKS and n_tiles * n // ROW < mixed_chunk.FEW_PROGRAMS:
        raise ValueError(f"{n // ROW} rows of {n_chunks} chunks: states in two levels are not counted")
    wide = 2 * e * (3 if backward else 2) + 2 * S * e / c
    return Launch(f"walk_states ({'backward, ' * backward}whole)", n_tiles * n // ROW, n * (wide + 2 * S),
                  n * (wide + 2 * S * n_tiles), n * 2 * S * e, tiles.columns, waits=2, waits_in_loop=2 * n_chunks,
                  trips=ROW / tiles.keys, rest=n_chunks)


def forward(config: ModelConfig, n: int, kind: TileClass) -> list[Launch]:
    """The launches of `ops.gated_chunk_attention`."""
    heads = Launch("make_heads_kernel", n // gradients.BASE_TILE, n * 10 * S, n * 14 * S, waits=2)
    return [heads, walk(config, n, kind, False), *attention(config, n, kind, "out")]


def backward(config: ModelConfig, n: int, kind: TileClass) -> list[Launch]:
    """The launches of its backward pass, which has what forward kept."""
    c, e = chunk_of(config), config.d_inner
    (bm, bn, be, *_), (own, others, *_) = gradients.score_tile(BF16), gradients.head_tile(BF16)
    side = c // bm
    n_tiles = side * (side + 1) / 2  # of a chunk, of side^2: what causality leaves
    scores = n_tiles * bm * bn / c
    of_scores = Launch("differentiate_scores", n // c * side**2, n * (4 * S + 4 * e + 2 * scores),
                       n * (n_tiles * (bm + bn) * 2 * (S + e) / c + 2 * scores), n * 2 * scores * (S + e), bn,
                       waits=5, trips=(S + e) / be, busy=n_tiles / side**2)
    of_heads = [Launch(name, n // own, n * (2 * scores + 4 * S), n * (2 * scores + 2 * S * scores / own + 2 * S),
                       n * 2 * scores * S, S, waits=3, trips=scores / others)
                for name in ("differentiate_head (of queries)", "differentiate_head")]
    of_base = Launch("base_gradient_kernel", n // gradients.BASE_TILE, n * (12 * S + 32 * S / gradients.BASE_TILE),
                     n * 14 * S, waits=3)
    return [walk(config, n, kind, True), *attention(config, n, kind, "queries"), *attention(config, n, kind, "keys"),
            of_scores, *of_heads, of_base]


def norms(config: ModelConfig, n: int) -> list[Launch]:
    """The norm with the sum before it, forward and backward, of a float32 stream and branches of bfloat16."""
    d, rows = config.d_model, norm.tile_for(config.d_model)[0]
    each = -(-n // rows // norm.MAX_PROGRAMS)
    return [Launch("add_norm_rows (add, layer norm)", n // rows, n * 12 * d, n * 12 * d, waits=2, near=2),
            Launch("add_norm_rows_backward (add, two types, layer norm)", n // rows // each, n * 16 * d, n * 16 * d,
                   waits=1, waits_in_loop=each, near=2 * each, trips=each, ahead=False)]


# The reference's lists were compared with what TorchInductor of PyTorch 2.13 counts when it compiles the reference for
# a processor, at 110 M parameters: 63.4 KB a token forward and 85.7 backward; here 60.3 and 85.5. The sum of the two
# halves and the gate are two passes there and are taken as one here.
def reference_forward(config: ModelConfig) -> list[Pass]:
    """What torch.compile makes of the reference between a layer's two projections: matmuls in cuBLAS, and what is
    between two of them in one kernel."""
    c, e = chunk_of(config), config.d_inner
    state = 2 * S * e / c
    return [Pass(4 * e), Pass(6 * S), Pass(14 * S), Pass(4 * S),  # silu(v); heads from z; what counts of k_lin
            Pass(4 * S + 5 * c, 2 * S * c, True), Pass(4 * c),  # scores; weights
            Pass(2 * c + 4 * e, 2 * c * e, True),  # P v
            Pass(2 * S + 2 * e + state, 2 * S * e, True),  # the chunks' own states
            Pass(3 * state), Pass(4 * state), Pass(3 * state),  # their sums, in float32
            Pass(2 * S + state + 2 * e, 2 * S * e, True),  # q_lin h
            Pass(10 * e)]  # the sum of both halves, which is kept, and its gate


def reference_backward(config: ModelConfig) -> list[Pass]:
    """The same of its backward pass, for which the results of matmuls are kept."""
    c, e = chunk_of(config), config.d_inner
    state = 2 * S * e / c
    return [Pass(10 * e),  # du and do
            Pass(4 * e + 2 * c, 2 * c * e, True), Pass(2 * c + 4 * e, 2 * c * e, True),  # dP; P^T do
            Pass(10 * c), Pass(4 * c),  # dS; its sums for the bias
            Pass(2 * c + 4 * S, 2 * S * c, True), Pass(2 * c + 4 * S, 2 * S * c, True),  # dq; dk
            Pass(2 * e + state + 2 * S, 2 * S * e, True), Pass(2 * S + 2 * e + state, 2 * S * e, True),  # dq_lin; dh
            Pass(2 * state), Pass(2 * state), Pass(2 * state),  # sums of dh
            Pass(2 * S + state + 2 * e, 2 * S * e, True), Pass(2 * e + state + 2 * S, 2 * S * e, True),  # dv; dk_lin
            Pass(8 * e), *[Pass(20 * S)] * 4]  # dv through silu; dz, scales and offsets


def reference_norms(config: ModelConfig) -> list[Pass]:
    """The norm by torch.compile: the kernels' bytes, and in a pass of its own the sums for scale and offset."""
    return [Pass(12 * config.d_model), Pass(16 * config.d_model), Pass(6 * config.d_model)]


def projections(config: ModelConfig) -> list[Pass]:
    """A layer's two projections, the gradients of their inputs and those of their weights."""
    d, e = config.d_model, config.d_inner
    return [Pass(2 * (inputs + outputs), 2 * inputs * outputs) for inputs, outputs in ((d, 2 * e + S), (e, d))
            for _ in range(3)]


def biases(config: ModelConfig) -> list[Pass]:
    """The gradients of the projections' biases, which read both gradients again."""
    return [Pass(4 * config.d_inner + 2 * S), Pass(2 * config.d_model)]


def head_and_loss(config: ModelConfig) -> tuple[list[Pass], int]:
    """`linear_cross_entropy`, by chunks in PyTorch: the passes over a chunk, and its tokens."""
    d, v, chunk = config.d_model, config.vocab_size, default_chunk_tokens(config.vocab_size, torch.device("cuda"))
    product = Pass(2 * (d + v), 2 * d * v)
    # Logits; in float32; log p; p; sums for the bias; in bfloat16; two gradients; that of the weights added up.
    return [product, Pass(6 * v), Pass(8 * v), Pass(8 * v), Pass(4 * v), Pass(6 * v), product, product,
            Pass(10 * d * v / chunk)], chunk


def rest_of_step(config: ModelConfig, n: int, batch: int) -> list[Pass]:
    """Of a batch in micro-batches of n: the embedding; weights cast, gradients cast and added up; clipping, AdamW."""
    weights = config.n_layers * config.d_model * (3 * config.d_inner + S) + config.vocab_size * config.d_model
    return [Pass(24 * config.d_model), Pass(24 * weights / n), Pass(40 * weights / batch)]


def chunk_of(config: ModelConfig) -> int:
    assert config.chunk_size is not None
    return config.chunk_size
