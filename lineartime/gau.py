"""The Gated Attention Unit (Section 2, Code 6) and the same unit with mixed chunk attention (Section 3.2, Code 8).

FLASH-Quad is a stack of the first, FLASH of the second. The one is the other with a single chunk, when causal.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime import ops
from lineartime.cache import ChunkState, Feed, KeyValueCache
from lineartime.layers import ACTIVATIONS, Layout, RelPosBias, ScaleOffset, at_least_float32, make_norm, rope, rotary
from lineartime.ops.reference import carried_states, read_states


class GatedAttentionUnit(nn.Module):
    """x + W_o (u * A v) with u, v, z = silu(W norm(x)) and A made from z by one cheap head (Eqs. 3-5).

    Without `chunk_size`, A = relu(q k^T / n + b)^2 over the row and n is `scale_len`. With it, A is that inside a chunk
    (n = chunk_size) plus linear attention across chunks. Weights start as `model.init_weights` says."""

    def __init__(self, d_model: int = 768, *, expansion_factor: float = 2, query_key_dim: int = 128,
                 chunk_size: int | None = None, scale_len: int = 512, causal: bool = True, norm: str = "layer_norm",
                 activation: str = "silu", document_mask: str = "exact", chunk_pooling: str = "mean",
                 chunk_parts: str = "both"):
        super().__init__()
        self.d_inner, self.query_key_dim, self.chunk_size = round(d_model * expansion_factor), query_key_dim, chunk_size
        self.scale_len, self.causal, self.activation = chunk_size or scale_len, causal, ACTIVATIONS[activation]
        self.document_mask, self.chunk_pooling, self.chunk_parts = document_mask, chunk_pooling, chunk_parts
        self.norm = make_norm(norm, d_model)
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner + query_key_dim)
        self.scale_offset = ScaleOffset(2 if chunk_size is None else 4, query_key_dim)
        self.rel_pos_bias = RelPosBias(self.scale_len)
        self.out_proj = nn.Linear(self.d_inner, d_model)
        init_gau(self)

    def forward(self, x_BTD: Tensor, layout: Layout | None = None) -> Tensor:
        """x_BTD: any length. layout: positions and documents; without one the row is one document that starts at 0."""
        if layout is None:
            position_1T = torch.arange(x_BTD.shape[1], device=x_BTD.device)[None]
            layout = Layout(rotary(position_1T, self.query_key_dim, at_least_float32(x_BTD).dtype))
        u_BTE, v_BTE, heads_BTNS = self.project(x_BTD, layout)
        attend = self.attend_row if self.chunk_size is None else self.attend_chunks
        return x_BTD + self.out_proj(u_BTE * attend(heads_BTNS, v_BTE, layout.segment_ids_BT))

    def project(self, x_BTD: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """u, v and the rotated heads: q and k of the quadratic part, then with chunks those of the linear part."""
        uvz_BTF = self.activation(self.in_proj(self.norm(x_BTD)))
        u_BTE, v_BTE, z_BTS = uvz_BTF.split([self.d_inner, self.d_inner, self.query_key_dim], dim=-1)
        assert layout.rotary is not None
        sin, cos = (angle[..., None, :] for angle in layout.rotary)
        return u_BTE, v_BTE, rope(self.scale_offset(z_BTS), sin, cos).to(z_BTS.dtype)

    def attend_row(self, heads_BTNS: Tensor, v_BTE: Tensor, segment_ids_BT: Tensor | None) -> Tensor:
        """FLASH-Quad: the whole row is one chunk."""
        q_BTS, k_BTS = heads_BTNS.unbind(2)
        segment_ids_BGC = None if segment_ids_BT is None else segment_ids_BT[:, None]
        return ops.quadratic_attention(
            q_BTS[:, None], k_BTS[:, None], v_BTE[:, None], self.rel_pos_bias(v_BTE.shape[1]),
            scale_len=self.scale_len, causal=self.causal, segment_ids_BGC=segment_ids_BGC)[:, 0]

    def attend_chunks(self, heads_BTNS: Tensor, v_BTE: Tensor, segment_ids_BT: Tensor | None) -> Tensor:
        """FLASH: the row is cut into chunks; the last one is filled up with padding, which changes nothing."""
        n_tokens = v_BTE.shape[1]
        if segment_ids_BT is None:
            segment_ids_BT = torch.zeros(v_BTE.shape[:2], dtype=torch.long, device=v_BTE.device)
        q_quad, k_quad, q_lin, k_lin = (self.to_chunks(head_BTS) for head_BTS in heads_BTNS.unbind(2))
        out_BGCE = ops.mixed_chunk_attention(
            q_quad, k_quad, q_lin, k_lin, self.to_chunks(v_BTE), self.rel_pos_bias(self.scale_len),
            scale_len=self.scale_len, causal=self.causal, segment_ids_BGC=self.to_chunks(segment_ids_BT, fill=-1),
            document_mask=self.document_mask, pooling=self.chunk_pooling, parts=self.chunk_parts)
        return out_BGCE.flatten(1, 2)[:, :n_tokens]

    def to_chunks(self, x_BT: Tensor, fill: int = 0) -> Tensor:
        """`[B, T, ...]` as `[B, G, C, ...]`, filled up at the end."""
        assert self.chunk_size is not None
        missing = -x_BT.shape[1] % self.chunk_size
        if missing:
            x_BT = F.pad(x_BT, [0, 0] * (x_BT.dim() - 2) + [0, missing], value=fill)
        return x_BT.unflatten(1, (-1, self.chunk_size))

    def extend(self, x_BND: Tensor, layout: Layout, feed: Feed, cache: ChunkState | KeyValueCache) -> Tensor:
        """`forward` for the next tokens of rows whose past is in `cache`; causal only. Equal to the parallel form."""
        u_BNE, v_BNE, heads_BNHS = self.project(x_BND, layout)
        if isinstance(cache, KeyValueCache):
            out_BNE = self.extend_row(heads_BNHS, v_BNE, feed, cache)
        elif feed.one_each:
            out_BNE = self.extend_chunk_by_one(heads_BNHS[:, 0], v_BNE, feed, cache)
        else:
            out_BNE = self.extend_chunks(heads_BNHS, v_BNE, feed, cache)
        return x_BND + self.out_proj(u_BNE * out_BNE)

    def extend_row(self, heads_BNHS: Tensor, v_BNE: Tensor, feed: Feed, cache: KeyValueCache) -> Tensor:
        q_BNS, k_BNS = heads_BNHS.unbind(2)
        k_BLS, v_BLE = cache.append(k_BNS, v_BNE, feed)
        length = k_BLS.shape[1]
        offset_BNL = torch.arange(length, device=q_BNS.device) - feed.position_BN[..., None]
        bias_L = self.rel_pos_bias.at(torch.arange(1 - length, 1, device=q_BNS.device))
        bias_BNL = bias_L[offset_BNL.clamp(1 - length, 0) + length - 1]
        score_BNL = at_least_float32(torch.einsum("bns,bls->bnl", q_BNS / self.scale_len, k_BLS)) + bias_BNL
        a_BNL = torch.relu(score_BNL.masked_fill(~feed.visible(length), 0.0)).square()
        return torch.einsum("bnl,ble->bne", a_BNL.to(v_BLE.dtype), v_BLE)

    def extend_chunk_by_one(self, heads_BHS: Tensor, v_B1E: Tensor, feed: Feed, cache: ChunkState) -> Tensor:
        """One token per row: it attends to the open chunk, reads the state, and closes the chunk if it fills it."""
        q_quad_BS, k_quad_BS, q_lin_BS, k_lin_BS = heads_BHS.unbind(1)
        rows, offset_B = torch.arange(len(v_B1E), device=v_B1E.device), feed.position_BN[:, 0] % self.scale_len
        cache.forget(feed.begins_BN[:, 0])
        for buffer, new in ((cache.k_quad_BCS, k_quad_BS), (cache.k_lin_BCS, k_lin_BS), (cache.v_BCE, v_B1E[:, 0])):
            buffer[rows, offset_B] = new
        slot_C = torch.arange(self.scale_len, device=v_B1E.device)
        first_B = (feed.start_BN[:, 0] - feed.position_BN[:, 0] + offset_B).clamp(min=0)
        visible_BC = (slot_C <= offset_B[:, None]) & (slot_C >= first_B[:, None])
        out_BE = torch.zeros_like(v_B1E[:, 0])
        if self.chunk_parts != "global":
            bias_BC = self.rel_pos_bias.at((slot_C - offset_B[:, None]).clamp(1 - self.scale_len, 0))
            score_BC = (at_least_float32(torch.einsum("bs,bcs->bc", q_quad_BS / self.scale_len, cache.k_quad_BCS))
                        + bias_BC)
            a_BC = torch.relu(score_BC.masked_fill(~visible_BC, 0.0)).square()
            out_BE = out_BE + torch.einsum("bc,bce->be", a_BC.to(cache.v_BCE.dtype), cache.v_BCE)
        if self.chunk_parts != "local":
            weight_B = (1 / cache.count_B.clamp(min=1) if self.chunk_pooling == "mean"
                        else torch.ones_like(cache.count_B))
            out_BE = out_BE + read_states(q_lin_BS[:, None, None], cache.kv_BSE[:, None],
                                          weight_B[:, None, None])[:, 0, 0]
        full_B = offset_B == self.scale_len - 1
        if full_B.any():
            cache.close(full_B, visible_BC)
        return out_BE[:, None]

    def extend_chunks(self, heads_BNHS: Tensor, v_BNE: Tensor, feed: Feed, cache: ChunkState) -> Tensor:
        """Many tokens per row:
        the open chunk and the new tokens together are whole chunks that begin where it begins."""
        offset_B = feed.length_B % self.scale_len
        place_BN = torch.where(feed.valid_BN, offset_B[:, None] + torch.arange(v_BNE.shape[1], device=v_BNE.device), -1)
        n_slots = max(-(-(int(place_BN.max()) + 1) // self.scale_len), 1) * self.scale_len

        def in_place(new_BN: Tensor, open_BC: Tensor | None = None, fill: int = 0) -> Tensor:
            """New tokens behind those of the open chunk, as chunks. Slot -1, the last, takes what is not valid."""
            all_BT = new_BN.new_full((len(new_BN), n_slots + 1, *new_BN.shape[2:]), fill)
            if open_BC is not None:
                all_BT[:, : self.scale_len] = open_BC
            index = (place_BN % (n_slots + 1)).view(*place_BN.shape, *[1] * (new_BN.dim() - 2)).expand_as(new_BN)
            return self.to_chunks(all_BT.scatter(1, index, new_BN)[:, :-1])

        slot_C = torch.arange(self.scale_len, device=v_BNE.device)
        first_B = (feed.start_B - (feed.length_B - offset_B)).clamp(min=0)
        open_ids_BC = torch.where((slot_C < offset_B[:, None]) & (slot_C >= first_B[:, None]), 0, -1)
        segment_ids_BGC = in_place(feed.segment_ids_BN, open_ids_BC, fill=-1)
        k_lin_BGCS = in_place(heads_BNHS[:, :, 3], cache.k_lin_BCS)
        k_quad_BGCS = in_place(heads_BNHS[:, :, 1], cache.k_quad_BCS)
        v_BGCE = in_place(v_BNE, cache.v_BCE)
        kv_BPSE, count_BP, document_BP = carried_states(k_lin_BGCS, v_BGCE, segment_ids_BGC,
                                                        (cache.kv_BSE, cache.count_B))
        out_BGCE = torch.zeros_like(v_BGCE)
        if self.chunk_parts != "global":
            out_BGCE = out_BGCE + ops.quadratic_attention(
                in_place(heads_BNHS[:, :, 0]), k_quad_BGCS, v_BGCE, self.rel_pos_bias(self.scale_len),
                scale_len=self.scale_len, causal=True, segment_ids_BGC=segment_ids_BGC)
        if self.chunk_parts != "local":
            seen_BGC = (segment_ids_BGC == document_BP[:, :-1, None]) & (segment_ids_BGC >= 0)
            count_BGC = count_BP[:, :-1, None].clamp(min=1) if self.chunk_pooling == "mean" else 1.0
            out_BGCE = out_BGCE + read_states(in_place(heads_BNHS[:, :, 2]), kv_BPSE[:, :-1], seen_BGC / count_BGC)

        # The row's open chunk and the state that enters it; a document that began inside that chunk brings no state.
        rows, n_closed_B = torch.arange(len(v_BNE), device=v_BNE.device), (offset_B + feed.n_new_B) // self.scale_len
        known_B = document_BP[rows, n_closed_B] == feed.last_document_B
        cache.kv_BSE = torch.where(known_B[:, None, None], kv_BPSE[rows, n_closed_B], 0.0)
        cache.count_B = torch.where(known_B, count_BP[rows, n_closed_B], 0.0)
        for name, all_BGC in (("k_quad_BCS", k_quad_BGCS), ("k_lin_BCS", k_lin_BGCS), ("v_BCE", v_BGCE)):
            setattr(cache, name, F.pad(all_BGC, [0, 0, 0, 0, 0, 1])[rows, n_closed_B])
        return out_BGCE.flatten(1, 2).gather(1, place_BN.clamp(min=0)[..., None].expand_as(v_BNE))


def init_gau(layer: GatedAttentionUnit) -> None:
    """Code 6's and Code 8's initial values:
    normal(0, 0.02) for matrices, scales and the position bias, 0 for offsets."""
    for matrix in (layer.in_proj.weight, layer.out_proj.weight, layer.scale_offset.gamma,
                   *layer.rel_pos_bias.parameters()):
        nn.init.normal_(matrix, std=0.02)
    for offset in (layer.in_proj.bias, layer.out_proj.bias, layer.scale_offset.beta):
        nn.init.zeros_(offset)
    for name, parameter in layer.norm.named_parameters():
        nn.init.zeros_(parameter) if name == "bias" else nn.init.ones_(parameter)
