"""A FLASH as one ONNX graph: any number of next tokens of rows, and their state, to logits and the
new state. The equations are those of `model/gau.py`; masks say which keys a token sees, and of a
long call `TOGETHER` tokens are read at a time. Layer 0 has this state, in float32:

| tensor | shape | its rows |
|---|---|---|
| `past_conv.0` | `[B, R, 2 S + 1]` | keys, gates of the open chunk; none; counters; last z |
| `past_recurrent.0` | `[B, S + R, E]` | sum of k v of closed chunks, values of the open one |

`present_conv.0` and `present_recurrent.0` are the new state. A row without a token has zeros. A
chunk is closed when the next one begins. An id outside the vocabulary is padding, at any place: it
is written to the row behind the open chunk."""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from onnx import ModelProto, helper
from torch import Tensor

from lineartime.base.settings import require
from lineartime.config import ModelConfig
from lineartime.model.gau import GatedAttentionUnit
from lineartime.model.language_model import LanguageModel
from lineartime.model.layers import ScaledSin, ScaleNorm
from lineartime.ops.reference import frequencies
from lineartime.weights.onnx_nodes import BOOL, DOUBLE, FLOAT, INT64, Graph, Value

DIGIT = 1 << 20  # a counter is two numbers that float32 holds: how often it has this, and the rest
TOGETHER = 128  # tokens
HIDDEN = -1e30  # added to the score of a key that is not seen
BLOCK = 32  # weights that share a scale in 8 bits
LARGEST = 2**31 - 2**24  # bytes of weights: a file of ONNX is smaller than 2 GB


def read_tokens(g: Graph, ids_BN: Any, conv: Any, config: ModelConfig) -> SimpleNamespace:
    """What all layers share of the new tokens: ids, positions, documents, chunks. A row's tokens
    come first, its padding behind them. conv: of layer 0, for its counters."""
    t, c, is_own, shape = SimpleNamespace(), config.chunk_size or 0, config.document_grid == "own", g.Shape(ids_BN)
    t.n_rows, t.n_new = shape[:1,], shape[1:,]
    t.halves, index_BN = g.Concat(t.n_new, t.n_new, axis=0), g.Expand(arange(g, t.n_new), shape)
    is_real_BN = (ids_BN >= 0) & (ids_BN < config.vocab_size)
    t.rank_BN = g.Max(g.CumSum(is_real_BN.to(INT64), 1) - 1, 0)
    t.n_real_B1 = g.ReduceSum(is_real_BN.to(INT64), [1])
    t.ids_BN = placed(g, ids_BN, g.Where(is_real_BN, t.rank_BN, t.n_new), t.n_rows, t.n_new)
    t.valid_BN = index_BN < t.n_real_B1
    # The row's tokens so far, and where its document began. Document 0 goes on from the state.
    digits = g.Split(g.Squeeze(conv[:, c + 1 : c + 2, :4], [1]).to(INT64), n=4, axis=1, num_outputs=4)
    t.n_B1, t.start_B1 = digits[0] * DIGIT + digits[1], digits[2] * DIGIT + digits[3]
    begins_BN = t.valid_BN & (t.ids_BN == (-1 if config.end_of_document is None else config.end_of_document))
    t.document_BN = g.CumSum(begins_BN.to(INT64), 1)
    first_BN = placed(g, index_BN, g.Where(begins_BN, t.document_BN, t.n_new + 1), t.n_rows, t.n_new + 1)
    t.place_BN = index_BN + t.n_B1  # in the row
    begin_BN = g.Where(t.document_BN == 0, t.start_B1, g.GatherElements(first_BN, t.document_BN, axis=1) + t.n_B1)
    t.age_BN = t.place_BN - begin_BN
    t.position_BN = t.age_BN if is_own else t.place_BN
    slot_BN = t.position_BN % c
    t.closed_BN = g.Max(t.age_BN - slot_BN, 0)  # tokens of its document in closed chunks
    # A chunk's number is the place where it begins. The state's open one may be full, or empty.
    t.chunk_BN, last_B1 = t.place_BN - slot_BN, g.Max(t.n_B1 - 1, 0)
    t.open_B1 = last_B1 - (last_B1 - t.start_B1 if is_own else last_B1) % c

    def last(x_BN: Any, before_B1: Any) -> Any:
        return g.Where(t.n_real_B1 > 0, g.GatherElements(x_BN, g.Max(t.n_real_B1 - 1, 0), axis=1), before_B1)

    t.now = last(t.document_BN, t.n_B1 * 0), last(t.chunk_BN, t.open_B1)
    t.write_BN = g.Where(t.valid_BN & (t.chunk_BN == t.now[1]), slot_BN, c)
    t.counters_B14 = g.Concat(*(part for x_B1 in (t.n_B1 + t.n_real_B1, last(begin_BN, t.start_B1))
                                for part in (x_B1 / DIGIT, x_B1 % DIGIT)), axis=1)[:, None]
    return t


def see_keys(g: Graph, t: SimpleNamespace, config: ModelConfig) -> None:
    """Adds to t which keys each token sees, of the rows of `conv` and of the call, and what the
    chunk that is open behind the call has added to the sum."""
    c, place_BR = config.chunk_size or 0, t.open_B1 + np.arange(n_rows(config))[None]
    held_BR, has_sum_B1 = (place_BR < t.n_B1) & (place_BR >= t.start_B1), t.open_B1 > t.start_B1

    def closed(document_BM: Any, chunk_BM: Any) -> tuple[Any, ...]:
        """Which keys are of chunks closed before a chunk of a document, and whether the sum is."""
        is_old_BM1, chunk_BM1 = (document_BM == 0)[:, :, None], chunk_BM[:, :, None]
        of_call_BMN = (document_BM[:, :, None] == t.document_BN[:, None]) & t.valid_BN[:, None]
        return tuple(each.to(FLOAT) for each in (
            is_old_BM1 & held_BR[:, None] & (chunk_BM1 > t.open_B1[:, :, None]),
            of_call_BMN & (chunk_BM1 > t.chunk_BN[:, None]), is_old_BM1 & has_sum_B1[:, None]))

    # Keys of its own chunk: where in the position bias they are, or C for one that is not seen.
    is_open_BN1 = ((t.document_BN == 0) & (t.chunk_BN == t.open_B1))[:, :, None]
    same_BNN = ((t.document_BN[:, :, None] == t.document_BN[:, None]) & t.valid_BN[:, None]
                & (t.chunk_BN[:, :, None] == t.chunk_BN[:, None]))
    distances = place_BR[:, None] - t.place_BN[:, :, None], t.place_BN[:, None] - t.place_BN[:, :, None]
    t.distance = [g.Where(seen & (distance <= 0), g.Max(distance, 1 - c) + (c - 1), c)
                  for seen, distance in zip((is_open_BN1 & held_BR[:, None], same_BNN), distances, strict=True)]
    t.closed = closed(t.document_BN, t.chunk_BN)
    adds = closed(*t.now)
    t.both = [g.Concat(*each, axis=1) for each in zip(adds, t.closed, strict=True)]
    has = g.ReduceMax(((t.now[1] > t.open_B1) | (t.now[0] > 0)).to(INT64), keepdims=0)[None,]
    t.has_R, t.has_S, t.keeps_B11 = has * n_rows(config), has * config.query_key_dim, adds[2]
    t.adds_BR1, t.adds_BN1 = (g.Transpose(each, perm=[0, 2, 1]) for each in adds[:2])
    t.adds_BR1 = t.adds_BR1[:, : t.has_R]


def n_rows(config: ModelConfig) -> int:
    """R of `past_conv`."""
    return (config.chunk_size or 0) + 1 + max(config.key_conv, 1)


def arange(g: Graph, n: Any) -> Any:
    """0, 1, ..., n - 1; n: `[1]`."""
    return g.Range(0, g.Squeeze(n), 1)


def placed(g: Graph, x_BN: Any, place_BN: Any, n_rows: Any, n_places: Any) -> Any:
    """x at its places of `[B, P]`, 0 at the others; what is at place P is dropped."""
    room = g.Expand(0, g.Concat(n_rows, n_places + 1, axis=0))
    return g.ScatterElements(room, place_BN, x_BN, axis=1)[:, :n_places]


def waves(g: Graph, position: Any, frequency: Tensor) -> Any:
    """sin and then cos of position times frequency along the last axis, computed in float64."""
    ahead = torch.pi / 2 * torch.tensor([0.0, 1.0], dtype=torch.float64).repeat_interleave(len(frequency))
    return g.Sin(position.to(DOUBLE) * frequency.repeat(2) + ahead).to(FLOAT)


def norm(g: Graph, x: Any, module: Any) -> Any:
    if isinstance(module, ScaleNorm):
        return x / g.Sqrt(g.ReduceMean(x * x, [-1]) + float(module.eps)) * module.scalar
    return g.LayerNormalization(x, module.weight, module.bias, axis=-1, epsilon=module.eps)


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from 1 to 255, `[V, D / 32, 32]`, and scales, `[V, D / 32, 1]`. A weight is
    about (number - 128) scale."""
    blocks = F.pad(weight.detach(), [0, -weight.shape[1] % BLOCK]).unflatten(1, (-1, BLOCK))
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    return ((blocks / scale).round() + 128).to(torch.uint8), scale


def embed(g: Graph, weight: Tensor, ids_BN: Any, int8: bool) -> Any:
    if not int8:
        return g.Gather(weight, ids_BN)
    blocks, scale = in_blocks(weight)
    x = (g.Gather(blocks, ids_BN).to(FLOAT) - 128.0) * g.Gather(scale, ids_BN)
    return g.Reshape(x, [0, 0, -1])[:, :, : weight.shape[1]]


def linear(g: Graph, x: Any, weight: Tensor, bias: Tensor | None, int8: bool = False) -> Any:
    if int8:
        n_out, n_in = weight.shape
        blocks, scale = in_blocks(weight)
        y = g.MatMulNBits(x, blocks, scale.flatten(), K=n_in, N=n_out, bits=8, block_size=BLOCK, accuracy_level=4,
                          domain="com.microsoft")
    else:
        y = x @ g.Transpose(weight, perm=[1, 0])
    return y if bias is None else y + bias


def make_heads(g: Graph, layer: GatedAttentionUnit, z_BNS: Any, conv: Any, t: SimpleNamespace) -> tuple[Any, ...]:
    """Both queries, both keys, `[B, N, S]` each; lists: the gates, and the last z, if any."""
    c, s, made_BNS, gate, last = layer.config.chunk_size or 0, layer.config.query_key_dim, z_BNS, [], []
    if layer.key_conv is not None:
        row_BLS = g.Concat(conv[:, c + 2 :, :s], z_BNS, axis=1)
        window_BNKS = g.Gather(row_BLS, t.window_NK, axis=1) * t.is_seen_BNK1
        made_BNS = g.ReduceSum(window_BNKS * layer.key_conv.taps, [2], keepdims=0)
        last = [g.GatherND(row_BLS, t.last_BK1, batch_dims=1)]
    if layer.linear_gate is not None:
        gate = [g.Sigmoid(linear(g, made_BNS, layer.linear_gate.weight[None], layer.linear_gate.bias))]
    from_BNF = g.Concat(z_BNS, z_BNS, made_BNS if layer.config.local_key_conv else z_BNS, made_BNS, axis=2)
    scale_41, offset = torch.tensor([1 / c, 1, 1, 1])[:, None], layer.scale_offset  # q of the local half: q / n
    gamma_F, beta_F = ((x[[0, 2, 1, 3]] * scale_41).flatten() for x in (offset.gamma, offset.beta))
    # RoPE of the halves of each head.
    halves_BNHK = g.Reshape(from_BNF * gamma_F + beta_F, [0, 0, 8, s // 2])
    swapped_BNHK = g.Gather(halves_BNHK, [1, 0, 3, 2, 5, 4, 7, 6], axis=2)
    turned_BNF = g.Reshape(halves_BNHK * t.cos_BNHK + swapped_BNHK * t.sin_BNHK, [0, 0, 4 * s])
    return (*g.Split(turned_BNF, n=4, axis=2, num_outputs=4), gate, last)


def attend(g: Graph, layer: Any, x_BND: Any, past: Sequence[Any], t: SimpleNamespace) -> tuple[Any, ...]:
    """x after the layer, and the new rows of its two tensors: of the tokens, the counters and the
    last z; of the tokens and, if a chunk is closed, the sum."""
    config, (conv, recurrent) = layer.config, past
    c, s, e = config.chunk_size or 0, config.query_key_dim, config.d_inner
    uvz_BNF = linear(g, norm(g, x_BND, layer.norm), layer.in_proj.weight, layer.in_proj.bias, t.int8)
    u_BNE, v_BNE, z_BNS = g.Split(uvz_BNF * g.Sigmoid(uvz_BNF), [e, e, s], n=3, axis=2)
    q_BNS, q_lin_BNS, k_BNS, k_lin_BNS, gate, last = make_heads(g, layer, z_BNS, conv, t)
    for gate_BN1 in gate:
        k_lin_BNS = k_lin_BNS * gate_BN1
    # What divides the sums: tokens, or with "written" their gates.
    written_B11 = conv[:, c + 1 : c + 2, 4:5]
    if config.chunk_pooling == "mean":
        q_lin_BNS = q_lin_BNS / g.Max(t.closed_BN, 1).to(FLOAT)[:, :, None]
    if config.chunk_pooling == "written":
        of_open, of_new, of_sum = t.both
        sums_BX1 = of_sum * written_B11 + of_open @ conv[:, :, 2 * s :] + of_new @ gate[0]
        q_lin_BNS, written_B11 = q_lin_BNS / g.Max(sums_BX1[:, 1:], 1.0), sums_BX1[:, :1]
    bias_M = torch.zeros(c) if layer.rel_pos_bias is None else layer.rel_pos_bias.before(c).detach()
    bias_M = F.pad(bias_M, [0, 1], value=HIDDEN)
    # Both queries with all rows of `conv`, which is not cut up: that would copy it.
    both_BXF = g.Concat(*(g.Pad(q, [0, 0, before, 0, 0, s - before + len(gate)]) for q, before in (
        (q_BNS, 0), (q_lin_BNS, s))), axis=1)
    open_BNR, lin_BNR = g.Split(both_BXF @ g.Transpose(conv, perm=[0, 2, 1]), t.halves, n=2, axis=1)

    def weights(score: Any, lin: Any, distance: Any, closed: Any) -> Any:
        """relu(q k^T / n + b)^2 in the chunk, q k^T for those closed before it."""
        local = g.Relu(score + g.Gather(bias_M, distance))
        return local * local + lin * closed

    a_BNR = weights(open_BNR, lin_BNR, t.distance[0], t.closed[0])
    new_BNN, lin_BNN = (q @ g.Transpose(k, perm=[0, 2, 1]) for q, k in ((q_BNS, k_BNS), (q_lin_BNS, k_lin_BNS)))
    a_BNN = weights(new_BNN, lin_BNN, t.distance[1], t.closed[1])
    out_BNE = g.Concat(q_lin_BNS * t.closed[2], a_BNR, axis=2) @ recurrent + a_BNN @ v_BNE
    x_BND = x_BND + linear(g, u_BNE * out_BNE, layer.out_proj.weight, layer.out_proj.bias, t.int8)
    # The sum that the next call reads, `[B, S, E]`, or nothing if no chunk is closed.
    old_BRS, new_BNS = conv[:, : t.has_R, s : 2 * s] * t.adds_BR1, (k_lin_BNS * t.adds_BN1)[:, :, : t.has_S]
    sum_BSE = (recurrent[:, : t.has_S] * t.keeps_B11 + g.Transpose(new_BNS, perm=[0, 2, 1]) @ v_BNE
               + g.Transpose(old_BRS, perm=[0, 2, 1])[:, : t.has_S] @ recurrent[:, s : t.has_R + s])
    rows = [g.Concat(k_BNS, k_lin_BNS, *gate, axis=2)]
    for row_BRF, n_used in ((g.Concat(t.counters_B14.to(FLOAT), written_B11, axis=2), 5), *((x, s) for x in last)):
        rows.append(g.Pad(row_BRF, [0, 0, 0, 0, 0, 2 * s + len(gate) - n_used]))
    return x_BND, g.Concat(*rows, axis=1), g.Concat(v_BNE, sum_BSE, axis=1)


def enter(g: Graph, model: LanguageModel, t: SimpleNamespace) -> Any:
    """The embeddings, x_BND; t gets what heads need: RoPE's tables, and where a key's z are."""
    config, position_BN1 = model.config, t.position_BN[:, :, None]
    k, half = config.key_conv, config.query_key_dim // 2
    if k:
        t.window_NK = arange(g, t.n_new)[:, None] + np.arange(k)
        t.last_BK1 = (t.n_real_B1 + np.arange(k - 1))[:, :, None]
        t.is_seen_BNK1 = (t.age_BN[:, :, None] >= np.arange(k)[::-1].copy()).to(FLOAT)[:, :, :, None]
    # The table's rows: sin, 0, cos, 1.
    frequency = frequencies(config.query_key_dim, config.n_rotated, config.rope_base)
    table = g.Reshape(waves(g, position_BN1, F.pad(frequency, [0, half])), [0, 0, 4, half])
    of_half = np.array([0, 0, *[0 if config.linear_rope else 1] * 2] * 2)
    t.cos_BNHK, t.sin_BNHK = g.Gather(table, of_half + 2, axis=2), g.Gather(table, of_half, axis=2)
    t.sin_BNHK = t.sin_BNHK * np.tile(np.array([[-1], [1]], np.float32), (4, 1))
    x_BND = embed(g, model.embed.weight, t.ids_BN, t.int8)
    if isinstance(model.abs_pos, ScaledSin):
        return x_BND + waves(g, position_BN1, frequencies(config.d_model, config.d_model)) * model.abs_pos.scalar
    return x_BND + g.Gather(model.abs_pos.weight, g.Min(t.position_BN, config.context - 1))


def call(g: Graph, model: LanguageModel, int8: bool, ids_BN: Any, past: Sequence[Any]) -> list[Any]:
    """The new state, two tensors of each layer, then the logits."""
    config, made, c = model.config, [], model.config.chunk_size or 0
    t = read_tokens(g, ids_BN, past[0], config)
    see_keys(g, t, config)
    t.int8 = int8
    x_BND = enter(g, model, t)
    for layer, *tensors in zip(model.layers, past[::2], past[1::2], strict=True):
        x_BND, *rows = attend(g, layer, x_BND, tensors, t)
        made += rows
    # A runtime may keep the old and the new state in one memory. So rows are written when all is
    # read: their places wait for x by a number that is 0.
    zero_BN = g.ArgMax(x_BND, axis=2, keepdims=0) / config.d_model
    zero_B1, write_BN = g.ReduceMax(zero_BN, [1]), t.write_BN + zero_BN
    row_B1, at = arange(g, t.n_rows)[:, None], []
    for first_BN, more_1R in ((write_BN, np.arange(c + 1, n_rows(config))[None]),
                              (write_BN + config.query_key_dim, arange(g, t.has_S)[None, :])):
        place_BR = g.Concat(first_BN, zero_B1 + more_1R, axis=1)
        at.append(g.Concat(g.Expand(row_B1, g.Shape(place_BR))[:, :, None], place_BR[:, :, None], axis=2))
    present = [g.ScatterND(tensor, at[n % 2], rows) for n, (tensor, rows) in enumerate(zip(past, made, strict=True))]
    x_BND = norm(g, g.GatherND(x_BND, t.rank_BN[:, :, None], batch_dims=1), model.norm)
    return [*present, linear(g, x_BND, model.head_matrix, model.head_bias, int8)]


def call_by_parts(g: Graph, step: Callable[..., list[Any]], ids_BN: Any, past: Sequence[Any],
                  infos: Sequence[Any]) -> list[Any]:
    """`call` of `TOGETHER` tokens after the other. infos: names and shapes of the state."""
    n_new = g.Shape(ids_BN)[1:,]
    n_parts = (n_new + (TOGETHER - 1)) / TOGETHER
    padded_BN = g.Pad(ids_BN, g.Concat([0, 0, 0], n_parts * TOGETHER - n_new, axis=0), -1)

    def part(number: Any, go_on: Any, *now: Any) -> list[Any]:
        from_1 = g.Unsqueeze(number, [0]) * TOGETHER
        made = step(g.Slice(padded_BN, from_1, from_1 + TOGETHER, [1]), now)
        more = g.Identity(go_on)
        more.dtype = BOOL
        return [more, *made]

    inputs = [helper.make_tensor_value_info(name, kind, []) for name, kind in (("number", INT64), ("go_on", BOOL))]
    *present, logits_GBNV = g.Loop(g.Squeeze(n_parts), "", *past, n=len(past) + 1, body=g.branch(part, *inputs, *infos))
    logits_BGNV = g.Transpose(logits_GBNV, perm=[1, 0, 2, 3])
    flat = g.Concat(g.Shape(ids_BN)[:1,], n_parts * TOGETHER, g.Shape(logits_BGNV)[3:,], axis=0)
    return [*present, g.Reshape(logits_BGNV, flat)[:, :n_new]]


@torch.no_grad()
def make_graph(model: LanguageModel, int8: bool = False) -> ModelProto:
    """The graph of a model in float32. int8: its large matrices are in 8 bits. Raises UsageError
    for a model that is not a causal FLASH, or too large."""
    config, g, info = model.config, Graph(), helper.make_tensor_value_info
    c, s = config.chunk_size or 0, config.query_key_dim
    is_flash = (config.ffn == "gau" and config.attends_as_flash and c > 0 and not config.layers and config.n_heads == 1
                and s > 2 and not config.token_shift)
    require(is_flash and model.decodes,
            "only a causal FLASH goes to ONNX", f"{config.attn_type}, {config.ffn}",
            "GAUs in chunks, all alike, with one head and without token_shift")
    n_bytes = sum(weight.numel() for weight in model.parameters()) * (1 if int8 else 4)
    require(n_bytes < LARGEST, "the model is too large for a file of ONNX", f"{n_bytes:,} bytes of {LARGEST:,}")
    shapes = {"conv": [n_rows(config), 2 * s + config.linear_gate], "recurrent": [s + n_rows(config), config.d_inner]}
    past, of_parts, present = ([info(f"{when}_{kind}.{n}", FLOAT, ["batch_size", *shape])
                                for n in range(config.n_layers) for kind, shape in shapes.items()]
                               for when in ("past", "now", "present"))
    ids_BN, state, step = Value(g, "input_ids"), [Value(g, each.name) for each in past], partial(call, g, model, int8)
    made = g.If(g.Squeeze(g.Shape(ids_BN)[1:,] <= TOGETHER), n=len(past) + 1,
                then_branch=g.branch(lambda: step(ids_BN, state)),
                else_branch=g.branch(lambda: call_by_parts(g, step, ids_BN, state, of_parts)))
    tokens = ["batch_size", "sequence_length"]
    outputs = [*present, info("logits", FLOAT, [*tokens, config.vocab_size])]
    g.nodes += [helper.make_node("Identity", [x.name], [each.name]) for x, each in zip(made, outputs, strict=True)]
    graph = helper.make_graph(g.nodes, "lineartime", [info("input_ids", INT64, tokens), *past], outputs,
                              [*g.constants.values()])
    domains = [helper.make_opsetid("", 18), *([helper.make_opsetid("com.microsoft", 1)] if int8 else [])]
    return helper.make_model(graph, opset_imports=domains, ir_version=9)
