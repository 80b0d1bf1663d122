"""The paper's tables as two dataclasses and a dictionary of presets. Nothing here imports torch, so
that the command line refuses a wrong configuration at once.

The first fields of `ModelConfig` are rows of Tables 8-10 (models for C4, Wiki-40B and PG-19), those
of `TrainConfig` rows of Tables 6-7 (hyperparameters), and presets are columns."""

import dataclasses
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from lineartime.base.errors import CheckpointError
from lineartime.base.settings import Rule, check_fields, check_rules, replace_fields, require, require_name

TOEPLITZ_BELOW = 512  # the position bias is a Toeplitz table for n below this, else two rotated vectors (Code 4)


@dataclass(frozen=True)
class ModelConfig:
    """A model's specification: first the rows of Tables 8-10, then options. Raises UsageError for a
    wrong value, and for fields that do not go together."""

    n_heads: Annotated[int, "Number of attention heads."] = 12
    attn_kernel: Annotated[Literal["softmax", "relu2", "relu"], "Attention kernel: softmax(q k / sqrt(head width)), "
                           "relu(q k / n + b)^2, or the features relu(q) and relu(k)."] = "softmax"
    attn_type: Annotated[Literal["quadratic", "mixed_chunk", "rowmajor_axial", "linear"], "Attention type: over the "
                         "whole row; quadratic in a chunk and linear across chunks; Combiner's, over a chunk and "
                         "summaries of chunks; or Performer's."] = "quadratic"
    ffn: Annotated[Literal["mlp", "glu", "gau"], 'FFN type. "gau": one GAU replaces attention and FFN.'] = "mlp"
    activation: Annotated[Literal["gelu", "silu"], "Activation of an MLP, a GLU or a GAU."] = "gelu"
    norm: Annotated[Literal["layer_norm", "scale_norm"] | None, "Norm before each layer and before the head; None, for "
                    "a layer alone: none."] = "layer_norm"
    abs_pos: Annotated[Literal["learned", "scaled_sin"], "Absolute position embedding."] = "learned"
    rel_pos: Annotated[Literal["rope"] | None, "Relative position embedding."] = None
    n_layers: Annotated[int, "GAU layers, or pairs of an attention layer and an FFN layer."] = 12
    d_model: Annotated[int, "Hidden size."] = 768
    expansion_factor: Annotated[float, "Inner width of an FFN or GAU, in widths of the model; see `d_inner`."] = 4
    chunk_size: Annotated[int | None, "Tokens per chunk of mixed chunk or rowmajor-axial attention; else None."] = None

    query_key_dim: Annotated[int, "Width of a GAU's queries and keys, the paper's s."] = 128
    vocab_size: Annotated[int, "Tokens of the vocabulary."] = 32_000
    context: Annotated[int, "Tokens per training row: the size of a learned position table, and n of relu(q k / n + "
                       "b)^2 without chunks."] = 512
    attn_scale_len: Annotated[int | None, "n of relu(q k / n + b)^2 without chunks; None: `context`."] = None
    causal: Annotated[bool, "Whether a token sees only those before it; otherwise the model fills in masks."] = True
    end_of_document: Annotated[int | None, "Token that begins a document in a packed row; None: a row is one."] = None
    document_mask: Annotated[Literal["exact", "paper"], '"exact": no token sees another document. "paper": the '
                             "chunk-range mask of the paper's listing, which leaks."] = "exact"
    chunk_pooling: Annotated[Literal["mean", "sum", "attention", "written"], "How the linear half combines chunks: the "
                             "listing's mean, the main text's sum, or Appendix A's learned weights. Beyond the paper: "
                             "the sum divided by the sum of the gates of `linear_gate` (at least 1)."] = "mean"
    chunk_parts: Annotated[Literal["both", "local", "global"], "Both halves of mixed chunk attention, or one alone "
                           "(the paper's LocalOnly and GlobalOnly)."] = "both"
    overlap: Annotated[bool, "Local attention also sees the previous chunk, and in a bidirectional model the next one "
                       "(Section 3.2)."] = False
    gate: Annotated[bool, "Attention's output is gated (Eq. 3). Without it a GAU projects [u, A v] (Table 1)."] = False
    prefix_sum: Annotated[Literal["scan", "matmul", "blocks"] | None, "How causal linear attention sums k v over "
                          "earlier tokens: as Performer, Performer-Matmul, or block by block, the fastest."] = None
    first_to_all: Annotated[bool, "Each chunk's first token also attends to its document by softmax (Table 4)."] = False
    cls_softmax: Annotated[bool, "The kernel of a row's first token, [CLS], is softmax (Section 4.3)."] = False
    init_std: Annotated[float, "Standard deviation of the initial matrices and embeddings. The paper's 0.02 is for "
                        "widths of 512 to 1,024; 0.02 (768 / d_model)^1/2 suits a narrow model."] = 0.02

    rope_base: Annotated[float, "Base of RoPE's frequencies. This field and those below are beyond the paper."] = 10_000
    key_conv: Annotated[int, "Keys are made from a depthwise convolution of z, or of a Transformer's keys, over so "
                        "many tokens: a token and those before it, or when not causal around it. With chunks for "
                        "the linear half's keys alone. 0: none."] = 0
    local_key_conv: Annotated[bool, "Make the local half's keys from this convolution too."] = False
    linear_rope: Annotated[bool, "Whether RoPE rotates the linear half's queries and keys."] = True
    linear_gate: Annotated[bool, "Each linear key is multiplied by a learned gate, sigmoid(w z + b), a number for each "
                           "token and head; z is what the key is made from."] = False
    layers: Annotated[tuple[str, ...], "The layers of a hybrid by name, in order; their number is then `n_layers`. "
                      "\"gau\", \"gau_quadratic\" (FLASH-Quad's), \"attention\", \"ffn\", or MODULE:CLASS, a layer of "
                      "your own. Empty: all alike."] = ()
    qk_norm: Annotated[bool, "Query-key norm of a Transformer's softmax attention: before RoPE each head's queries and "
                       "keys are divided by their root mean square and multiplied by a learned gain."] = False
    document_grid: Annotated[Literal["row", "own"], "Where positions and chunks begin in a packed row. \"row\": with "
                             "the row, as in the paper's listings. \"own\": positions with each document, chunks with "
                             "each that does not fit the open one; a document then gives what it gives alone."] = "row"
    rotary_dim: Annotated[int | None, "RoPE rotates so many features of each head's queries and keys: the first half "
                          "of these features and as many from the middle on. None: all."] = None
    dropout: Annotated[float, "In training this share of what attention or an FFN gives to its last matrix, and of "
                       "what that matrix gives, is set to 0."] = 0.0
    token_shift: Annotated[bool, "The first half of a layer's normed features is that of the token before, 0 where a "
                           "document begins."] = False
    bias: Annotated[bool, "Whether the matrices of layers have biases."] = True
    position_bias: Annotated[bool, "Whether relu(q k / n + b)^2 has its position bias b."] = True
    norm_eps: Annotated[float, "What norms add to the variance or mean square."] = 1e-5
    head_norm: Annotated[Literal["layer_norm", "scale_norm"] | None, "Norm before the head, with 1e-5; None: as in "
                        "layers."] = None
    tied_head: Annotated[bool, "Whether the head's matrix is the embedding's."] = True
    residual: Annotated[bool, "Whether a layer adds its input to its output; False is for a layer alone."] = True

    def __post_init__(self) -> None:
        if isinstance(self.layers, list | tuple):
            object.__setattr__(self, "layers", tuple(map(layer_name, self.layers)))
            object.__setattr__(self, "n_layers", len(self.layers) or self.n_layers)
        check_fields(self)
        check_bounds(self)
        object.__setattr__(self, "of_hybrid", tuple(dict.fromkeys(map(self.of_layer, self.layers))))
        for rules in (self._use_rules, self._chunk_rules, self._layer_rules):
            check_rules(self, rules())

    def _use_rules(self) -> Iterator[Rule]:
        """Options that are for some models alone."""
        for names, models, is_one, where, todo in ONLY_FOR:
            for name in names:
                is_set = getattr(self, name) != getattr(ModelConfig, name)
                yield is_set and not is_one(self), f"{name} is for {models}", where.format(name), todo

    def _chunk_rules(self) -> Iterator[Rule]:
        """What is wrong with chunks, masks of documents, and layers over the whole row."""
        yield (self.attn_type in IN_CHUNKS and (self.chunk_size or 0) < 1, "this attention needs a chunk size",
               "attn_type chunk_size", "try chunk_size = 256")
        has_paper_mask, is_learned = self.document_mask == "paper", self.chunk_pooling == "attention"
        yield (has_paper_mask and self.chunk_pooling != "mean",
               "the paper's document mask goes with chunk_pooling = mean alone", "chunk_pooling", EXACT_MASK)
        yield (has_paper_mask and self.overlap, "the paper's document mask does not go with overlap", "document_mask",
               EXACT_MASK)
        yield (has_paper_mask and (self.key_conv > 0 or self.linear_gate or self.document_grid == "own"),
               "the paper's document mask takes no options beyond the paper", "document_mask", EXACT_MASK)
        yield (self.overlap and self.chunk_parts == "global", "there is no local part to overlap", "chunk_parts",
               "leave overlap out")
        yield (is_learned and not (self.ffn == "gau" and self.n_heads == 1 and self.chunk_parts != "local"),
               "learned chunk weights are for GAU layers with one head and a linear part", "ffn n_heads chunk_parts",
               None)
        yield (is_learned and self.end_of_document is not None, "learned chunk weights are for unpacked rows",
               "end_of_document", "set end_of_document = none: a row is one document")
        yield (self.chunk_pooling == "written" and not self.linear_gate, 'chunk_pooling "written" needs gates',
               "linear_gate", "set linear_gate = true")
        yield (self.document_grid == "own" and (self.cls_softmax or is_learned),
               "cls_softmax and learned chunk weights are for unpacked rows", "document_grid = own",
               "leave document_grid out")
        yield (self.layers != () and has_paper_mask, "the paper's document mask is for layers that are all alike",
               "document_mask", EXACT_MASK)
        yield (self.document_grid == "own" and self.grid_size > 1 and self.table_len is not None,
               "n of layers over the whole row is too small for document_grid = own", "attn_scale_len context",
               f"set attn_scale_len = {TOEPLITZ_BELOW}")

    def _layer_rules(self) -> Iterator[Rule]:
        """What is wrong with kernels, heads, widths and positions."""
        kernels = {"rowmajor_axial": ("softmax",), "linear": ("relu",)}.get(self.attn_type, ("softmax", "relu2"))
        yield (self.attn_kernel not in kernels, f"{self.attn_type} attention does not take this kernel",
               "attn_kernel", f"set attn_kernel = {' or '.join(kernels)}")
        yield (self.attn_type == "linear" and self.prefix_sum is None, "prefix_sum is for linear attention",
               "prefix_sum attn_type", "set it to scan")
        is_gau = self.ffn == "gau"
        yield (is_gau and self.attn_type not in ("quadratic", "mixed_chunk"),
               "a GAU's attention is quadratic or mixed_chunk", "attn_type", None)
        for name, width in (("query_key_dim", self.query_key_dim), ("the inner width", self.d_inner)):
            yield (is_gau and width % self.n_heads > 0, f"{name} must be a multiple of n_heads",
                   f"{width}, n_heads = {self.n_heads}", None)
        yield (not is_gau and self.d_model % self.n_heads > 0, "d_model must be a multiple of n_heads",
               "d_model n_heads", None)
        yield ((is_gau or self.rel_pos == "rope") and self.qk_width % 2 > 0, "queries and keys need an even width",
               f"{self.qk_width}", None)
        yield (self.rotary_dim is not None and (self.rotary_dim % 2 > 0 or self.rotary_dim > self.qk_width),
               "rotary_dim is even, and at most the width of queries and keys", f"{self.rotary_dim} of {self.qk_width}",
               "rel_pos = none is a model without RoPE")
        yield self.token_shift and self.d_model % 2 > 0, "token_shift needs an even width", "d_model", None
        yield (self.abs_pos == "scaled_sin" and self.d_model % 2 > 0, "ScaledSin needs an even width", "d_model", None)
        yield (self.rel_pos is None and not self.linear_rope, "there is no RoPE to leave out", "rel_pos",
               "leave linear_rope out")
        yield self.key_conv < 2 and self.key_conv != 0, "key_conv is 0 or at least 2", "key_conv", "set key_conv = 3"
        yield (not self.causal and self.key_conv % 2 == 0 and self.key_conv > 0,
               "key_conv must be odd in a bidirectional model", "key_conv causal",
               f"set key_conv = {self.key_conv + 1}")
        yield ((self.first_to_all or self.cls_softmax) and not (not self.causal and is_gau and self.n_heads == 1),
               "first_to_all and cls_softmax are for bidirectional GAU layers with one head", "causal ffn n_heads",
               "set causal = false")
        yield (self.cls_softmax and self.attn_kernel != "relu2", "cls_softmax takes the place of relu2",
               "attn_kernel", "set attn_kernel = relu2")
        yield (self.end_of_document is not None and not 0 <= self.end_of_document < self.vocab_size,
               "end_of_document is outside the vocabulary", f"{self.end_of_document} of {self.vocab_size}",
               "take a token of the vocabulary, or leave it out")

    def of_layer(self, name: str) -> "ModelConfig":
        """The configuration of a layer of `layers`: this one for a layer of the user's own or of
        the model's kind; otherwise FLASH-Quad's or Transformer++'s, with what all share."""
        is_gau = self.ffn == "gau"
        if ":" in name or (name == "gau" and is_gau) or (name in ("attention", "ffn") and not is_gau):
            return replace(self, layers=())
        preset, own = (FLASH_QUAD, OF_GAU[-2:]) if name.startswith("gau") else (TRANSFORMER_PLUS_PLUS, ())
        fields = {each: getattr(self, each) for each in SHARED + (OF_GAU if is_gau and own else own)}
        return replace(preset, **({} if own else {"n_heads": heads_of(self.d_model)}) | fields)

    @property
    def kinds(self) -> tuple["ModelConfig", ...]:
        """The configurations of the layers, each once."""
        return self.__dict__["of_hybrid"] or (self,)

    @property
    def d_inner(self) -> int:
        """The paper's e: the inner width of the FFN or GAU. A GLU has three matrices where an MLP
        has two, so its width is two thirds, rounded to a multiple of 8."""
        if self.ffn == "glu":
            return round(self.d_model * self.expansion_factor * 2 / 3 / 8) * 8 or 8
        return round(self.d_model * self.expansion_factor)

    @property
    def qk_width(self) -> int:
        """Width of one head's queries and keys."""
        return (self.query_key_dim if self.ffn == "gau" else self.d_model) // self.n_heads

    @property
    def n_rotated(self) -> int:
        """How many features of a head RoPE rotates."""
        return 0 if self.rel_pos is None else self.qk_width if self.rotary_dim is None else self.rotary_dim

    @property
    def v_width(self) -> int:
        """Width of one head's values."""
        return (self.d_inner if self.ffn == "gau" else self.d_model) // self.n_heads

    @property
    def has_bias(self) -> bool:
        """Whether attention has a relative position bias: every GAU, and every relu^2 kernel."""
        return self.position_bias and (self.ffn == "gau" or self.attn_kernel == "relu2")

    @property
    def scale_len(self) -> int:
        """n of relu(q k / n + b)^2: the chunk size, else `attn_scale_len` or `context`."""
        return self.chunk_size or self.attn_scale_len or self.context

    @property
    def kept_scale(self) -> dict[str, int]:
        """What keeps n of relu(q k / n + b)^2 in rows of another context, if it is needed."""
        is_needed = any((kind.ffn == "gau" or kind.attn_kernel == "relu2") and kind.chunk_size is None
                        for kind in self.kinds)
        return {"attn_scale_len": self.attn_scale_len or self.context} if is_needed else {}

    @property
    def table_len(self) -> int | None:
        """n of a table of position biases over whole rows; None: there is no table."""
        n = self.kept_scale.get("attn_scale_len", TOEPLITZ_BELOW)
        return n if n < TOEPLITZ_BELOW and self.position_bias else None

    @property
    def bias_len(self) -> int:
        """n of the position bias: more than the largest distance of local attention."""
        return 2 * self.scale_len if self.overlap else self.scale_len

    @property
    def grid_size(self) -> int:
        """Tokens per chunk of the grid on which layers put a row; 1: none, or Combiner's."""
        return (self.chunk_size or 1) if self.attn_type == "mixed_chunk" else 1

    @property
    def has_linear_half(self) -> bool:
        """Whether attention has mixed chunk attention's linear half."""
        return self.attn_type == "mixed_chunk" and self.chunk_parts != "local"

    @property
    def attends_as_flash(self) -> bool:
        """Whether a GAU computes FLASH's attention, with any heads, or FLASH-Quad's."""
        return (self.activation == "silu" and self.attn_kernel == "relu2" and self.gate and self.chunk_parts == "both"
                and self.document_mask == "exact" and self.chunk_pooling != "attention"
                and not (self.overlap or self.first_to_all or self.cls_softmax)
                and (self.chunk_size is not None or (self.n_heads == 1 and self.key_conv == 0)))

    @property
    def makes_plain_heads(self) -> bool:
        """Whether a GAU's heads are FLASH's or FLASH-Quad's, which an op makes from z."""
        return (self.attends_as_flash and self.n_heads == 1 and self.key_conv == 0 and self.linear_rope
                and not self.linear_gate)

    def decoding_rules(self) -> Iterator[Rule]:
        """What keeps a layer or model from decoding."""
        yield not self.causal, "only a causal model decodes", "causal", "train one with causal = true"
        yield (self.document_mask == "paper" and self.end_of_document is not None,
               "only a model that keeps documents apart decodes", "document_mask", EXACT_MASK)
        yield (self.chunk_pooling == "attention", "a model with learned chunk weights does not decode",
               "chunk_pooling", 'it trains and is evaluated; to generate, train with chunk_pooling = "mean"')

    @property
    def decodes(self) -> bool:
        """Whether text can be generated token by token."""
        return not any(is_wrong for kind in self.kinds for is_wrong, *_ in kind.decoding_rules())

    def by_document(self, in_graph: bool = False) -> bool:
        """Whether attention of a layer runs once per document of a packed row. In a graph softmax
        attention takes a mask: there the lengths of documents change from call to call."""
        types = ("linear", "rowmajor_axial") if in_graph else ("linear", "rowmajor_axial", "quadratic")
        return any(kind.ffn != "gau" and kind.attn_kernel != "relu2" and kind.attn_type in types for kind in self.kinds)

    @property
    def n_chunks(self) -> int:
        """Chunks per training row."""
        return -(-self.context // self.chunk_size) if self.chunk_size else 1

    @property
    def max_len(self) -> int | None:
        """Longest row that the position tables allow, in tokens; None: no limit. A learned table
        ends at `context`, a Toeplitz bias without chunks at n."""
        end = self.table_len
        return min(self.context, end or self.context) if self.abs_pos == "learned" else end


LARGEST = {"n_heads": 2**12, "n_layers": 2**10, "d_model": 2**17, "expansion_factor": 2**10, "query_key_dim": 2**16,
           "vocab_size": 2**24, "context": 2**40, "chunk_size": 2**24, "tokens_per_step": 2**26,
           "micro_batch_tokens": 2**26, "keep": 2**20, "key_conv": 2**8, "context_parallel": 2**16}
"""The largest values of settings: a larger number is refused before it fills the memory."""

BOUNDS: dict[str, tuple[Callable[[float], bool], tuple[str, ...]]] = {
    "must be at least 1": (lambda value: value >= 1, (
        "n_heads", "n_layers", "d_model", "expansion_factor", "query_key_dim", "vocab_size", "context",
        "attn_scale_len", "rotary_dim", "tokens_per_step", "steps", "micro_batch_tokens", "eval_every", "eval_tokens",
        "save_every", "keep", "context_parallel", "stride", "max_answer_tokens", "jobs", "train_characters",
        "shard_tokens", "unit_bytes")),
    "must be positive": (lambda value: value > 0, (
        "init_std", "learning_rate", "muon_learning_rate", "adam_epsilon", "clip", "norm_eps")),
    "must not be negative": (lambda value: value >= 0, ("warmup_steps", "weight_decay", "seed")),
    "must lie in [0, 1)": (lambda value: 0 <= value < 1, ("adam_beta1", "adam_beta2", "dropout")),
    "must be above 1": (lambda value: value > 1, ("rope_base",))}
"""What numbers must be, in words and as a test, and the fields that must be so; None passes."""

LAYERS = ("gau", "gau_quadratic", "attention", "ffn")  # Names of layers. Any other has the form MODULE:CLASS.
SHARED = ("d_model", "abs_pos", "norm", "norm_eps", "rel_pos", "rope_base", "rotary_dim", "context", "attn_scale_len",
          "causal", "end_of_document", "document_grid", "vocab_size", "init_std", "dropout", "token_shift", "bias",
          "residual")  # fields that layers of every kind have from the model
OF_GAU = ("n_heads", "attn_kernel", "activation", "expansion_factor", "gate", "cls_softmax", "key_conv",
          "position_bias", "query_key_dim")
"""Fields that a GAU over whole rows has from a model of GAUs in chunks; the last two from any."""


def heads_of(d_model: int) -> int:
    """As many heads as make them 64 wide, as in the paper, or the next number that goes."""
    return math.gcd(d_model, max(d_model // 64, 1))


def layer_name(layer: str | type) -> str:
    """The name of a layer in `ModelConfig.layers`, of a name or a class. Raises UsageError."""
    name = f"{layer.__module__}:{layer.__qualname__}" if isinstance(layer, type) else layer
    if not (isinstance(name, str) and re.fullmatch(r"[\w.]+:[\w.]+", name)):
        require_name("layer", name, (*LAYERS, "MODULE:CLASS"))
    return name


EXACT_MASK = 'set document_mask = "exact"'
IN_CHUNKS = ("mixed_chunk", "rowmajor_axial")
OF_MIXED_CHUNK = ("chunk_parts", "chunk_pooling", "document_mask", "overlap", "first_to_all")
ONLY_FOR: tuple[tuple[tuple[str, ...], str, Callable[[Any], bool], str, str], ...] = (
    (("chunk_size",), "attention in chunks", lambda c: c.attn_type in IN_CHUNKS, "attn_type", "leave it out"),
    (OF_MIXED_CHUNK, "mixed chunk attention", lambda c: c.attn_type == "mixed_chunk", "{} attn_type", "leave it out"),
    (("linear_rope", "linear_gate"), "the linear half of mixed chunk attention", lambda c: c.has_linear_half,
     "attn_type chunk_parts", "leave it out"),
    (("position_bias",), "relu(q k / n + b)^2", lambda c: c.ffn == "gau" or c.attn_kernel == "relu2",
     "ffn attn_kernel", "leave it out"),
    (("prefix_sum",), "linear attention", lambda c: c.attn_type == "linear", "{} attn_type", "leave it out"),
    (("rope_base", "rotary_dim"), "models with RoPE", lambda c: c.rel_pos == "rope", "{} rel_pos", "leave it out"),
    (("local_key_conv",), "the local half of mixed chunk attention, with key_conv", lambda c: c.key_conv > 0
     and c.attn_type == "mixed_chunk" and c.chunk_parts != "global", "key_conv attn_type chunk_parts",
     "set key_conv = 3"),
    (("key_conv",), "quadratic attention and for the linear half of mixed chunk attention",
     lambda c: c.attn_type == "quadratic" or c.has_linear_half or c.local_key_conv, "attn_type chunk_parts",
     "leave it out"),
    (("qk_norm",), "a Transformer's softmax attention without chunks",
     lambda c: c.ffn != "gau" and c.attn_type == "quadratic" and not c.has_bias, "ffn attn_type attn_kernel",
     "leave it out"))
"""Options for some models alone: the options, the models, whether a configuration is one, the
fields that say so ({} is the option), and what to do."""


MAY_BE_NONE = ("attn_scale_len", "clip", "muon_learning_rate", "rotary_dim")


def check_bounds(config: Any) -> None:
    """Raise UsageError for a number outside its `BOUNDS`, or above its `LARGEST` value."""
    for words, (holds, names) in BOUNDS.items():
        for name in names:
            value = getattr(config, name, None)
            off = "none, in Python None, is off" if name in MAY_BE_NONE else None
            require(value is None or holds(value), f"{name} {words}", f"{name} = {value}", off)
    for name, largest in LARGEST.items():
        value = getattr(config, name, None)
        require(value is None or value <= largest, f"{name} is too large", f"{name} = {value}",
                f"the largest is {largest:,}")


TRANSFORMER = ModelConfig()
TRANSFORMER_PLUS = replace(TRANSFORMER, abs_pos="scaled_sin", rel_pos="rope")
TRANSFORMER_PLUS_PLUS = replace(TRANSFORMER_PLUS, ffn="glu")
PERFORMER = replace(TRANSFORMER_PLUS, attn_kernel="relu", attn_type="linear", prefix_sum="scan")
COMBINER = replace(TRANSFORMER_PLUS, attn_type="rowmajor_axial", chunk_size=256)
MC_TFM_PLUS_PLUS = replace(TRANSFORMER_PLUS_PLUS, attn_type="mixed_chunk", chunk_size=256)
FLASH_QUAD = replace(TRANSFORMER_PLUS, n_heads=1, attn_kernel="relu2", ffn="gau", activation="silu", n_layers=24,
                     expansion_factor=2, gate=True)
FLASH = replace(FLASH_QUAD, attn_type="mixed_chunk", chunk_size=256)

PRESETS: dict[str, ModelConfig] = {
    "transformer": TRANSFORMER, "transformer+": TRANSFORMER_PLUS, "transformer++": TRANSFORMER_PLUS_PLUS,
    "performer": PERFORMER, "performer-matmul": replace(PERFORMER, prefix_sum="matmul"), "combiner": COMBINER,
    "mc-tfm++": MC_TFM_PLUS_PLUS, "flash-quad": FLASH_QUAD, "flash": FLASH,
    "flash+": replace(FLASH, key_conv=3, local_key_conv=True, linear_rope=False, linear_gate=True,
                      chunk_pooling="written")}
"""The paper's models as in Table 9 (Wiki-40B), and `flash+`, with options beyond the paper."""

TASKS = ("c4", "wiki40b", "pg19")
"""Data sets of the paper. Each has a specification table of its own, see `model_config`."""


def model_config(model: str, task: str = "wiki40b", **fields: Any) -> ModelConfig:
    """The preset `model` at the specification that the paper uses for `task`, with any field
    replaced. Raises UsageError for an unknown model, task or field."""
    require_name("model", model, PRESETS)
    require_name("task", task, TASKS)
    config = PRESETS[model]
    if task == "c4":
        config = replace(config, causal=False, norm="layer_norm" if model == "transformer" else "scale_norm")
    if task == "pg19":
        config = replace(config, n_layers=3 * config.n_layers, d_model=1024, n_heads=1 if config.ffn == "gau" else 16,
                         chunk_size=None if config.chunk_size is None else 512)
    return replace_fields(config, fields)


def layer_config(config: ModelConfig | None, preset: ModelConfig, fields: dict[str, Any]) -> ModelConfig:
    """The configuration of one layer: `config`; or without it `preset` with these fields, and for a
    width below 768 larger initial values, see `ModelConfig.init_std`. Raises UsageError for a
    config that is none, a wrong name or value, config and fields together, and a GAU where the
    preset has none, or the reverse."""
    require(config is None or isinstance(config, ModelConfig), "a layer takes a ModelConfig, or its fields by name",
            repr(config), "such as d_model=512")
    require(config is None or not fields, "a layer takes a ModelConfig or fields, not both", ", ".join(fields),
            "dataclasses.replace puts fields into a ModelConfig")
    if config is None:  # any width will do: a layer has no absolute positions
        if fields.get("residual") is False:  # f(x) alone, unless a norm is asked for
            fields = {"norm": None, **fields}
        width = fields.get("d_model", preset.d_model)
        if "n_heads" not in fields and type(width) is int and width > 0 and width % preset.n_heads:
            fields = {"n_heads": heads_of(width), **fields}
        config = replace_fields(replace(preset, abs_pos="learned"), fields)
        narrow = max(ModelConfig.d_model / config.d_model, 1)
        if "init_std" not in fields:
            config = replace(config, init_std=ModelConfig.init_std * narrow**0.5)
    require((config.ffn == "gau") == (preset.ffn == "gau"), "a layer of another kind of model", f"ffn = {config.ffn}",
            "GatedAttentionUnit is for gau, MultiHeadAttention and FeedForward for others")
    return config


@dataclass(frozen=True)
class TrainConfig:
    """Hyperparameters of a run: first the rows of Tables 6-7, then options. Raises UsageError for a
    wrong value, and for fields that do not go together."""

    tokens_per_step: Annotated[int, "Tokens per batch."] = 2**18
    steps: Annotated[int, "Number of steps."] = 125_000
    warmup_steps: Annotated[int, "Steps in which the rate rises; if not set, at most a fifth of all."] = 10_000
    learning_rate: Annotated[float, "Peak learning rate."] = 7e-4
    schedule: Annotated[Literal["linear", "cosine", "wsd", "constant"], "What the learning rate does after the "
                        'warm-up. "linear": it falls to zero at `steps`, as in the paper. "cosine": it falls to zero '
                        'along half a cosine. "constant": it stays. "wsd": it stays, and in the last `decay_share` of '
                        "the steps it falls linearly to zero."] = "linear"
    decay_share: Annotated[float, 'With "wsd": the share of the steps, at the end, in which the rate falls.'] = 0.2
    adam_epsilon: Annotated[float, "Adam's epsilon, which is added to the root of the second moment."] = 1e-6
    adam_beta1: Annotated[float, "How much of Adam's first moment is kept at each step."] = 0.9
    adam_beta2: Annotated[float, "How much of Adam's second moment is kept at each step."] = 0.999
    weight_decay: Annotated[float, "Decay of matrices and embeddings alone, multiplied by the learning rate."] = 0.01
    clip: Annotated[float | None, "Largest norm of a gradient; None: no clipping, as in the Transformer's table."] = 0.1
    clip_scope: Annotated[Literal["local", "global"], '"local": the gradient of each micro-batch is clipped before '
                          'averaging, as in the paper. "global": the averaged gradient is clipped.'] = "local"

    optimizer: Annotated[Literal["adamw", "muon"], '"adamw", as in the paper. "muon": Muon for the matrices of layers, '
                         "AdamW for everything else."] = "adamw"
    muon_learning_rate: Annotated[float | None, "Peak learning rate of Muon; None: `learning_rate`."] = None
    micro_batch_tokens: Annotated[int, "Tokens of one forward and backward pass, which are clipped together if "
                                  "clipping is local (in the paper 2^18 / 64 cores)."] = 4096
    seed: Annotated[int, "Seed of the initial weights and of the order of the rows."] = 0
    precision: Annotated[Literal["float32", "bfloat16"], '"bfloat16": the model runs under autocast; parameters and '
                         "optimizer state stay in float32."] = "float32"
    activation_checkpointing: Annotated[bool, "Recompute a layer's activations in the backward pass."] = False
    compile: Annotated[bool, "Compile the model with `torch.compile`; on a processor this takes more memory."] = False
    shard: Annotated[bool, "Shard parameters, gradients and moments over the processes of `torchrun`; without it the "
                     "moments alone. A sharded run draws other initial values."] = False
    context_parallel: Annotated[int, "Processes of `torchrun` that share each row, in parts of whole chunks."] = 1
    eval_every: Annotated[int, "Steps between held-out evaluations."] = 500
    eval_tokens: Annotated[int, "Most held-out tokens of an evaluation, of rows at equal distances; the last one has "
                           "more after a long run."] = 100_000
    save_every: Annotated[int, "Steps between checkpoints."] = 500
    keep: Annotated[int, "How many of the newest checkpoints are kept."] = 2

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self)
        check_rules(self, self._rules())

    def _rules(self) -> Iterator[Rule]:
        """What is wrong with fields that go together."""
        is_wsd = self.schedule == "wsd"
        yield (self.warmup_steps > self.steps, "warm-up is longer than the run", "warmup_steps steps",
               "lower warmup_steps")
        yield (self.decay_share != TrainConfig.decay_share and not is_wsd, 'decay_share is for schedule "wsd"',
               "schedule", "leave it out")
        yield (not 0 < self.decay_share <= 1, "decay_share is a share of the steps", "decay_share",
               "it lies above 0, up to 1")
        yield (is_wsd and self.warmup_steps > self.decay_from, "the warm-up reaches into the decay",
               f"warmup_steps = {self.warmup_steps}, the decay begins at step {self.decay_from}",
               "lower warmup_steps or decay_share")
        yield (self.muon_learning_rate is not None and self.optimizer != "muon", "muon_learning_rate is for Muon",
               "optimizer", "set optimizer = muon, or leave it out")
        yield (self.shard and self.optimizer == "muon", "Muon needs whole matrices", "shard optimizer",
               "set optimizer = adamw")
        yield (self.shard and self.clip is not None and self.clip_scope == "local",
               "a sharded gradient cannot be clipped by micro-batch", "shard clip_scope", "set clip_scope = global")
        yield (self.shard and self.context_parallel.bit_count() != 1,
               "1, 2, 4, ... ranks can share a row of a sharded model", "context_parallel",
               "choose a power of 2, or set shard = false")
        yield (self.tokens_per_step % self.micro_batch_tokens > 0,
               "tokens_per_step must be a multiple of micro_batch_tokens",
               f"{self.tokens_per_step} and {self.micro_batch_tokens}", "a step is of whole rows: see context")

    @property
    def decay_from(self) -> int:
        """The last step at which "wsd" has the whole learning rate, before it falls."""
        return self.steps - max(round(self.decay_share * self.steps), 1)

    @property
    def last_eval_tokens(self) -> int:
        """Most held-out tokens of the last evaluation: three times those of training, which take as
        long, and at least `eval_tokens`."""
        return max(3 * self.steps * self.tokens_per_step, self.eval_tokens)


GO_BACK = "use the version of the package that made it"
REMOVED: dict[str, tuple[Any, str]] = {
    "linear_divisor": (None, GO_BACK), "linear_scale_init": (None, GO_BACK), "local_scale_init": (None, GO_BACK),
    "keys_start_as_queries": (False, GO_BACK),
    "full_attention_interval": (0, "name the layers, such as layers = gau,gau,gau_quadratic"),
    "window_tokens": (None, f"activation_checkpointing = true is what there is now, or {GO_BACK}")}
"""Fields that are gone: the value without effect, and what to do about another value."""
REMOVED_AT_START = ("linear_scale_init", "local_scale_init", "keys_start_as_queries")
"""The removed fields that chose initial values: weights that are there do not need them."""


def without_removed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without those of `REMOVED`. Raises CheckpointError for one that had an effect."""
    for name in REMOVED.keys() & fields.keys():
        unused, todo = REMOVED[name]
        if fields[name] != unused:
            raise CheckpointError("a setting that is gone", f"{name} = {fields[name]}", todo)
    return {name: value for name, value in fields.items() if name not in REMOVED}


NOT_IMPORTED = "the model has a layer of a module that is not imported"


def stored_config(config: Any, fields: Mapping[str, Any]) -> Any:
    """`config` with the fields in a file, which may be older. Raises UsageError for an unknown or
    wrong field, CheckpointError for a removed one that had an effect, and for a layer of a module
    that has not been imported: a file never makes us import one."""
    made = replace_fields(config, without_removed(fields))
    for name in getattr(made, "layers", ()):
        module = name.partition(":")[0]
        if ":" in name and module not in sys.modules:
            raise CheckpointError(NOT_IMPORTED, name, f"if you trust it, `import {module}` before")
    return made


def check_context_parallel(config: ModelConfig, n_ranks: int) -> None:
    """Raise UsageError unless `n_ranks` ranks can share a row of the model's context: each has
    whole chunks, and needs a state of the others, and with `key_conv` what is next to its part."""
    if n_ranks == 1:
        return
    off = "set context_parallel = 1"
    require(config.attn_type in ("mixed_chunk", "linear"),
            "context_parallel is for mixed chunk attention and Performer", f"attn_type = {config.attn_type}",
            f"take flash, mc-tfm++ or performer, or {off}")
    for field, is_wrong in {
            "chunk_pooling": config.chunk_pooling == "attention", "overlap": config.overlap,
            "document_mask": config.document_mask == "paper", "first_to_all": config.first_to_all,
            "cls_softmax": config.cls_softmax, "layers": config.layers != (), "dropout": config.dropout > 0,
            "document_grid": config.document_grid == "own" and config.grid_size > 1}.items():
        require(not is_wrong, f"context_parallel does not go with {field}", f"{field} = {getattr(config, field)}",
                f"leave it out, or {off}")
    whole = n_ranks * (config.chunk_size or 1)
    require(config.context % whole == 0, "every rank of context_parallel must hold equally many whole chunks",
            f"context = {config.context}, {n_ranks} parts, chunk_size = {config.chunk_size}",
            f"make context a multiple of {whole}")
    require(config.key_conv <= config.context // n_ranks, "a part of a row is shorter than key_conv",
            f"{config.context // n_ranks} tokens, key_conv = {config.key_conv}", "lower context_parallel")


MODEL_FIELDS = tuple(f.name for f in dataclasses.fields(ModelConfig))
TRAIN_FIELDS = tuple(f.name for f in dataclasses.fields(TrainConfig))
SOURCES = {
    "Tables 8-10": ("n_heads", "attn_kernel", "attn_type", "ffn", "activation", "norm", "abs_pos", "rel_pos",
                    "n_layers", "d_model", "expansion_factor", "chunk_size"),
    "Tables 6-7": ("tokens_per_step", "steps", "warmup_steps", "learning_rate", "adam_epsilon", "adam_beta1",
                   "adam_beta2", "weight_decay", "clip", "clip_scope", "context"),
    "the paper's text or listings": ("query_key_dim", "vocab_size", "causal", "document_mask", "chunk_pooling",
                                     "chunk_parts", "overlap", "gate", "prefix_sum", "first_to_all", "cls_softmax",
                                     "init_std", "micro_batch_tokens")}
"""Where the paper has a field."""


def to_dict(config: ModelConfig | TrainConfig) -> dict[str, Any]:
    """The fields of a configuration by name, JSON-serialisable."""
    return {name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(config).items()}


@dataclass(frozen=True)
class StartingWeights:
    """The weights that a run begins with: the name that was given, and their own model."""

    name: str
    model: ModelConfig
