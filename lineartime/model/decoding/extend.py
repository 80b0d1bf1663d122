"""Attention of the next tokens of rows whose past is in a cache. The result does not depend on how
rows are split into calls. B counts rows times heads: a row's heads are adjacent entries."""

import itertools
from collections.abc import Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.base.settings import require
from lineartime.config import ModelConfig
from lineartime.model.decoding.cache import Cache, ChunkState, KeyValueCache
from lineartime.model.decoding.inputs import DecodeInputs
from lineartime.model.layers import RelPosBias
from lineartime.ops.ablations import ablated_quadratic_attention, score_scale
from lineartime.ops.dtypes import as_dtype, at_least_float32, float16_as_float32, wide_dtype
from lineartime.ops.reference import attention_weights, to_chunks, weigh_values


def extend_row(q_BNS: Tensor, k_BNS: Tensor, v_BNE: Tensor, inputs: DecodeInputs, cache: KeyValueCache,
               rel_pos_bias: RelPosBias | None, config: ModelConfig) -> Tensor:
    """Quadratic attention of the next tokens over the whole row: out_BNE. Appends k and v."""
    parameters = [] if rel_pos_bias is None else rel_pos_bias.parameters()
    k_BLS, v_BLE = cache.append(k_BNS, v_BNE, inputs, itertools.chain((q_BNS,), parameters))
    bias = None if rel_pos_bias is None else row_bias(inputs, cache, rel_pos_bias)
    score_BNL = decode_scores(q_BNS, k_BLS, bias, config)
    return weigh_values(attention_weights(score_BNL, inputs.visible(), config.attn_kernel), v_BLE)


def row_bias(inputs: DecodeInputs, cache: KeyValueCache, rel_pos_bias: RelPosBias) -> Tensor:
    """The position bias of the next tokens and all keys so far, `[L]` or `[B or 1, N, L]`."""
    # The bias is kept. A gradient needs a new one, and so does a graph, for rows of any length.
    makes_graph, length = torch.compiler.is_exporting(), inputs.longest
    if cache.bias_L is None or makes_graph or torch.is_grad_enabled() or len(cache.bias_L) < length:
        cache.bias_L = rel_pos_bias.before(cache.k_BL.shape[1])
    require(makes_graph or length <= len(cache.bias_L), "row longer than the position table",
            f"{length} tokens, the table has {len(cache.bias_L)}", "make it with a larger context")
    bias_L, index_BNL = cache.bias_L[cache.bias_L.shape[0] - length :], inputs.bias_index()
    return bias_L if index_BNL is None else bias_L[index_BNL]


def decode_scores(q_BNS: Tensor, k_BLS: Tensor, bias: Tensor | None, config: ModelConfig) -> Tensor:
    """q k^T times the scale of the attention kernel, plus the bias: score_BNL, float32 at least."""
    scale = 1 / score_scale(config.attn_kernel, q_BNS.shape[-1], config.scale_len)
    score_BNL = torch.bmm(float16_as_float32(q_BNS), float16_as_float32(k_BLS).mT)
    return at_least_float32(score_BNL) * scale if bias is None else torch.add(bias, score_BNL, alpha=scale)


def empty_cache(n_rows: int, config: ModelConfig, weight: Tensor, rel_pos_bias: RelPosBias | None) -> Cache:
    """The cache of `n_rows` rows that have no token yet: `KeyValueCache`, or with chunks
    `ChunkState`, of `weight`'s device and dtype; sums, gates and biases in float32 at least."""
    n, s, e, c = n_rows * config.n_heads, config.qk_width, config.v_width, config.chunk_size
    if c is None:
        return KeyValueCache(weight.new_zeros(n, 0, s), weight.new_zeros(n, 0, e), config.n_heads)
    k_BCS, v_BCE = weight.new_zeros(n, c, s), weight.new_zeros(n, c, e)
    kv_BSE = at_least_float32(weight.new_zeros(n, s, e))
    state = ChunkState(k_BCS, k_BCS.clone(), v_BCE, kv_BSE, n_heads=config.n_heads)
    if config.overlap:
        state.k_before_BCS, state.v_before_BCE = k_BCS.clone(), v_BCE.clone()
    if config.chunk_pooling == "written":
        state.gate_BC, state.written_B = kv_BSE.new_zeros(n, c), kv_BSE.new_zeros(n)
    if rel_pos_bias is not None:
        state.bias_M = rel_pos_bias.before(rel_pos_bias.n).detach()
    return state


def extend_by_one(heads: Iterable[Tensor], v_BNE: Tensor, inputs: DecodeInputs, cache: ChunkState, config: ModelConfig,
                  gate_BN: Tensor | None) -> Tensor:
    """`extend_chunks` by one token per row. In a graph the caller closes chunks that are full."""
    # Add the token to the open chunk, in place.
    at = inputs.token_position(config, cache.kv_BSE.dtype)
    q_quad_BNS, k_quad_BNS, q_lin_BNS, k_lin_BNS = heads
    for buffer, new_BN in ((cache.k_quad_BCS, k_quad_BNS), (cache.k_lin_BCS, k_lin_BNS), (cache.v_BCE, v_BNE)):
        buffer[at.place] = as_dtype(new_BN, buffer.dtype)  # autocast makes a shorter type
    out_BNE = None  # the local half: the open chunk up to the token, and with overlap the chunk before it
    if config.chunk_parts != "global":
        k_BMS, v_BME = cache.k_quad_BCS[:, : at.n_open], cache.v_BCE[:, : at.n_open]
        if cache.k_before_BCS is not None and cache.v_before_BCE is not None:
            k_BMS = torch.cat([cache.k_before_BCS, k_BMS], dim=1)
            v_BME = torch.cat([cache.v_before_BCE, v_BME], dim=1)
        bias = None if cache.bias_M is None else cache.bias_M[at.bias_index]
        score_BNM = decode_scores(q_quad_BNS, k_BMS, bias, config)
        out_BNE = weigh_values(attention_weights(score_BNM, at.visible_B1M, config.attn_kernel), v_BME)
    if config.chunk_parts != "local":  # the linear half reads the sum over closed chunks
        lin_BNE, factor_B11 = weigh_values(q_lin_BNS, cache.kv_BSE), cache.factor(at, gate_BN)
        out_BNE = lin_BNE * factor_B11 if out_BNE is None else torch.addcmul(out_BNE, lin_BNE, factor_B11)
    if at.full is not None:
        cache.close(at)
    assert out_BNE is not None
    return as_dtype(out_BNE, wide_dtype(v_BNE))


def extend_chunks(heads: Iterable[Tensor], v_BNE: Tensor, inputs: DecodeInputs, cache: ChunkState, config: ModelConfig,
                  rel_pos_bias: RelPosBias | None, gate_BN: Tensor | None = None) -> Tensor:
    """Causal mixed chunk attention of the next tokens of rows whose past is in `cache`, which is
    updated: out_BNE. The open chunk and the new tokens are laid out in chunks. heads: q and k of
    the quadratic half, then of the linear half. gate_BN: see `gau_options.gated_keys`."""
    heads, bias = list(heads), [] if rel_pos_bias is None else rel_pos_bias.parameters()
    new = itertools.chain((v_BNE, *heads), bias)
    if inputs.single_token and (inputs.window is not None or not cache.wants_gradient(new)):
        return extend_by_one(heads, v_BNE, inputs, cache, config, gate_BN)
    c = cache.chunk_size
    offset_B = inputs.seq_lens_B % c
    slot_BN = torch.where(inputs.valid_BN, offset_B[:, None] + torch.arange(v_BNE.shape[1], device=v_BNE.device), -1)
    # A graph has room for the most tokens that an open chunk may hold.
    n_filled = int(slot_BN.max()) + 1 if inputs.window is None else v_BNE.shape[1] + c - 1
    n_slots = max(-(-n_filled // c), 1) * c
    to_slots = partial(in_slots, slot_BN=slot_BN, n_slots=n_slots, chunk_size=c)
    # Tokens of the open chunk that are not of the row's current document count as padding.
    slot_C, open_start_B = torch.arange(c, device=v_BNE.device), inputs.seq_lens_B - offset_B
    first_B = inputs.start_B - open_start_B
    open_ids_BC = torch.where((slot_C < offset_B[:, None]) & (slot_C >= first_B[:, None]), 0, -1)
    segment_ids_BGC = to_slots(inputs.segment_ids_BN, open_ids_BC, fill=-1)
    q_quad_BNS, k_quad_BNS, q_lin_BNS, k_lin_BNS = heads
    k_lin_BGCS, k_quad_BGCS = to_slots(k_lin_BNS, cache.k_lin_BCS), to_slots(k_quad_BNS, cache.k_quad_BCS)
    v_BGCE = to_slots(v_BNE, cache.v_BCE)
    out_BGCE = torch.zeros_like(v_BGCE)
    # The chunk of each row that the new tokens leave open.
    now_open = torch.arange(v_BNE.shape[0], device=v_BNE.device), (offset_B + inputs.n_new_B) // c

    if config.chunk_parts != "global":
        q_quad, k_quad, v, ids = to_slots(q_quad_BNS), k_quad_BGCS, v_BGCE, segment_ids_BGC
        if cache.k_before_BCS is not None and cache.v_before_BCE is not None:
            # The chunk before the open one gives keys and values; its own output is dropped.
            before_BC = (slot_C - c >= first_B[:, None]) & (open_start_B[:, None] >= c)
            q_quad = F.pad(q_quad, [0, 0, 0, 0, 1, 0])
            k_quad = torch.cat([cache.k_before_BCS[:, None], k_quad], dim=1)
            v = torch.cat([cache.v_before_BCE[:, None], v], dim=1)
            ids = torch.cat([torch.where(before_BC, 0, -1)[:, None], ids], dim=1)
        w = None if rel_pos_bias is None else rel_pos_bias(rel_pos_bias.n)
        quad_BGCE = ablated_quadratic_attention(q_quad, k_quad, v, w, scale_len=c, causal=True, segment_ids_BGC=ids,
                                                kernel=config.attn_kernel, overlap=config.overlap)
        out_BGCE = out_BGCE + quad_BGCE[:, -segment_ids_BGC.shape[1]:]
        if cache.k_before_BCS is not None:
            cache.k_before_BCS, cache.v_before_BCE = k_quad[now_open], v[now_open]

    # The linear half moves the state on. Then the chunk that is open now becomes the cache's.
    gate_BGC = None if gate_BN is None else to_slots(gate_BN, cache.gate_BC)
    lin_BGCE = cache.advance(to_slots(q_lin_BNS), k_lin_BGCS, v_BGCE, segment_ids_BGC, cache.past(inputs), now_open,
                             config.chunk_pooling, gate_BGC)
    if config.chunk_parts != "local":
        out_BGCE = out_BGCE + lin_BGCE
    if gate_BGC is not None:
        cache.gate_BC = F.pad(gate_BGC, [0, 0, 0, 1])[now_open]
    for name, all_BGC in (("k_quad_BCS", k_quad_BGCS), ("k_lin_BCS", k_lin_BGCS), ("v_BCE", v_BGCE)):
        setattr(cache, name, F.pad(all_BGC, [0, 0, 0, 0, 0, 1])[now_open].to(getattr(cache, name).dtype))
    return out_BGCE.flatten(1, 2).gather(1, slot_BN.clamp(min=0)[..., None].expand_as(v_BNE))


def in_slots(new_BN: Tensor, open_BC: Tensor | None = None, fill: int = 0, *, slot_BN: Tensor, n_slots: int,
             chunk_size: int) -> Tensor:
    """The tokens of the open chunk, `[B, C, ...]`, then the new ones, `[B, N, ...]`, as chunks:
    `[B, G, C, ...]`; `fill` where there are none. slot_BN: the slot of each new token, of
    `n_slots`; -1 for padding, which goes to an extra first slot that is cut off."""
    all_BT = new_BN.new_full((new_BN.shape[0], n_slots + 1, *new_BN.shape[2:]), fill)
    if open_BC is not None:
        all_BT[:, 1 : chunk_size + 1] = open_BC
    index = (slot_BN + 1).view(*slot_BN.shape, *[1] * (new_BN.dim() - 2)).expand_as(new_BN)
    return to_chunks(all_BT.scatter(1, index, new_BN)[:, 1:], chunk_size)
