"""Who is measured: our models, the paper's unfused attention, and others' models at the size of ours."""

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lineartime.attention.softmax import Softmax
from lineartime.config import PRESETS, ModelConfig
from lineartime.layers import SequenceInfo, rotate_heads
from lineartime.mhsa import MultiHeadAttention
from lineartime.model import LanguageModel
from lineartime.ops.cross_entropy import linear_cross_entropy
from lineartime.ops.dtypes import at_least_float32
from lineartime.settings import require, require_name

PEER = "flash-pytorch"
"""Others' FLASH, which is given the size of ours."""

VARIANTS = {"unfused": "unfused", "reference": "reference", "compile": "compiled", "compiled": "compiled",
            "checkpoint": "checkpointed", "checkpointed": "checkpointed", "windowed": "windowed"}
"""What may stand behind a model, and its name in a `Label`, which has them in this order."""

WINDOW_TOKENS = 4096
"""Tokens of a window of a row that is "windowed", see `distributed.windows`."""

CUDA_ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
                  SDPBackend.MATH]
"""The fastest first; torch's own order has FlashAttention-2 there."""


@dataclass(frozen=True)
class Label:
    """A model and how it is run: `transformer++:unfused:compiled`."""

    model: str
    how: tuple[str, ...] = ()
    """Names among the values of `VARIANTS`."""

    @property
    def text(self) -> str:
        return ":".join([self.model, *self.how])

    @property
    def variant(self) -> str:
        less_memory = [f"+{name}" for name in ("checkpointed", "windowed") if name in self.how]
        return "".join(["compiled" if "compiled" in self.how else "eager", *less_memory])

    def n_windows(self, n_tokens: int) -> int:
        """Windows of a row of so many tokens."""
        return max(n_tokens // WINDOW_TOKENS, 1) if "windowed" in self.how else 1

    @property
    def preset(self) -> str:
        """The model of ours that it is, or whose size it has."""
        return "flash" if self.model == PEER else self.model


def parse_label(text: str) -> Label:
    """A model and its variants, with colons. Raises UsageError for an unknown one and for what does not go together."""
    model, *names = text.split(":")
    require_name("model", model, [*PRESETS, PEER])
    for name in names:
        require_name("variant", name, VARIANTS)
    how = {VARIANTS[name] for name in names}
    label = Label(model, tuple(name for name in dict.fromkeys(VARIANTS.values()) if name in how))
    preset, is_peer = PRESETS[label.preset], model == PEER
    fused = (preset.attn_type, preset.attn_kernel) == ("quadratic", "softmax")
    for wrong, why in (
            ("unfused" in how and not fused, "only the Transformers have a fused attention"),
            (is_peer and how & {"checkpointed", "windowed", "reference"},
             "a peer has no activation checkpointing, windows or reference of ours"),
            ("windowed" in how and preset.attn_type not in ("mixed_chunk", "linear"),
             "windows are for mixed chunk attention and Performer"),
            ({"windowed", "checkpointed"} <= how, "windows need no activation checkpointing"),
            ({"reference", "unfused"} <= how, "unfused attention is a reference already")):
        require(not wrong, why, text)
    return label


def build(label: Label, config: ModelConfig) -> "LanguageModel | Peer":
    """The model, not compiled, with new weights from torch's generator. A peer has the sizes of `config`, the head's
    matrix tied to the embedding as in ours, and our initial values for matrices. Raises UsageError where it is not
    installed."""
    if label.model != PEER:
        model = LanguageModel(config)
        model.activation_checkpointing = "checkpointed" in label.how
        if "reference" in label.how:
            model.set_impl("reference")
        for layer in model.layers:
            if "unfused" in label.how and isinstance(layer, MultiHeadAttention):
                layer.__class__ = UnfusedMultiHeadAttention  # the same weights, another core
        return model
    require(importlib.util.find_spec("flash_pytorch") is not None, "a peer is not installed", label.model,
            "pip install 'FLASH-pytorch>=0.1.9'")
    from flash_pytorch import FLASHTransformer

    body = FLASHTransformer(
        num_tokens=config.vocab_size, dim=config.d_model, depth=config.n_layers, causal=config.causal,
        group_size=config.chunk_size, query_key_dim=config.query_key_dim, expansion_factor=config.expansion_factor,
        norm_type="layernorm" if config.norm == "layer_norm" else "scalenorm", attn_dropout=0.0,
        shift_tokens=False)  # which costs time, and which FLASH has not
    head, body.to_logits[1] = body.to_logits[1], nn.Identity()
    head.weight = body.token_emb.weight
    for parameter in body.parameters():
        if parameter.requires_grad and parameter.dim() >= 2:
            nn.init.normal_(parameter, 0, 0.02)
    return Peer(body, head)


class Peer(nn.Module):
    """Another's model, called as ours are: ids to logits, or with targets to losses by the same function."""

    def __init__(self, body: nn.Module, head: nn.Linear):
        super().__init__()
        self.body, self.head = body, head

    def forward(self, ids_BT: Tensor, *, at_K: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        x_BTD = self.body(ids_BT)
        x = x_BTD if at_K is None else x_BTD.flatten(0, 1)[at_K]
        if targets is None:
            return self.head(x)
        x_ND, targets_N = x.flatten(end_dim=-2), targets.flatten()
        return linear_cross_entropy(x_ND, self.head.weight, self.head.bias, targets_N).view(targets.shape)

    def compile_layers(self) -> None:
        """torch.compile in place, the head and the loss left out."""
        self.body.compile()


class Unfused(Softmax):
    """The softmax core with every T x T matrix in memory; for rows of one document."""

    def attend(self, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, x_BTD: Tensor, info: SequenceInfo) -> Tensor:
        """softmax(q k^T / sqrt(K)) v, as the paper's Transformers had it."""
        assert info.cu_seqlens is None
        q_BTHK, k_BTHK = rotate_heads(q_BTHK, info), rotate_heads(k_BTHK, info)
        score_BHTL = at_least_float32(torch.einsum("bthk,blhk->bhtl", q_BTHK / q_BTHK.shape[-1] ** 0.5, k_BTHK))
        if self.config.causal:
            visible_TL = torch.ones(score_BHTL.shape[-2:], dtype=torch.bool, device=score_BHTL.device).tril()
            score_BHTL = score_BHTL.masked_fill(~visible_TL, torch.finfo(score_BHTL.dtype).min)
        return torch.einsum("bhtl,blhk->bthk", score_BHTL.softmax(-1).to(v_BTHK.dtype), v_BTHK).flatten(2)


class UnfusedMultiHeadAttention(MultiHeadAttention):
    """The layer of a Transformer as the paper timed it."""

    @property
    def core(self) -> Unfused:
        return Unfused(self.config)


def attention_backend(device: torch.device) -> AbstractContextManager[Any]:
    """Fused attention takes cuDNN's kernel first on a GPU."""
    return sdpa_kernel(CUDA_ATTENTION, set_priority=True) if device.type == "cuda" else nullcontext()
