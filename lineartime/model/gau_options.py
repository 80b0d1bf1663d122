"""Options of GAUs that the paper's FLASH and FLASH-Quad do not use; MC-TFM++ has some of them.
First keys made from several tokens and a gate on what the linear half writes, beyond the paper;
then the paper's ablations (`ops.ablations`), several heads, another activation, and no gate."""

import functools
import operator
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime.config import ModelConfig
from lineartime.model.decoding.cache import Cache
from lineartime.model.layers import ACTIVATIONS, RelPosBias, ScaleOffset, SequenceInfo, fold_heads, unfold_heads
from lineartime.ops import ablations, reference
from lineartime.ops.context import with_neighbours
from lineartime.ops.dtypes import as_dtype, at_least_float32
from lineartime.ops.reference import Exchange, ids_or_zeros, to_chunks

CHUNK_BIAS_LEN = 512  # n of the position bias between chunks; the rotated form has no limit


class KeyConv(nn.Module):
    """A depthwise convolution of z over `key_conv` tokens: a token and those before it, or if not
    causal those around it. Other documents and padding count as 0."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.n_heads = config.n_heads
        self.n_after = 0 if config.causal else config.key_conv // 2
        self.taps = nn.Parameter(torch.empty(config.key_conv, config.n_heads * config.qk_width))

    @torch.no_grad()
    def init_weights(self) -> None:
        """normal(0, 0.3), plus 1 for the token itself."""
        nn.init.normal_(self.taps, std=0.3)  # keys differ by their neighbours at once
        self.taps[-1 - self.n_after] += 1

    def forward(self, z_BTS: Tensor, info: SequenceInfo, cache: Cache | None = None) -> Tensor:
        """The convolution of rows, the sum over k of taps[k] z[t + k - (K - 1 - n_after)]: `[B, T,
        S]` of z's dtype. cache: holds the last z of rows whose next tokens these are."""
        n_taps, n_tokens, h, segment_ids_BT = len(self.taps), z_BTS.shape[1], self.n_heads, info.segment_ids_BT
        if cache is not None and info.inputs is not None:
            row_BLS = unfold_heads(cache.append_last("z_BKS", fold_heads(z_BTS, h), info.inputs.for_heads(h)), h)
            return weigh_tokens(row_BLS, self.taps, n_tokens, info.inputs.sees_before(n_taps))
        around = (n_taps - 1 - self.n_after, self.n_after)
        if segment_ids_BT is None:
            return weigh_tokens(F.pad(z_BTS, [0, 0, *around]), self.taps, n_tokens, None)
        if info.ranks.size == 1:
            row_BLS, ids_BL = F.pad(z_BTS, [0, 0, *around]), F.pad(segment_ids_BT, around, value=-1)
        else:
            row_BLS, ids_BL = with_neighbours(z_BTS, segment_ids_BT, around, info.ranks)
        visible_KBT1 = [(ids_BL[:, k : k + n_tokens] == segment_ids_BT)[..., None] for k in range(n_taps)]
        return weigh_tokens(row_BLS, self.taps, n_tokens, visible_KBT1)


def weigh_tokens(row_BLS: Tensor, taps_KS: Tensor, n_tokens: int, visible_KBT1: Sequence[Tensor] | None) -> Tensor:
    """The sum over k of taps[k] row[t + k], where visible, for the last t: `[B, T, S]`."""
    first = row_BLS.shape[1] - n_tokens - len(taps_KS) + 1
    parts = [row_BLS[:, first + k : first + k + n_tokens] for k in range(len(taps_KS))]
    if visible_KBT1 is not None:
        parts = [torch.where(*each, 0.0) for each in zip(visible_KBT1, parts, strict=True)]
    weighed = (part_BTS * weight_S for part_BTS, weight_S in zip(parts, taps_KS, strict=True))
    return as_dtype(functools.reduce(operator.add, weighed), row_BLS.dtype)


class WriteGate(nn.Module):
    """sigmoid(w z + b) of each token and head, by which the linear half's key is multiplied."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_heads * config.qk_width))
        self.bias = nn.Parameter(torch.empty(config.n_heads))

    def init_weights(self) -> None:
        """Set the initial values: normal(0, 0.1), bias 0."""
        nn.init.normal_(self.weight, std=0.1)  # the gates of all tokens start near one half
        nn.init.zeros_(self.bias)

    def forward(self, conv_BTS: Tensor) -> Tensor:
        """gate_BTH, in float32 at least. conv_BTS: what the keys are made from."""
        product_BTS = at_least_float32(conv_BTS) * self.weight
        return torch.sigmoid(product_BTS.unflatten(-1, (len(self.bias), -1)).sum(-1) + self.bias)


def gated_keys(config: ModelConfig, k_BTK: Tensor, conv_BTS: Tensor,
               gate: WriteGate | None) -> tuple[Tensor, Tensor | None]:
    """The linear half's keys times their gates, `[B, T, K]`; and gate_BT, which chunk_pooling
    "written" divides by, else None. B counts rows times heads. conv_BTS: see `WriteGate`."""
    if gate is None:
        return k_BTK, None
    gate_BT1 = fold_heads(gate(conv_BTS), config.n_heads)
    return as_dtype(k_BTK * gate_BT1, k_BTK.dtype), gate_BT1[..., 0] if config.chunk_pooling == "written" else None


def heads_of_z(config: ModelConfig, z_BTS: Tensor, conv_BTS: Tensor, scale_offset: ScaleOffset,
               gate: WriteGate | None, turn: tuple[Tensor, Tensor]) -> tuple[list[Tensor], Tensor | None]:
    """Heads made from z, each `[B, T, S]`: q and k of the quadratic half, then with chunks those of
    the linear half, then those of first-to-all; and the gates that chunk_pooling "written" divides
    by, gate_BT, else None. B counts rows times attention heads. conv_BTS: z, or its convolution.
    turn: see `SequenceInfo.turns`."""
    # Heads 2 and 3 are the linear half's, 1 and 3 are keys. These are made from the convolution:
    from_conv = (1,) if config.chunk_size is None else (1, 3) if config.local_key_conv else (3,)
    wide_BTS, wide_conv_BTS = at_least_float32(z_BTS), at_least_float32(conv_BTS)
    heads = [(wide_conv_BTS if n in from_conv else wide_BTS) * gamma_S + beta_S
             for n, (gamma_S, beta_S) in enumerate(zip(scale_offset.gamma, scale_offset.beta, strict=True))]
    # RoPE of all heads that have it at once.
    rotated = [n for n in range(len(heads)) if config.linear_rope or n not in (2, 3)]
    turned_NBTS = reference.rope(torch.stack([heads[n] for n in rotated]), turn, (config.n_heads, 2, -1))
    for n, head_BTS in zip(rotated, turned_NBTS, strict=True):
        heads[n] = head_BTS
    heads, gate_BT = [fold_heads(head_BTS, config.n_heads) for head_BTS in heads], None
    if config.chunk_size is not None:
        heads[3], gate_BT = gated_keys(config, heads[3], conv_BTS, gate)
    return [as_dtype(head_BTS, z_BTS.dtype) for head_BTS in heads], gate_BT


def split_activated(config: ModelConfig, uvz_BTF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u_BTE, v_BTE and z_BTS, after the activation. In v B counts rows times attention heads."""
    e, activation = config.d_inner, ACTIVATIONS[config.activation]
    u_BTE, v_BTE, z_BTS = activation(uvz_BTF).split([e, e, config.query_key_dim], dim=-1)
    return u_BTE, fold_heads(v_BTE, config.n_heads), z_BTS


def gated(config: ModelConfig, u_BTE: Tensor, out_BTE: Tensor) -> Tensor:
    """u * A v (Eq. 3), or without the gate [u, A v]: what W_o takes."""
    out_BTE = unfold_heads(out_BTE, config.n_heads)
    return u_BTE * out_BTE if config.gate else torch.cat([u_BTE, out_BTE], dim=-1)


def chunk_weights(config: ModelConfig, z_BTS: Tensor, segment_ids_BT: Tensor | None, scale_offset: ScaleOffset,
                  bias: RelPosBias) -> Tensor:
    """a_gh = relu(q_g k_h^T / n + b)^2, the learned weight of chunk h for chunk g (Appendix A):
    `[B, G, G]`, float32 at least. q and k are made from mean z; n is the chunks of a training row.
    When causal, chunk g asks with the mean of chunk g - 1, as its own has tokens to come."""
    assert config.chunk_size is not None
    z_BGCS = to_chunks(z_BTS, config.chunk_size)
    valid_BGC = to_chunks(ids_or_zeros(segment_ids_BT, z_BTS), config.chunk_size, fill=-1) >= 0
    z_BGS = (at_least_float32(z_BGCS) * valid_BGC[..., None]).sum(2) / valid_BGC.sum(-1, keepdim=True).clamp(min=1)
    chunk_G = torch.arange(z_BGS.shape[1], device=z_BGS.device)
    distance_GG = chunk_G - chunk_G[:, None]
    # When causal only earlier chunks are read, so what the first chunk asks with does not matter.
    asking_BGS = torch.cat([z_BGS[:, :1], z_BGS[:, :-1]], dim=1) if config.causal else z_BGS
    hidden_BGG = ~valid_BGC.any(-1)[:, None, :] | (config.causal & (distance_GG >= 0))
    # Query and key of a summary are two more cheap transforms of z.
    gamma_2S, beta_2S = scale_offset.gamma, scale_offset.beta
    q_BGS, k_BGS = asking_BGS * gamma_2S[0] + beta_2S[0], z_BGS * gamma_2S[1] + beta_2S[1]
    score_BGG = at_least_float32(reference.product("bgs,bhs->bgh", q_BGS / config.n_chunks, k_BGS))
    return reference.attention_weights(score_BGG + bias.at(distance_GG[None]), None).masked_fill(hidden_BGG, 0.0)


def ablated_attention(config: ModelConfig, heads: Sequence[Tensor], v_BTE: Tensor, rel_pos_bias: RelPosBias | None,
                      segment_ids_BT: Tensor | None, *, a_BGG: Tensor | None = None, gate_BT: Tensor | None = None,
                      exchange: Exchange | None = None) -> Tensor:
    """A v with a configuration's ablations, over whole rows or in chunks: `[B, T, E]`. heads,
    gate_BT: of `heads_of_z`. a_BGG: of `chunk_weights`. exchange: of `linear_attention`."""
    if config.chunk_size is None:
        q_BTS, k_BTS = heads
        w = None if rel_pos_bias is None else rel_pos_bias(v_BTE.shape[1])
        return ablations.ablated_quadratic_attention(
            q_BTS[:, None], k_BTS[:, None], v_BTE[:, None], w, scale_len=config.scale_len, causal=config.causal,
            segment_ids_BGC=None if segment_ids_BT is None else segment_ids_BT[:, None], kernel=config.attn_kernel,
            cls_softmax=config.cls_softmax)[:, 0]
    c = config.chunk_size
    q_quad, k_quad, *others = (to_chunks(head_BTS, c) for head_BTS in heads)
    v_BGCE = to_chunks(v_BTE, c)
    # Where rows end inside a chunk, ids of -1 mark what is missing.
    ids_BGC = reference.chunk_ids(segment_ids_BT, v_BTE, c, config.causal and a_BGG is None)
    if config.document_mask == "paper":
        ids_BGC = ids_or_zeros(ids_BGC, v_BGCE)
    # The quadratic half. The paper's mask keeps out padding alone.
    out_BGCE = None
    if config.chunk_parts != "global":
        within = ids_BGC if ids_BGC is None or config.document_mask == "exact" else (ids_BGC >= 0).long() - 1
        w = None if rel_pos_bias is None else rel_pos_bias(rel_pos_bias.n)
        out_BGCE = ablations.ablated_quadratic_attention(
            q_quad, k_quad, v_BGCE, w, scale_len=config.scale_len, causal=config.causal, segment_ids_BGC=within,
            kernel=config.attn_kernel, overlap=config.overlap, cls_softmax=config.cls_softmax)
    if config.has_linear_half:
        gate_BGC = None if gate_BT is None else to_chunks(gate_BT, c)
        q_lin, k_lin, *_ = others
        if a_BGG is not None and ids_BGC is not None:  # by learned weights
            lin_BGCE = ablations.weighted_linear_attention(q_lin, k_lin, v_BGCE, a_BGG, segment_ids_BGC=ids_BGC)
        elif config.document_mask == "paper" and ids_BGC is not None:  # as the listing has it
            lin_BGCE = ablations.paper_linear_attention(q_lin, k_lin, v_BGCE, causal=config.causal,
                                                        segment_ids_BGC=ids_BGC)
        else:
            lin_BGCE = reference.linear_attention(q_lin, k_lin, v_BGCE, causal=config.causal, segment_ids_BGC=ids_BGC,
                                                  pooling=config.chunk_pooling, gate_BGC=gate_BGC, exchange=exchange)
        out_BGCE = lin_BGCE if out_BGCE is None else out_BGCE + lin_BGCE
    assert out_BGCE is not None
    if config.first_to_all:  # each chunk's first token also attends to its whole document
        ids_BGC = ids_or_zeros(ids_BGC, v_BGCE)
        first_BGE = ablations.first_to_all_attention(others[2][:, :, 0], others[3], v_BGCE, ids_BGC)
        out_BGCE = torch.cat([out_BGCE[:, :, :1] + first_BGE[:, :, None], out_BGCE[:, :, 1:]], dim=2)
    return reference.from_chunks(out_BGCE, v_BTE.shape[1])
