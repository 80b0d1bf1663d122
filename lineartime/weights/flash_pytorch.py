"""FLASH-pytorch's layers and model (0.1.9) as ours. Its modules are known by the names of their
classes and attributes: the package need not be there."""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from lineartime.base.settings import require
from lineartime.config import FLASH, TOEPLITZ_BELOW
from lineartime.model.gau import GatedAttentionUnit
from lineartime.model.language_model import LanguageModel, Undrawn

NORMS = ("LayerNorm", "norm.weight", "norm.bias"), ("ScaleNorm", "norm.scalar")
UNCLAMPED = 1e-20  # `norm_eps` for their ScaleNorm, which divides by max(norm, eps): tokens of nearly 0 alone differ


@torch.no_grad()
def from_flash_pytorch(module: nn.Module, length: int | None = None) -> GatedAttentionUnit | LanguageModel:
    """FLASH-pytorch's FLASH or GAU as a `GatedAttentionUnit`, its FLASHTransformer as a
    `LanguageModel`: the same outputs, by copies of the weights in their dtype, on their device.

    length: for a GAU, the tokens of a row. There attention is divided by each row's length, here by
    this one. Raises UsageError for another module, and for what our fields do not express."""
    theirs, is_model = cast(Any, module), type(module).__name__ == "FLASHTransformer"
    require(is_model or type(module).__name__ in ("FLASH", "GAU"), "not a module of FLASH-pytorch",
            type(module).__name__, "give its FLASH, GAU or FLASHTransformer")
    parts = [of_layer(layer, length) for layer in (theirs.layers if is_model else [theirs])]
    fields, weights = parts[0]
    if is_model:
        require(all(each == fields for each, _ in parts), "layers that differ", "fields", "convert each by itself")
        norm, head = theirs.to_logits
        fields |= {"n_layers": len(parts), "vocab_size": len(head.bias), "head_norm": "layer_norm", "tied_head": False}
        weights = {f"layers.{i}.{name}": weight for i, (_, own) in enumerate(parts) for name, weight in own.items()} | {
            "embed.weight": theirs.token_emb.weight, "abs_pos.scalar": theirs.abs_pos_emb.scale,
            "norm.weight": norm.weight, "norm.bias": norm.bias, "head_weight": head.weight, "head_bias": head.bias}
    with torch.device("meta"), Undrawn():  # without values of its own: the weights become its parameters
        ours = LanguageModel(replace(FLASH, **fields)) if is_model else GatedAttentionUnit(**fields)
    ours.load_state_dict({name: weight.clone() for name, weight in weights.items()}, assign=True)
    return ours.train(module.training)


def of_layer(theirs: Any, length: int | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The fields of a FLASH or a GAU, and its parameters by our names."""
    in_chunks, causal, hidden, qk = hasattr(theirs, "group_size"), theirs.causal, theirs.to_hidden[0], theirs.to_qk[0]
    n, s, rotary = getattr(theirs, "group_size", length or 0), qk.out_features, getattr(theirs, "rotary_pos_emb", None)
    require(n > 0, "a GAU there divides by each row's length, here by one", "length", "give that of your rows")
    norm, eps = ("scale_norm", UNCLAMPED) if hasattr(theirs.norm, "g") else ("layer_norm", vars(theirs.norm).get("eps"))
    weights = {f"norm.{'scalar' if name == 'g' else name}": part for name, part in theirs.norm.named_parameters()}
    # The base of RoPE behind their frequencies, which are rounded; the first is 1 with any base.
    freqs_P = torch.ones(1).double() if rotary is None else rotary.freqs.double().cpu() / rotary.interpolate_factor
    power_P = -torch.arange(len(freqs_P)).double() / len(freqs_P)
    bases = [base for base in (1e4, (freqs_P.log() / power_P)[-1].exp().item()) if torch.allclose(
        freqs_P, base**power_P, rtol=max(torch.finfo(hidden.weight.dtype).eps, 1e-6), atol=0)]
    # What has no field.
    wrong = [argument for argument, is_so in {
        "laplace_attn_fn = True": type(theirs.attn_fn).__name__ != "ReLUSquared",
        "reduce_group_non_causal_attn = False": not (causal or getattr(theirs, "reduce_group_non_causal_attn", True)),
        f"a table of position biases for {n} tokens, more than {TOEPLITZ_BELOW - 1}": n >= TOEPLITZ_BELOW,
        f"norm = {theirs.norm}": (type(theirs.norm).__name__, *weights) not in NORMS,
        "frequencies of RoPE but base^(-2i / dim)": bases == []}.items() if is_so]
    require(wrong == [], "no field of ours expresses it", ", ".join(wrong), "train one without it")
    fields = {"d_model": qk.in_features, "query_key_dim": s, "causal": causal, "norm": norm, "norm_eps": eps,
              "expansion_factor": hidden.out_features / 2 / qk.in_features, "dropout": theirs.dropout.p,
              "token_shift": getattr(theirs, "shift_tokens", False), "residual": getattr(theirs, "add_residual", True),
              **({"rel_pos": None} if rotary is None else {"rotary_dim": 2 * len(freqs_P), "rope_base": bases[0]}),
              **({"chunk_size": n, "chunk_pooling": "sum" if causal else "mean"} if in_chunks else {"context": n})}
    # RoPE turns features 2i and 2i + 1 there, i and i + S / 2 here. Sums of k v are divided there.
    pairs_S, order_N = [*range(0, s, 2), *range(1, s, 2)], [0, 2, 1, 3] if in_chunks else [0, 1]
    divisor_N1 = hidden.weight.new_tensor([[1], [1], [n if causal else 1], [1]])[: len(order_N)]
    out, heads = (theirs.to_out, theirs.qk_offset_scale) if in_chunks else (theirs.to_out[0], theirs.offsetscale)
    for name in ("gamma", "beta"):
        weights[f"scale_offset.{name}"] = getattr(heads, name)[order_N][:, pairs_S] / divisor_N1
    for name in ("weight", "bias"):
        v, gate = getattr(hidden, name).chunk(2)
        weights[f"in_proj.{name}"] = torch.cat([gate, v, getattr(qk, name)[pairs_S]])
        weights[f"out_proj.{name}"] = getattr(out, name)
    bias_NN = theirs.rel_pos_bias(hidden.weight.new_zeros(n, n)) / (1 if in_chunks else n)
    return fields, weights | {"rel_pos_bias.weight": torch.cat([bias_NN[-1], bias_NN[0, 1:]])}
