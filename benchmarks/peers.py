"""Who is measured: our models, and others' models of our size."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import Row
from benchmarks.cells import PEERS
from benchmarks.provenance import installed_version
from lineartime.base.errors import NumericsError
from lineartime.base.ranks import ALONE, Ranks
from lineartime.base.settings import require, require_name
from lineartime.config import PRESETS, ModelConfig
from lineartime.model.language_model import LanguageModel, number_of_parameters
from lineartime.ops.cross_entropy import linear_cross_entropy

PACKAGES = {"flash-pytorch": "FLASH-pytorch", "llama.cpp": "llama.cpp", **dict.fromkeys(PEERS, "transformers")}
"""Others' models, and where they come from."""

VARIANTS = ("unfused", "reference", "compiled", "checkpointed")
"""What may stand behind a model; a `Label` has them in this order."""


class Label(NamedTuple):
    """A model and how it is run: `transformer++:unfused:compiled`."""

    model: str
    how: tuple[str, ...] = ()  # names of `VARIANTS`

    @property
    def text(self) -> str:
        return ":".join([self.model, *self.how])

    @property
    def variant(self) -> str:
        return ("compiled" if "compiled" in self.how else "eager") + "+checkpointed" * ("checkpointed" in self.how)

    @property
    def preset(self) -> str:
        """The model of ours that it is, or whose size it has."""
        return "flash" if self.model in PACKAGES else self.model


def parse_label(text: str) -> Label:
    """Raises UsageError for an unknown model or variant, and for what does not go together."""
    model, *names = text.split(":")
    require_name("model", model, [*PRESETS, *PACKAGES])
    for name in names:
        require_name("variant", name, VARIANTS)
    how, label = set(names), Label(model, tuple(name for name in VARIANTS if name in names))
    preset, is_peer = PRESETS[label.preset], model in PACKAGES
    fused = (preset.attn_type, preset.attn_kernel) == ("quadratic", "softmax")
    require("unfused" not in how or fused, "only the Transformers have a fused attention", text)
    require(not (is_peer and how & {"checkpointed", "reference"}) and (not how or model != "llama.cpp"),
            "a peer has no activation checkpointing or reference of ours, llama.cpp no variant", text)
    require(not {"reference", "unfused"} <= how, "unfused attention is a reference already", text)
    return label


def about(name: str) -> Row:
    """The column of a row that says what a peer is; none for a model of ours."""
    if name not in PACKAGES:
        return {}
    return {"peer": {"package": PACKAGES[name], "version": installed_version(PACKAGES[name]), **PEERS.get(name, {})}}


def build(label: Label, config: ModelConfig) -> "LanguageModel | Peer":
    """The model, not compiled, with new weights. Raises UsageError for a peer that is not installed
    or has another size than `config`, NumericsError for one that is not causal where `config`
    is, or the reverse."""
    if label.model not in PACKAGES:
        model = LanguageModel(config)
        model.activation_checkpointing = "checkpointed" in label.how
        if "reference" in label.how:
            model.set_impl("reference")
        return model
    return build_peer(label.model, config, PEERS.get(label.model, {}))


def build_peer(name: str, config: ModelConfig, fields: Row) -> "Peer":
    """A peer with new weights. fields: of its configuration. Raises as `build`."""
    package = PACKAGES.get(name, "transformers")
    require(installed_version(package) is not None, "a peer is not installed", name, f"pip install {package}")
    peer = flash_pytorch(config) if name == "flash-pytorch" else of_transformers(name, config, fields)
    ids_1T = torch.arange(min(config.context, 300))[None] % config.vocab_size
    half = ids_1T.shape[1] // 2
    other_1T = torch.cat([ids_1T[:, :half], ids_1T[:, half:].flip(1)], 1)
    with torch.no_grad():  # do the first tokens see later ones?
        blind = torch.allclose(peer(ids_1T)[:, :half], peer(other_1T)[:, :half], rtol=0, atol=1e-6)
    if blind != config.causal:
        raise NumericsError("not the same task", f"a peer is {'' if blind else 'not '}causal, and ours is the reverse")
    return peer


def flash_pytorch(config: ModelConfig) -> "Peer":
    """The FLASH of that package with our sizes, tied head, and initial values for matrices."""
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
    return Peer(config, body, head)


def of_transformers(name: str, config: ModelConfig, fields: Row) -> "Peer":
    """A model of transformers with the width, vocabulary and head of `config`, and initial values
    of its own. fields: of its configuration; `forgets` among them is the share of its state that a
    layer forgets with each token at first, in place of what it draws, and `kept` the number of
    layers that stay, as some types ask for an attention layer. Raises UsageError where the numbers
    of parameters are 3 % apart."""
    from transformers import AutoConfig, AutoModel

    no_tokens = dict.fromkeys(f"{which}_token_id" for which in ("pad", "bos", "eos", "cls", "sep"))
    own = {field: value for field, value in fields.items() if field not in ("forgets", "kept")}
    body = AutoModel.from_config(AutoConfig.for_model(
        **own, **no_tokens, hidden_size=config.d_model, vocab_size=config.vocab_size, use_cache=False))
    body.layers = body.layers[: fields.get("kept")]
    for layer in body.modules():
        if "forgets" in fields and hasattr(layer, "dt_bias"):  # exp(A_log) * softplus(dt_bias)
            nn.init.zeros_(layer.A_log)
            nn.init.constant_(layer.dt_bias, math.log(math.expm1(fields["forgets"])))
    head = nn.Linear(config.d_model, config.vocab_size)
    nn.init.zeros_(head.bias)
    if config.tied_head:
        head.weight = body.get_input_embeddings().weight
    else:
        nn.init.normal_(head.weight, std=config.init_std)
    peer, wanted = Peer(config, body, head), number_of_parameters(config)
    size = sum(parameter.numel() for parameter in peer.parameters())
    require(abs(size / wanted - 1) < 0.03, "a peer of another size", f"{name} has {size:,} parameters, not {wanted:,}",
            "take --shape small and no --set, or change the peer's sizes in cells.toml or study.toml")
    return peer


class Peer(nn.Module):
    """Another's model, called as ours are: ids to logits, or with targets to losses."""

    body: Any

    def __init__(self, config: ModelConfig, body: nn.Module, head: nn.Linear):
        super().__init__()
        self.config, self.body, self.head = config, body, head

    def forward(self, ids_BT: Tensor, *, at_K: Tensor | None = None, targets: Tensor | None = None,
                ranks: Ranks = ALONE) -> Tensor:
        x_BTD = self.body(ids_BT)
        x_BTD = getattr(x_BTD, "last_hidden_state", x_BTD)  # of transformers' outputs
        x = x_BTD if at_K is None else x_BTD.flatten(0, 1)[at_K]
        if targets is None:
            return self.head(x)
        x_ND, targets_N = x.flatten(end_dim=-2), targets.flatten()
        return linear_cross_entropy(x_ND, self.head.weight, self.head.bias, targets_N).view(targets.shape)

    @property
    def embed(self) -> nn.Linear:
        """For those who ask a model for its device."""
        return self.head

    def check_length(self, length: int) -> None:
        """Rows may have any length."""

    def in_sizes(self) -> dict[str, tuple[int, ...]]:
        """What `LanguageModel.in_sizes` is, of Mamba-2 and Gated DeltaNet."""
        sizes = {}
        for name, module in self.body.named_modules(prefix="body"):
            if name.endswith("mixer"):  # of Mamba-2: z, x, B, C and the steps
                bc = module.n_groups * module.ssm_state_size
                sizes[f"{name}.in_proj.weight"] = (*[module.intermediate_size] * 2, bc, bc, module.num_heads)
            if name.endswith("linear_attn"):
                sizes[f"{name}.in_proj_qkv.weight"] = (module.key_dim, module.key_dim, module.value_dim)
        return sizes

    def compile_layers(self) -> None:
        """torch.compile in place, the head and the loss left out."""
        self.body.compile()


def state_size(model: "LanguageModel | Peer") -> int | None:
    """Numbers in the matrices through which one row reads what is far back, at any length; or None.
    The last tokens, in a chunk or convolution, do not count."""
    if isinstance(model, LanguageModel):
        caches = model.decoding_state(1).caches if model.decodes else []
        matrices = [x for cache in caches for name, x in cache.tensors().items() if name.startswith("kv_")]
        return sum(x.numel() for x in matrices) or None
    own = model.body.config  # an empty cache of transformers has no matrices to count
    if own.model_type == "mamba2":
        return own.num_hidden_layers * own.num_heads * own.head_dim * own.state_size
    n_linear = getattr(own, "layer_types", []).count("linear_attention")
    return n_linear * own.linear_num_value_heads * own.linear_key_head_dim * own.linear_value_head_dim or None
