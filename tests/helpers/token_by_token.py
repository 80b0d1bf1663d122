"""Every attention layer of the paper token by token, in plain loops, for one row: no masks, no
chunks as tensors, no running sums, and nothing of the package but the configuration's fields. A
layer is given by its configuration and its weights under the package's names; `ids` is the document
of each token, -1 for padding, whose output means nothing. Gradients flow into weights and x."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.config import ModelConfig

Weights = dict[str, Tensor]


def layer_output(config: ModelConfig, w: Weights, x_TD: Tensor, ids: list[int]) -> Tensor:
    return gau(config, w, x_TD, ids) if config.ffn == "gau" else multi_head(config, w, x_TD, ids)


def normed(x: Tensor, w: Weights, name: str = "norm") -> Tensor:
    if f"{name}.scalar" in w:
        return w[f"{name}.scalar"] * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    x = x - x.mean(-1, keepdim=True)
    return w[f"{name}.weight"] * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() + w[f"{name}.bias"]


def shifted(config: ModelConfig, x_TD: Tensor, ids: list[int]) -> Tensor:
    """With `token_shift` half of the features are those of the token before, if of the document."""
    if not config.token_shift:
        return x_TD
    half, none_F = config.d_model // 2, torch.zeros_like(x_TD[0, config.d_model // 2 :])
    return torch.stack([torch.cat([x_TD[t - 1, :half] if t and ids[t - 1] == ids[t] else none_F, x_D[half:]])
                        for t, x_D in enumerate(x_TD)])


def dense(x: Tensor, w: Weights, name: str) -> Tensor:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def turned(x_K: Tensor, position: int, base: float = 10000.0, n_turned: int | None = None) -> Tensor:
    """RoPE: pairs (k, k + K / 2) turned by position x base^(-2 k / K); with n_turned in place of K
    the first n_turned / 2 pairs alone."""
    a, b = x_K.chunk(2)
    n = len(a) if n_turned is None else n_turned // 2
    angle = torch.zeros(len(a), dtype=x_K.dtype)
    angle[:n] = position * base ** (-torch.arange(n, dtype=x_K.dtype) / n)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def activation(config: ModelConfig, x: Tensor) -> Tensor:
    return x * (torch.sigmoid(x) if config.activation == "silu" else 0.5 * (1 + torch.erf(x / 2**0.5)))


def position_bias(w: Weights, name: str, offset: int) -> Tensor:
    """Code 4, at key position minus query position."""
    if f"{name}.weight" in w:
        table = w[f"{name}.weight"]
        return table[offset + len(table) // 2]
    return turned(w[f"{name}.a"], 0) @ turned(w[f"{name}.b"], offset)


def weights(kernel: str, q_K: Tensor, k_LK: Tensor, bias_L: Tensor | float, n: int) -> Tensor:
    if kernel == "relu2":
        return F.relu(k_LK @ q_K / n + bias_L).square()
    return (k_LK @ q_K / len(q_K) ** 0.5 + bias_L).softmax(0)


def mates(ids: list[int], t: int) -> list[int]:
    return [j for j in range(len(ids)) if ids[j] == ids[t] and ids[t] >= 0]


def near(config: ModelConfig, ids: list[int], t: int) -> list[int]:
    """The keys of quadratic attention: the document's tokens in the row, or in the chunk and with
    `overlap` its neighbours; not later ones when causal."""
    keys = [j for j in mates(ids, t) if j <= t or not config.causal]
    if config.chunk_size is None:
        return keys
    return [j for j in keys if abs(j // config.chunk_size - t // config.chunk_size) <= config.overlap]


def quadratic(config: ModelConfig, w: Weights, q_TK: Tensor, k_TK: Tensor, v_TE: Tensor, ids: list[int],
              t: int) -> Tensor:
    keys = near(config, ids, t)
    if not keys or config.chunk_parts == "global":
        return torch.zeros_like(v_TE[t])
    bias_L: Tensor | float = 0.0
    if config.position_bias and (config.ffn == "gau" or config.attn_kernel == "relu2"):
        bias_L = torch.stack([position_bias(w, "rel_pos_bias", j - t) for j in keys])
    kernel = "softmax" if config.cls_softmax and t == 0 else config.attn_kernel
    return weights(kernel, q_TK[t], k_TK[keys], bias_L, config.scale_len) @ v_TE[keys]


def convolved(config: ModelConfig, w: Weights, z_TS: Tensor, ids: list[int]) -> Tensor:
    """Each dimension of z times a weight per place, summed over the document's tokens in a window
    that ends at the token, or when not causal has it in the middle."""
    if not config.key_conv:
        return z_TS
    own = config.key_conv - 1 if config.causal else config.key_conv // 2
    return torch.stack([sum((w["key_conv.taps"][j - t + own] * z_TS[j] for j in mates(ids, t)
                             if 0 <= j - t + own < config.key_conv), torch.zeros_like(z_TS[t]))
                        for t in range(len(ids))])


def gates(config: ModelConfig, w: Weights, near_TS: Tensor, head: int) -> Tensor:
    """The gate of each token's key in a head: sigmoid(w z + b) by its slice of z; or 1."""
    if not config.linear_gate:
        return torch.ones(len(near_TS), dtype=near_TS.dtype)
    width = near_TS.shape[1] // config.n_heads
    mine = slice(head * width, (head + 1) * width)
    return 1 / (1 + torch.exp(-near_TS[:, mine] @ w["linear_gate.weight"][mine] - w["linear_gate.bias"][head]))


def linear(config: ModelConfig, q_TK: Tensor, k_TK: Tensor, v_TE: Tensor, ids: list[int], t: int,
           gate_T: Tensor) -> Tensor:
    """Over the document's tokens in earlier chunks when causal, over all of them when not."""
    out_E, c = torch.zeros_like(v_TE[t]), config.chunk_size
    if config.chunk_parts == "local":
        return out_E
    keys = [j for j in mates(ids, t) if j // c < t // c or not config.causal]
    divisor = {"mean": len(keys), "sum": 1,
               "written": sum((gate_T[j] for j in keys), torch.zeros(())).clamp(min=1)}[config.chunk_pooling]
    for j in keys:
        out_E = out_E + (q_TK[t] @ k_TK[j]) * gate_T[j] * v_TE[j] / divisor
    return out_E


def linear_by_learned_weights(config: ModelConfig, w: Weights, z_TS: Tensor, q_TK: Tensor, k_TK: Tensor, v_TE: Tensor,
                              ids: list[int], t: int, gate_T: Tensor) -> Tensor:
    """Appendix A: chunk h has the weight relu(q_g k_h / G + b)^2, made from the means of z of two
    chunks, and enters as the mean of k v over its tokens. When causal chunk g asks by the mean of
    the chunk before it."""
    c, out_E = config.chunk_size, torch.zeros_like(v_TE[t])
    if ids[t] < 0:
        return out_E
    chunks = [[j for j in range(start, min(start + c, len(ids))) if ids[j] >= 0] for start in range(0, len(ids), c)]
    means = [z_TS[chunk].mean(0) if chunk else None for chunk in chunks]
    gamma, beta = w["chunk_scale_offset.gamma"], w["chunk_scale_offset.beta"]
    g = t // c
    for h, chunk in enumerate(chunks):
        if not chunk or (config.causal and h >= g):
            continue
        q_S = means[g - 1 if config.causal else g] * gamma[0] + beta[0]
        k_S = means[h] * gamma[1] + beta[1]
        score = q_S @ k_S / -(-config.context // c) + position_bias(w, "chunk_bias", h - g)
        for j in chunk:
            out_E = out_E + F.relu(score).square() * (q_TK[t] @ k_TK[j]) * gate_T[j] * v_TE[j] / len(chunk)
    return out_E


def gau(config: ModelConfig, w: Weights, x_TD: Tensor, ids: list[int]) -> Tensor:
    """Eqs. 3-5, and Section 3.2 with chunks; a head takes its slice of z's scaled copies and v."""
    n_tokens, e, s, n_heads = len(x_TD), config.d_inner, config.query_key_dim, config.n_heads
    u_TE, v_TE, z_TS = activation(config, dense(shifted(config, normed(x_TD, w), ids), w,
                                                "in_proj")).split([e, e, s], dim=1)
    near_TS = convolved(config, w, z_TS, ids)
    made = []
    for n, (gamma, beta) in enumerate(zip(w["scale_offset.gamma"], w["scale_offset.beta"], strict=True)):
        of_near = {1} if config.chunk_size is None else {1, 3} if config.local_key_conv else {3}
        x_TS = (near_TS if n in of_near else z_TS) * gamma + beta
        turns = config.rel_pos is not None and (config.linear_rope or n not in (2, 3))
        made.append([torch.stack([turned(x_K, t, config.rope_base, config.rotary_dim) for t, x_K in enumerate(x_TK)])
                     if turns else x_TK
                     for x_TK in x_TS.split(s // n_heads, dim=1)])
    rows = []
    for t in range(n_tokens):
        heads = []
        for head, (v_TF, *made_TS) in enumerate(zip(v_TE.split(e // n_heads, dim=1), *made, strict=True)):
            out_F = quadratic(config, w, made_TS[0], made_TS[1], v_TF, ids, t)
            gate_T = gates(config, w, near_TS, head)
            if config.chunk_size is not None and config.chunk_pooling == "attention":
                out_F = out_F + linear_by_learned_weights(config, w, z_TS, made_TS[2], made_TS[3], v_TF, ids, t, gate_T)
            elif config.chunk_size is not None:
                out_F = out_F + linear(config, made_TS[2], made_TS[3], v_TF, ids, t, gate_T)
            if config.first_to_all and t % config.chunk_size == 0 and ids[t] >= 0:
                keys = mates(ids, t)
                out_F = out_F + weights("softmax", made_TS[4][t], made_TS[5][keys], 0.0, 1) @ v_TF[keys]
            heads.append(out_F)
        attended_E = torch.cat(heads)
        rows.append(u_TE[t] * attended_E if config.gate else torch.cat([u_TE[t], attended_E]))
    return x_TD + dense(torch.stack(rows), w, "out_proj")


def gained(x_TD: Tensor, gain_K: Tensor) -> Tensor:
    """Each head's slice over its root mean square (its square plus 1e-6), times a gain."""
    x_THK = x_TD.unflatten(1, (-1, len(gain_K)))
    return (x_THK / (x_THK.square().mean(2, keepdim=True) + 1e-6).sqrt() * gain_K).flatten(1)


def multi_head(config: ModelConfig, w: Weights, x_TD: Tensor, ids: list[int]) -> Tensor:
    """Softmax, relu^2, MC-TFM++, Performer or Combiner; perhaps gated (Eq. 3)."""
    n_tokens, n_heads, width = len(x_TD), config.n_heads, config.d_model // config.n_heads
    xn_TD = shifted(config, normed(x_TD, w), ids)
    q_TD, k_TD, v_TD, *gate = dense(xn_TD, w, "in_proj").split(config.d_model, dim=1)

    def heads(x_TD: Tensor, rotate: bool = True) -> list[Tensor]:
        split = x_TD.view(n_tokens, n_heads, width).unbind(1)
        if config.rel_pos is None or not rotate:
            return list(split)
        return [torch.stack([turned(x_K, t, config.rope_base, config.rotary_dim) for t, x_K in enumerate(x_TK)])
                for x_TK in split]

    near_TD = convolved(config, w, k_TD, ids)
    if config.chunk_size is None:
        k_TD = near_TD
    if config.qk_norm:
        q_TD, k_TD = (gained(x_TD, w[f"{name}.weight"]) for x_TD, name in ((q_TD, "query_norm"), (k_TD, "key_norm")))
    qs, ks, vs = heads(q_TD), heads(near_TD if config.local_key_conv else k_TD), heads(v_TD, rotate=False)
    if config.attn_type == "rowmajor_axial":
        attended_TD = combiner(config, w, xn_TD, qs, ks, vs, ids)
        return x_TD + dense(attended_TD, w, "out_proj")
    q_lins, k_lins = qs, ks
    if config.attn_type == "mixed_chunk":
        gamma, beta = w["scale_offset.gamma"], w["scale_offset.beta"]
        q_lins, k_lins = (heads(x_TD, config.linear_rope)
                          for x_TD in (q_TD * gamma[0] + beta[0], near_TD * gamma[1] + beta[1]))
    rows = []
    for t in range(n_tokens):
        outs = []
        for head, (q, k, v, q_lin, k_lin) in enumerate(zip(qs, ks, vs, q_lins, k_lins, strict=True)):
            if config.attn_type == "linear":
                outs.append(performer(config, q, k, v, ids, t))
                continue
            out_K = quadratic(config, w, q, k, v, ids, t)
            if config.chunk_size is not None:
                gate_T = gates(config, w, near_TD, head)
                out_K = out_K + linear(config, q_lin, k_lin, v, ids, t, gate_T)
            outs.append(out_K)
        rows.append(torch.cat(outs))
    attended_TD = torch.stack(rows)
    if gate:
        attended_TD = activation(config, gate[0]) * attended_TD
    return x_TD + dense(attended_TD, w, "out_proj")


def performer(config: ModelConfig, q_TK: Tensor, k_TK: Tensor, v_TK: Tensor, ids: list[int], t: int) -> Tensor:
    """sum_s (phi(q_t) phi(k_s)) v_s / sum_s phi(q_t) phi(k_s), phi(x) = relu(x) + 1e-3; s <= t."""
    numerator, denominator = torch.zeros_like(v_TK[t]), torch.ones_like(v_TK[t, 0]) * (ids[t] < 0)
    for s in (s for s in mates(ids, t) if s <= t or not config.causal):
        weight = (F.relu(q_TK[t]) + 1e-3) @ (F.relu(k_TK[s]) + 1e-3)
        numerator, denominator = numerator + weight * v_TK[s], denominator + weight
    return numerator / denominator


def combiner(config: ModelConfig, w: Weights, xn_TD: Tensor, qs: list[Tensor], ks: list[Tensor], vs: list[Tensor],
             ids: list[int]) -> Tensor:
    """The document in rows of C tokens. summary(f, i): what the token at place i of row f sees of
    its whole row; its key is made from the token's x and all heads' summaries. A token sees its row
    up to itself and the summaries of earlier rows for its place; not causal: all of both."""
    n_tokens, n_heads, width = len(xn_TD), config.n_heads, config.d_model // config.n_heads
    start = [ids.index(ids[t]) if ids[t] >= 0 else t for t in range(n_tokens)]
    row = [(t - start[t]) // config.chunk_size for t in range(n_tokens)]
    place = [(t - start[t]) % config.chunk_size for t in range(n_tokens)]
    value, key = [], []
    for t in range(n_tokens):
        mine = [j for j in mates(ids, t) if row[j] == row[t]] or [t]
        value.append([(ks[h][mine] @ qs[h][t] / width**0.5).softmax(0) @ vs[h][mine] for h in range(n_heads)])
        made_D = dense(normed(xn_TD[t] + dense(torch.cat(value[t]), w, "summary_proj"), w, "summary_norm"), w,
                       "summary_key")
        key.append([turned(part_K, t, config.rope_base) for part_K in made_D.split(width)])
    rows = []
    for t in range(n_tokens):
        outs = []
        direct = [j for j in mates(ids, t) if row[j] == row[t] and (j <= t or not config.causal)]
        asked = [j for j in mates(ids, t) if place[j] == place[t] and (row[j] < row[t] or not config.causal)]
        for h in range(n_heads):
            if not direct:
                outs.append(torch.zeros_like(vs[h][t]))
                continue
            keys_LK = torch.cat([ks[h][direct], *[key[j][h][None] for j in asked]])
            values_LK = torch.cat([vs[h][direct], *[value[j][h][None] for j in asked]])
            outs.append((keys_LK @ qs[h][t] / width**0.5).softmax(0) @ values_LK)
        rows.append(torch.cat(outs))
    return torch.stack(rows)


def add_up_states(kv_BGSE: Tensor, last_BG: Tensor, entering_BP: Tensor) -> Tensor:
    """`sum_states` without a product: one chunk after the other is added where it belongs."""
    rows = []
    for kv_GSE, last_G, entering_P in zip(kv_BGSE, last_BG.tolist(), entering_BP.tolist(), strict=True):
        places = []
        for place, document in enumerate(entering_P):
            total_SE = torch.zeros_like(kv_GSE[0])
            for chunk in range(min(place, len(last_G))):
                if last_G[chunk] == document:
                    total_SE = total_SE + kv_GSE[chunk]
            places.append(total_SE)
        rows.append(torch.stack(places))
    return torch.stack(rows)
