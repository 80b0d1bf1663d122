"""One language model for all models of the paper: embedding, layers, norm, and a tied head."""

import importlib
import operator
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lineartime.base.errors import UsageError, raised_as
from lineartime.base.ranks import ALONE, Ranks
from lineartime.base.settings import require
from lineartime.config import ModelConfig, check_context_parallel
from lineartime.model.decoding import compiled_step
from lineartime.model.decoding.cache import Cache
from lineartime.model.decoding.inputs import DecodeInputs
from lineartime.model.decoding.state import DecodingState
from lineartime.model.gau import GatedAttentionUnit
from lineartime.model.layers import ResidualLayer, ScaledSin, SequenceInfo, make_norm, norm_parameters, sequence_info
from lineartime.model.layout import Layout, check_shape, lay_out
from lineartime.model.mhsa import FeedForward, MultiHeadAttention
from lineartime.ops.dtypes import float16_as_float32, wide_dtype
from lineartime.ops.reference import add_norm


class LanguageModel(nn.Module):
    """Tokens to logits, for every preset of `config.PRESETS`.

    The token `config.end_of_document` starts a new document in a row; attention does not cross
    documents, unless `document_mask` is "paper". At `end_tokens` `generate` ends a text."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        require(config.residual and config.norm is not None, "norm = none and residual = false are for a layer alone",
                f"norm = {config.norm}, residual = {config.residual}", "leave them out")
        self.config = config
        self.end_tokens = {config.end_of_document} - {None}
        self.activation_checkpointing = False
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.abs_pos = (ScaledSin(config.d_model) if config.abs_pos == "scaled_sin"
                        else nn.Embedding(config.context, config.d_model))
        block = ("gau",) if config.ffn == "gau" else ("attention", "ffn")
        self.layers = nn.ModuleList(layer_class(name)(config.of_layer(name) if config.layers else config)
                                    for name in config.layers or block * config.n_layers)
        rotated = [(kind.qk_width, kind.rope_base, kind.n_rotated) for kind in config.kinds]
        for c in (layer.config for layer in self.residual_layers()):  # `sequence_info` makes the angles of all
            rope = (c.qk_width, c.rope_base, c.n_rotated)
            require(rope in rotated, "a layer's heads and RoPE are the model's", "width, rope_base, features rotated = "
                    f"{rope}", "leave query_key_dim, n_heads, rope_base and rotary_dim as the layer is given them")
        self.layers_per_block = len(self.layers) // config.n_layers
        self.norm = make_norm(config, config.head_norm)
        self.head_weight = None if config.tied_head else nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        self.head_bias = nn.Parameter(torch.empty(config.vocab_size))
        init_weights(self)

    def forward(self, ids_BT: Tensor, segment_ids_BT: Tensor | None = None, token_mask_BT: Tensor | None = None,
                at_K: Tensor | None = None, targets: Tensor | None = None, ranks: Ranks = ALONE) -> Tensor:
        """logits_BTV of the next token (causal) or of the token itself (not causal), or losses.

        ids_BT: integers below `vocab_size`. segment_ids_BT, token_mask_BT: see `lay_out`; by
        default a new document starts at each `config.end_of_document`. at_K: indices into the
        flattened rows; only the logits_KV of these tokens are computed. targets: tokens `[B, T]`,
        or `[K]` with at_K, whose `losses` are returned instead. ranks: those that share the rows.
        Each gives whole rows; at_K, targets and the result are of its own part, `[B, T / W]`.
        Raises UsageError as a layer does, and for documents with learned chunk weights, rows or a
        model that ranks cannot share."""
        # The head is the largest matmul: it runs for the tokens that are asked for and no others.
        x_BTD = self.hidden(ids_BT, segment_ids_BT, token_mask_BT, ranks)
        x = x_BTD if at_K is None else x_BTD.flatten(0, 1)[at_K]
        return self.logits(x) if targets is None else self.losses(x, targets)

    def hidden(self, ids_BT: Tensor, segment_ids_BT: Tensor | None = None, token_mask_BT: Tensor | None = None,
               ranks: Ranks = ALONE, collected: list[Tensor] | None = None, embeds_BTD: Tensor | None = None) -> Tensor:
        """`forward` without the head: x_BTD after the last norm. Raises as `forward` does.

        collected: a list to which each block's input is added, `[B, T, D]`. embeds_BTD: in place of
        the embeddings of ids_BT, which then only say where documents begin; for whole rows."""
        require(ids_BT.dim() == 2, "wrong shape of ids", f"{list(ids_BT.shape)}", "give [batch, tokens]")
        self.check_length(ids_BT.shape[1])
        begins_BT = None if self.config.end_of_document is None else self.begins(ids_BT)
        laid = lay_out(self.config, ids_BT, segment_ids_BT, token_mask_BT, begins_BT)
        if ranks.size > 1:
            ids_BT, laid = self.part_of_rows(ids_BT, laid, ranks)
        info = sequence_info(self.config, laid.position_BL, wide_dtype(self.embed.weight), laid.segment_ids_BL, ranks)
        embeds_BLD = self.embed(laid.take(ids_BT)) if embeds_BTD is None else laid.take(embeds_BTD)
        x_BLD = self.run_layers(embeds_BLD, laid.position_BL, info, collected=collected)
        if collected is not None:
            collected[:] = map(laid.give_back, collected)
        return self.normed(laid.give_back(x_BLD))

    def part_of_rows(self, ids_BT: Tensor, laid: Layout, ranks: Ranks) -> tuple[Tensor, Layout]:
        """A rank's part of whole rows: ids and layout, `[B or 1, T / W]`. Positions count from the
        row's beginning. Segment id 0 is the document of the token before the part."""
        n_tokens = ids_BT.shape[1]
        check_context_parallel(replace(self.config, context=n_tokens), ranks.size)
        require(laid.order_BL is None, "ranks that share a row take no mask of tokens", "token_mask",
                "give segment ids, -1 for padding at the end of a row")
        own = ranks.share(n_tokens)
        segment_ids_BT = torch.zeros_like(ids_BT) if laid.segment_ids_BL is None else laid.segment_ids_BL
        before_B1, own_BT = segment_ids_BT[:, max(own.start - 1, 0), None], segment_ids_BT[:, own]
        return ids_BT[:, own], Layout(laid.position_BL[:, own], torch.where(own_BT >= 0, own_BT - before_B1, -1))

    def normed(self, x_BTD: Tensor) -> Tensor:
        """The norm behind the layers."""
        weight, bias, eps = norm_parameters(self.norm)
        return add_norm(x_BTD, None, weight, bias, eps)[1] if weight.dtype == torch.float16 else self.norm(x_BTD)

    def run_layers(self, embeds_BTD: Tensor, position_BT: Tensor, info: SequenceInfo, caches: Sequence[Cache] = (),
                   collected: list[Tensor] | None = None) -> Tensor:
        """All layers, without the norm after them: `[B, T, D]`. caches: for the next tokens of rows
        one for each layer that attends. collected: see `hidden`."""
        # For float16 float32, as layers add up more than 65,504.
        x_BTD = float16_as_float32(embeds_BTD) + self.abs_pos(position_BT)
        delta_BTD, remaining = None, iter(caches)
        for i, layer in enumerate(self.residual_layers()):
            if collected is not None and i % self.layers_per_block == 0:
                collected.append(x_BTD if delta_BTD is None else x_BTD + delta_BTD)
            cache = next(remaining, None) if layer.attends else None
            if self.activation_checkpointing and self.training and cache is None:
                x_BTD, delta_BTD = checkpoint(layer.add, x_BTD, delta_BTD, info, use_reentrant=False)
            else:
                x_BTD, delta_BTD = layer.add(x_BTD, delta_BTD, info, cache)
        assert delta_BTD is not None
        return x_BTD + delta_BTD

    def compile_layers(self) -> None:
        """Apply `torch.compile` to each layer in place. Layers of the same kind share compiled
        code, so compile time does not grow with depth. Parameters keep their names. On a CPU that
        g++ has no tuning for, vectors have at most 256 bits: GCC 12.2 transposes 512 wrongly."""
        from torch._inductor import config  # loads PyTorch's compiler

        if torch.backends.cpu.get_cpu_capability() == "AVX512":
            told = subprocess.getoutput(f"{config.cpp.cxx[1]} -march=native -Q --help=target").splitlines()
            config.cpp.simdlen = 256 if ["-mtune=", "generic"] in map(str.split, told) else config.cpp.simdlen
        for layer in self.residual_layers():
            layer.add = torch.compile(layer.add)  # type: ignore[method-assign]

    def set_impl(self, impl: str | None) -> None:
        for layer in self.residual_layers():
            layer.impl = impl

    def logits(self, x_BTD: Tensor) -> Tensor:
        """The head: x times its transposed matrix, plus a bias: `[..., V]` for x `[..., D]`."""
        in_c_BTV = compiled_step.logits(self, x_BTD)
        return F.linear(x_BTD, self.head_matrix, self.head_bias) if in_c_BTV is None else in_c_BTV

    @property
    def head_matrix(self) -> Tensor:
        """The head's matrix, `[V, D]`: the embedding's, unless `tied_head` is off."""
        return self.embed.weight if self.head_weight is None else self.head_weight

    def losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """-ln p of each target, in nats and float32 at least: `[...]` for x `[..., D]`, by
        `linear_cross_entropy`. Raises UsageError for targets of another shape."""
        check_shape("targets", targets, x.shape[:-1])
        from lineartime.ops.cross_entropy import linear_cross_entropy  # loads PyTorch's compiler, for a second or two

        x_ND, targets_N = x.flatten(end_dim=-2), targets.flatten()
        return linear_cross_entropy(x_ND, self.head_matrix, self.head_bias, targets_N).view(targets.shape)

    def check_length(self, length: int) -> None:
        """Raise UsageError for a row longer than the position tables allow."""
        limit = self.config.max_len
        if limit is not None and length > limit:
            raise UsageError("row longer than the position table", f"{length} tokens, the table has {limit}",
                             "train with a larger context, or use a model without a table (flash)")

    @torch.no_grad()
    def init_outer_weights(self) -> None:
        """Set the initial values outside the layers."""
        nn.init.normal_(self.embed.weight, std=self.config.init_std)
        if isinstance(self.abs_pos, ScaledSin):
            nn.init.constant_(self.abs_pos.scalar, self.config.d_model**-0.5)
        else:
            nn.init.normal_(self.abs_pos.weight, std=self.config.init_std)
        for name, parameter in self.norm.named_parameters():
            nn.init.constant_(parameter, 0.0 if name == "bias" else 1.0)
        if self.head_weight is not None:
            nn.init.normal_(self.head_weight, std=self.config.init_std)
        nn.init.zeros_(self.head_bias)

    def in_sizes(self) -> dict[str, tuple[int, ...]]:
        """`ResidualLayer.in_sizes` of all layers, by the name of the parameter."""
        return {f"layers.{i}.in_proj.weight": layer.in_sizes for i, layer in enumerate(self.residual_layers())
                if layer.in_sizes}

    def residual_layers(self) -> Iterable[ResidualLayer]:
        return cast(Iterable[ResidualLayer], self.layers)

    @property
    def decodes(self) -> bool:
        """Whether it writes token by token: by its configuration, and by its own layers."""
        return self.config.decodes and not any(
            layer.attends and type(layer).empty_cache is ResidualLayer.empty_cache for layer in self.residual_layers())

    def decoding_state(self, batch_size: int) -> DecodingState:
        """The state of `batch_size` rows that have no token yet, with a cache for each layer that
        attends. Raises UsageError for a model that does not decode."""
        caches = [cache for layer in self.residual_layers() for cache in layer.caches(batch_size)]
        return DecodingState.of_rows(batch_size, self.embed.weight.device, caches, self)

    def extend(self, ids_BN: Tensor, n_new_B: Tensor | None = None, cache: DecodingState | None = None,
               collected: list[Tensor] | None = None, embeds_BND: Tensor | None = None) -> tuple[Tensor, DecodingState]:
        """`hidden` for the next tokens of each row, `[B, N, D]`, in however many calls they come,
        and the cache, which is changed. ids_BN: row b's next `n_new_B[b]` tokens, by default all,
        then padding, any ids of the vocabulary. cache: of `decoding_state`; None: the rows begin.
        Raises UsageError past the end of a position table, and as `DecodingState.check`."""
        state = self.decoding_state(len(ids_BN)) if cache is None else cache
        state.check(self, ids_BN.shape[0])
        embeds_BND = self.embed(ids_BN) if embeds_BND is None else embeds_BND
        if ids_BN.numel() == 0:
            return self.normed(embeds_BND), state

        def read(embeds_BND: Tensor, inputs: DecodeInputs) -> list[Tensor]:
            self.check_length(inputs.longest)
            blocks: list[Tensor] = []
            x_BND = self.extend_layers(embeds_BND, inputs, state.caches, None if collected is None else blocks)
            return [x_BND, *blocks]

        n_new_B = torch.full_like(ids_BN[:, 0], ids_BN.shape[1]) if n_new_B is None else n_new_B
        begins_BN = self.begins(ids_BN)
        in_c_BND = None if collected is not None else compiled_step.extend(
            self, embeds_BND, begins_BN, n_new_B, state, empty_model)
        if in_c_BND is not None:
            return in_c_BND, state
        x_BND, *blocks = state.read(self.config, read, embeds_BND, begins_BN, n_new_B)
        if collected is not None:
            collected += blocks
        return x_BND, state

    def begins(self, ids_BN: Tensor) -> Tensor:
        """True for tokens that start a document."""
        end = self.config.end_of_document
        return ids_BN == (-1 if end is None else end)

    def extend_layers(self, embeds_BND: Tensor, inputs: DecodeInputs, caches: Sequence[Cache],
                      collected: list[Tensor] | None = None) -> Tensor:
        """`extend`, but only the caches are updated."""
        position_BN = inputs.position_BN
        if self.config.max_len is not None:  # padding may count past the table's end; nobody reads what it gets
            position_BN = position_BN.clamp(max=self.config.max_len - 1)
        info = sequence_info(self.config, position_BN, wide_dtype(self.embed.weight), inputs=inputs)
        return self.normed(self.run_layers(embeds_BND, position_BN, info, caches, collected))


def layer_class(name: str) -> type[ResidualLayer]:
    """The class of a layer in `ModelConfig.layers`; MODULE:CLASS is imported. Raises UsageError
    where it is not to be found."""
    if ":" not in name:
        return {"attention": MultiHeadAttention, "ffn": FeedForward}.get(name, GatedAttentionUnit)
    module, _, path = name.partition(":")
    with raised_as(UsageError, "no such layer", name, ImportError, AttributeError):
        found = operator.attrgetter(path)(importlib.import_module(module))
    require(isinstance(found, type) and issubclass(found, ResidualLayer), "not a layer", name,
            "it must be a class derived from lineartime.ResidualLayer")
    return found


@torch.no_grad()
def init_weights(model: LanguageModel) -> None:
    """Set the initial values, in place, from torch's global generator.

    | parameter | value |
    |---|---|
    | weight matrices, embeddings | normal(0, `init_std`), the paper's 0.02 unless set |
    | scales of heads, position bias | normal(0, 0.02) |
    | biases, offsets of heads | 0 |
    | norm scales | 1 |
    | ScaledSin's scalar | d^-1/2 |

    Options beyond the paper begin as `gau_options.py` says."""
    model.init_outer_weights()
    for layer in model.residual_layers():
        layer.init_weights(model.config.init_std)


class Undrawn(TorchFunctionMode):
    """Inside it parameters are not drawn: on the meta device that would load a compiler."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_drawn = getattr(function, "__module__", None) == "torch.nn.init"
        return None if is_drawn else function(*args, **(kwargs or {}))


def empty_model(config: ModelConfig, kind: type[LanguageModel] = LanguageModel) -> LanguageModel:
    """A model whose parameters have shapes and no values, made in milliseconds."""
    with torch.device("meta"), Undrawn():
        return kind(config)


def number_of_parameters(config: ModelConfig) -> int:
    """The number of a model's parameters, counted without allocating the model."""
    return sum(p.numel() for p in empty_model(config).parameters())


def token_losses(model: nn.Module, rows_BT: Tensor, ranks: Ranks = ALONE) -> Tensor:
    """-ln p of each token given those before it in its row, nats, float32 at least: `[B, T-1]`, or
    where W `ranks` share the rows this rank's part, `[B, (T-1) / W]`."""
    inputs_BT, targets_BT = rows_BT[:, :-1], rows_BT[:, 1:]
    return model(inputs_BT, targets=targets_BT[:, ranks.share(targets_BT.shape[1])], ranks=ranks)


def masked_token_losses(model: nn.Module, ids_BT: Tensor, targets_BT: Tensor, ranks: Ranks = ALONE) -> Tensor:
    """-ln p of the K targets that are not -1, in order of the flattened rows, nats, float32 at
    least: `[K]`, or where `ranks` share the rows this rank's."""
    targets_N = targets_BT[:, ranks.share(targets_BT.shape[1])].flatten()
    at_K = (targets_N >= 0).nonzero().flatten()
    return model(ids_BT, at_K=at_K, targets=targets_N[at_K], ranks=ranks)


class SpanModel(LanguageModel):
    """A bidirectional `LanguageModel` with two logits per token, for the first and the last token
    of an answer. The language model's head stays unused. Raises UsageError for a causal config."""

    def __init__(self, config: ModelConfig):
        require(not config.causal, "questions need a model that sees both ways", "causal = true",
                "train it with causal = false (masked language modelling)")
        super().__init__(config)
        self.span_head = nn.Linear(config.d_model, 2)
        init_head(self.span_head)

    def logits(self, x_BTD: Tensor) -> Tensor:
        """logits_BT2 of the answer's first token and of its last token."""
        return self.span_head(x_BTD)


def init_head(head: nn.Linear) -> None:
    """Set the initial values: weights normal(0, 0.02), bias 0."""
    nn.init.normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
