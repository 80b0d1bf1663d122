"""Options of GAUs that the paper's FLASH and FLASH-Quad do not use; MC-TFM++ has some of them.
First keys made from several tokens and a gate on what the linear half writes, beyond the paper;
then the paper's ablations (`ops.ablations`), several heads, another activation, and no gate."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime.base.ranks import ALONE, Ranks
from lineartime.config import ModelConfig
from lineartime.model.decoding.cache import Cache, last_and_new
from lineartime.model.decoding.inputs import DecodeInputs
from lineartime.model.layers import ACTIVATIONS, RelPosBias, ScaleOffset, fold_heads, unfold_heads
from lineartime.ops import ablations, reference
from lineartime.ops.context import with_neighbours
from lineartime.ops.dtypes import at_least_float32
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

    def forward(self, z_BTS: Tensor, segment_ids_BT: Tensor | None, ranks: Ranks = ALONE) -> Tensor:
        """The convolution of rows, the sum over k of taps[k] z[t + k - (K - 1 - n_after)]: `[B, T,
        S]` of z's dtype. segment_ids_BT, ranks: see `layers.SequenceInfo`."""
        n_taps, n_tokens = len(self.taps), z_BTS.shape[1]
        around = (n_taps - 1 - self.n_after, self.n_after)
        if segment_ids_BT is None:
            return weigh_tokens(F.pad(z_BTS, [0, 0, *around]), self.taps, None)
        if ranks.size == 1:
            row_BLS, ids_BL = F.pad(z_BTS, [0, 0, *around]), F.pad(segment_ids_BT, around, value=-1)
        else:
            row_BLS, ids_BL = with_neighbours(z_BTS, segment_ids_BT, around, ranks)
        return weigh_tokens(row_BLS, self.taps, [ids_BL[:, k : k + n_tokens] == segment_ids_BT for k in range(n_taps)])

    def add_to(self, cache: Cache) -> None:
        """Give an empty cache the places for the last tokens' z."""
        like = next(iter(cache.tensors().values()))
        cache.z_BKS = like.new_zeros(len(like), len(self.taps), self.taps.shape[1] // self.n_heads)

    def extend(self, z_BNS: Tensor, inputs: DecodeInputs, cache: Cache) -> Tensor:
        """`forward` of the next N tokens; their rows' last z are in `cache`: `[B, N, S]`."""
        assert cache.z_BKS is not None
        row_BLS, kept_BKS = last_and_new(unfold_heads(cache.z_BKS, self.n_heads), z_BNS, inputs)
        cache.keep("z_BKS", fold_heads(kept_BKS, self.n_heads))
        n_taps, age_BN = len(self.taps), inputs.position_BN - inputs.start_BN
        visible_KBN = [age_BN >= n_taps - 1 - tap for tap in range(n_taps)]
        return weigh_tokens(row_BLS[:, 1:], self.taps, visible_KBN)


def weigh_tokens(row_BLS: Tensor, taps_KS: Tensor, visible_KBT: Sequence[Tensor] | None) -> Tensor:
    """The sum over k of taps[k] row[t + k], where visible: `[B, T, S]` of row's dtype."""
    n_tokens, out_BTS = row_BLS.shape[1] - len(taps_KS) + 1, row_BLS.new_zeros(())
    for k, weight_S in enumerate(taps_KS):
        part_BTS = row_BLS[:, k : k + n_tokens]
        if visible_KBT is not None:
            part_BTS = torch.where(visible_KBT[k][..., None], part_BTS, 0.0)
        out_BTS = out_BTS + part_BTS * weight_S
    return out_BTS.to(row_BLS.dtype)


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


def gated_keys(config: ModelConfig, k_BTHK: Tensor, conv_BTS: Tensor,
               gate: WriteGate | None) -> tuple[Tensor, Tensor | None]:
    """The linear half's keys times their gates, `[B, T, H, K]`; and gate_BT, which chunk_pooling
    "written" divides by (B counts rows times heads), else None. conv_BTS: see `WriteGate`."""
    if gate is None:
        return k_BTHK, None
    gate_BTH = gate(conv_BTS)
    gate_BT = gate_BTH.movedim(-1, 1).flatten(0, 1) if config.chunk_pooling == "written" else None
    return (k_BTHK * gate_BTH[..., None]).to(k_BTHK.dtype), gate_BT


def heads_of_z(config: ModelConfig, z_BTS: Tensor, conv_BTS: Tensor, scale_offset: ScaleOffset,
               gate: WriteGate | None, rotary: tuple[Tensor, Tensor]) -> tuple[list[Tensor], Tensor | None]:
    """Heads made from z, each `[B, T, S]`: q and k of the quadratic half, then with chunks those of
    the linear half, then those of first-to-all; and the gates that chunk_pooling "written" divides
    by, gate_BT, else None. B counts rows times attention heads. conv_BTS: z, or its convolution."""
    (sin, cos), heads, gate_BT = (angle[..., None, :] for angle in rotary), [], None
    # Heads 2 and 3 are the linear half's, 1 and 3 are keys. These are made from the convolution:
    from_conv = (1,) if config.chunk_size is None else (1, 3) if config.local_key_conv else (3,)
    wide_BTS, wide_conv_BTS = at_least_float32(z_BTS), at_least_float32(conv_BTS)
    for n in range(len(scale_offset.gamma)):
        made_BTS = (wide_conv_BTS if n in from_conv else wide_BTS) * scale_offset.gamma[n] + scale_offset.beta[n]
        head_BTHS = made_BTS.unflatten(-1, (config.n_heads, -1))
        heads.append(reference.rope(head_BTHS, sin, cos) if config.linear_rope or n not in (2, 3) else head_BTHS)
    if config.chunk_size is not None:
        heads[3], gate_BT = gated_keys(config, heads[3], conv_BTS, gate)
    return [fold_heads(head.to(z_BTS.dtype).flatten(-2), config.n_heads) for head in heads], gate_BT


def split_folded(config: ModelConfig, uvz_BTF: Tensor) -> tuple[Tensor, Tensor]:
    """u and v side by side, before silu, where B counts rows times heads; and z_BTS, after it."""
    uv_BTF, z_BTS = uvz_BTF.split([2 * config.d_inner, config.query_key_dim], dim=-1)
    if config.n_heads > 1:  # a head takes its columns of u and its columns of v
        uv_BTF = torch.cat([fold_heads(part_BTE, config.n_heads) for part_BTE in uv_BTF.chunk(2, dim=-1)], dim=-1)
    return uv_BTF, F.silu(z_BTS)


def split_activated(config: ModelConfig, uvz_BTF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u_BTE, v_BTE and z_BTS, after the activation. In v B counts rows times attention heads."""
    e, activation = config.d_inner, ACTIVATIONS[config.activation]
    u_BTE, v_BTE, z_BTS = (activation(part) for part in uvz_BTF.split([e, e, config.query_key_dim], dim=-1))
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
        lin_BGCE = attend_linearly(config, others[0], others[1], v_BGCE, ids_BGC, a_BGG, gate_BGC, exchange)
        out_BGCE = lin_BGCE if out_BGCE is None else out_BGCE + lin_BGCE
    assert out_BGCE is not None
    if config.first_to_all:  # each chunk's first token also attends to its whole document
        ids_BGC = ids_or_zeros(ids_BGC, v_BGCE)
        first_BGE = ablations.first_to_all_attention(others[2][:, :, 0], others[3], v_BGCE, ids_BGC)
        out_BGCE = torch.cat([out_BGCE[:, :, :1] + first_BGE[:, :, None], out_BGCE[:, :, 1:]], dim=2)
    return reference.from_chunks(out_BGCE, v_BTE.shape[1])


def attend_linearly(config: ModelConfig, q_BGCS: Tensor, k_BGCS: Tensor, v_BGCE: Tensor, ids_BGC: Tensor | None,
                    a_BGG: Tensor | None, gate_BGC: Tensor | None, exchange: Exchange | None) -> Tensor:
    """The linear half: by learned weights, as the listing has it, or with the exact mask."""
    if a_BGG is not None and ids_BGC is not None:
        return ablations.weighted_linear_attention(q_BGCS, k_BGCS, v_BGCE, a_BGG, segment_ids_BGC=ids_BGC)
    if config.document_mask == "paper" and ids_BGC is not None:
        return ablations.paper_linear_attention(q_BGCS, k_BGCS, v_BGCE, causal=config.causal, segment_ids_BGC=ids_BGC)
    return reference.linear_attention(q_BGCS, k_BGCS, v_BGCE, causal=config.causal, segment_ids_BGC=ids_BGC,
                            pooling=config.chunk_pooling, gate_BGC=gate_BGC, exchange=exchange)
