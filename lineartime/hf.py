"""The models as `transformers` classes: `import lineartime.hf`, then `AutoModelForCausalLM.from_pretrained(DIR)`, or
`AutoModelForMaskedLM` for a model that is not causal.

`LanguageModel` does the arithmetic; this module adds the names, arguments and the cache that `transformers` expects."""

from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    TokenizersBackend,
)
from transformers.cache_utils import Cache
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
)
from transformers.utils.generic import can_return_tuple

from lineartime.checkpoint import MANIFEST, check_finite, first_five, has_manifest, reshaped
from lineartime.config import MODEL_FIELDS, ModelConfig, to_dict
from lineartime.data.tokenizer import END_OF_DOCUMENT, MASK, SEPARATOR, TOKENIZER_FILE
from lineartime.decoding.cache import DecodingState
from lineartime.errors import CheckpointError, UsageError
from lineartime.model import LanguageModel, SpanModel, init_span_head, init_weights
from lineartime.ops.dtypes import at_least_float32
from lineartime.run import CONFIG_FILE, WEIGHTS_FILE, check_shared, has_optimizer
from lineartime.settings import require


class LineartimeConfig(PreTrainedConfig):
    """The fields of `ModelConfig` and of transformers; bos, eos and pad are the end-of-document token by default.

    Raises UsageError as `ModelConfig` does."""

    model_type = "lineartime"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {"hidden_size": "d_model", "num_hidden_layers": "n_layers",
                                               "num_attention_heads": "n_heads", "max_position_embeddings": "context"}
    __eq__ = PreTrainedConfig.__eq__  # the base class would generate an == that ignores our fields

    def __init__(self, **fields: Any):
        model = ModelConfig(**{name: fields.pop(name) for name in MODEL_FIELDS if name in fields})
        for name, value in to_dict(model).items():
            setattr(self, name, value)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            fields.setdefault(name, model.end_of_document)
        super().__init__(**fields)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Load as `PreTrainedConfig` does. Raises CheckpointError for a config.json of a local folder that a manifest
        does not match, and names the file where `ModelConfig` refuses a value."""
        place = Path(kwargs.get("name_or_path") or "", CONFIG_FILE)
        if place.is_file():
            check_shared(place.parent, [CONFIG_FILE])
        try:
            return super().from_dict(config_dict, **kwargs)
        except UsageError as e:
            raise UsageError(e.what, f"{e.where} in {place}", e.todo) from None

    def model_config(self) -> ModelConfig:
        return ModelConfig(**{name: getattr(self, name) for name in MODEL_FIELDS})


class LineartimeTokenizer(TokenizersBackend):
    """A checkpoint's tokenizer.json. Texts begin with the end-of-document token, as in training; padding goes left.

    Unlike in `Tokenizer`, "[MASK]" in a text is the mask token if the checkpoint has one."""

    padding_side = "left"

    # Not in __init__: transformers leaves a tokenizer.json unchanged only for a class without its own __init__.
    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> "LineartimeTokenizer":
        """Load as `TokenizersBackend` does. Raises CheckpointError for a file that a manifest does not match."""
        folder = Path(pretrained_model_name_or_path, kwargs.get("subfolder") or "")
        if folder.is_dir():
            check_shared(folder, [TOKENIZER_FILE])
        tokenizer = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        for name in ("bos_token", "eos_token", "pad_token"):
            if getattr(tokenizer, name) is None:
                setattr(tokenizer, name, END_OF_DOCUMENT)
        there = {token.content: token for token in tokenizer.added_tokens_decoder.values() if token.special}
        for name, content in (("mask_token", MASK), ("sep_token", SEPARATOR)):
            if getattr(tokenizer, name) is None and content in there:
                setattr(tokenizer, name, there[content])
        tokenizer.add_bos_token = True
        return tokenizer


class Reshaped(ConversionOps):
    """`checkpoint.reshaped` for `from_pretrained`; saving changes no shapes."""

    def convert(self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str],
                **kwargs: Any) -> dict[str, Any]:
        (stored,) = (part[0] if isinstance(part, list) else part for part in input_dict.values())
        own = dict(kwargs["model"].named_parameters()).get(kwargs["full_layer_name"], stored)
        return {target_patterns[0]: reshaped(stored, own.shape)}

    @property
    def reverse_op(self) -> ConversionOps:
        return Reshaped()


class LineartimeCache(Cache):
    """A `DecodingState` as a cache of `generate`. It is empty at first; its first tokens fix the batch size."""

    is_croppable = False

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.reset()

    def reset(self) -> None:
        self.state: DecodingState | None = None
        self.n_columns = 0
        """Tokens given to each row, padding included; transformers calls this the sequence length."""

    def extend(self, model: LanguageModel, ids_BN: Tensor, valid_BN: Tensor) -> Tensor:
        """`LanguageModel.extend` by the next columns of a batch, without tokens that are not valid; returns x_BND."""
        if self.state is None:
            self.state = model.decoding_state(len(ids_BN))
        require(len(self.state.seq_lens_B) == len(ids_BN), "the cache holds another batch",
                f"{len(self.state.seq_lens_B)} rows, the input has {len(ids_BN)}", "repeat it: batch_repeat_interleave")
        order_BN = valid_BN.int().argsort(dim=1, descending=True, stable=True)
        x_BND = model.extend(ids_BN.gather(1, order_BN), valid_BN.sum(1), self.state)
        self.n_columns += ids_BN.shape[1]
        return x_BND.gather(1, order_BN.argsort(1)[..., None].expand_as(x_BND))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; a row may occur more than once."""
        if self.state is not None:
            self.state.select(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.batch_select_indices(torch.arange(len(self.state.seq_lens_B)).repeat_interleave(repeats))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.n_columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def crop(self, max_length: int) -> None:
        raise UsageError("this cache cannot forget its last tokens", "crop", "decode without an assistant model")


class LineartimeModel(PreTrainedModel):
    """`LanguageModel` up to its last norm.

    Checkpoints have the names of `LanguageModel`. In this class "model." precedes them: transformers adds it when it
    loads a checkpoint (`base_model_prefix`), and `save_pretrained` removes it."""

    config_class = LineartimeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embed"
    _no_split_modules = ("LanguageModel",)
    _is_stateful = True
    _trunk: ClassVar[type[LanguageModel]] = LanguageModel

    def __init__(self, config: LineartimeConfig):
        super().__init__(config)
        self.model = self._trunk(config.model_config())
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        if isinstance(module, LanguageModel):
            # A weight that was loaded stays. transformers sees to it in torch.nn.init alone.
            loaded = [(p, p.detach().clone()) for p in module.parameters() if getattr(p, "_is_hf_initialized", False)]
            init_weights(module)
            with torch.no_grad():
                for p, value in loaded:
                    p.copy_(value)
        if isinstance(module, torch.nn.Linear) and module is getattr(self.model, "span_head", None):
            init_span_head(module)

    @can_return_tuple
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None,
                past_key_values: LineartimeCache | None = None, use_cache: bool | None = None,
                **kwargs: Any) -> BaseModelOutputWithPast:
        """The hidden states `[B, T, D]`, and the cache if one is given or `use_cache` is true.

        attention_mask: 0 for padding, which may be anywhere and changes nothing. With a cache it covers the new tokens,
        or all. Raises UsageError for an unknown argument."""
        refuse(kwargs)
        x_BTD, cache = self.hidden(input_ids, attention_mask, past_key_values, use_cache)
        return BaseModelOutputWithPast(last_hidden_state=x_BTD, past_key_values=cache)

    def hidden(self, ids_BT: Tensor, mask: Tensor | None, cache: LineartimeCache | None,
               use_cache: bool | None) -> tuple[Tensor, LineartimeCache | None]:
        """The hidden states and the cache: computed in parallel without a cache, by decoding with one."""
        if cache is None and use_cache:
            cache = LineartimeCache()
        require(cache is None or isinstance(cache, LineartimeCache), "wrong cache", type(cache).__name__,
                "use a LineartimeCache")
        n_rows, n_new = ids_BT.shape
        valid_BT = torch.ones_like(ids_BT, dtype=torch.bool)
        if mask is not None:
            n_columns = n_new + (0 if cache is None else cache.n_columns)
            require(mask.shape in ((n_rows, n_new), (n_rows, n_columns)), "wrong attention_mask",
                    f"{list(mask.shape)} for {n_rows} rows of {n_new} tokens", "one number per row and token")
            valid_BT = mask[:, mask.shape[1] - n_new :].bool()
        if cache is None:
            return self.model.hidden(ids_BT, padding_mask_BT=None if valid_BT.all() else valid_BT), None
        return cache.extend(self.model, ids_BT, valid_BT), cache

    @property
    def gradient_checkpointing(self) -> bool:
        return self.model.activation_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool) -> None:
        self.model.activation_checkpointing = enable

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, output_loading_info: bool = False,
                        ignore_mismatched_sizes: bool = False, **kwargs: Any) -> Any:
        """Load as `PreTrainedModel` does. Raises CheckpointError for a file of a local folder that its manifest does
        not match, and for a weight that is not finite, has another shape or, unless the loading info is asked for, is
        missing in `LanguageModel`."""
        place = pretrained_model_name_or_path
        if place is not None and (folder := Path(place, kwargs.get("subfolder") or "")).is_dir():
            check_shared(folder, [CONFIG_FILE, WEIGHTS_FILE])
            place = folder / WEIGHTS_FILE
        model, found = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True,
                                               ignore_mismatched_sizes=True, **kwargs)
        wrong = [f"{name} is missing" for name in sorted(found["missing_keys"]) if not output_loading_info
                 and name.startswith("model.") and not name.startswith("model.span_head.")]
        if not ignore_mismatched_sizes:
            wrong += [f"{name} is {list(stored)}, expected {list(own)}"
                      for name, stored, own in sorted(found["mismatched_keys"])]
        if wrong:
            raise CheckpointError("the checkpoint's tensors are not this model's", f"{place}: {first_five(wrong)}")
        readable = {name: p for name, p in model.named_parameters() if type(p.data) is Tensor and not p.is_meta}
        check_finite(readable, place)  # quantised and offloaded weights are not
        return (model, found) if output_loading_info else model

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True,
                        state_dict: dict[str, Tensor] | None = None, **kwargs: Any) -> None:
        """Save weights by their names in `LanguageModel`, with or without a given `state_dict`."""
        own_names = {name.removeprefix("model."): value for name, value in (state_dict or self.state_dict()).items()}
        super().save_pretrained(save_directory, is_main_process=is_main_process, state_dict=own_names, **kwargs)
        folder = Path(save_directory)
        if is_main_process and has_manifest(folder) and not has_optimizer(folder):
            (folder / MANIFEST).unlink()  # of an export whose files were replaced

    def load_state_dict(self, state_dict: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Load weights by their names in a checkpoint or in `state_dict()`; Trainer resumes with this method."""
        names = {f"model.{name.removeprefix('model.')}": value for name, value in state_dict.items()}
        own = self.state_dict()
        names = {name: reshaped(value, own[name].shape) if name in own else value for name, value in names.items()}
        return super().load_state_dict(names, *args, **kwargs)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Raise UsageError for a new size, because the head's bias has an entry per token too."""
        require(new_num_tokens in (None, self.config.vocab_size), "the vocabulary cannot be resized",
                f"{self.config.vocab_size} -> {new_num_tokens}", "train with the vocabulary you need")
        return self.model.embed


class LineartimeForCausalLM(LineartimeModel, GenerationMixin):
    """The whole `LanguageModel`, with `generate`. Raises UsageError for a model that is not causal."""

    def __init__(self, config: LineartimeConfig):
        require(config.causal, "only a causal model predicts the next token", "causal = false",
                "AutoModelForMaskedLM opens it")
        super().__init__(config)

    @can_return_tuple
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None,
                past_key_values: LineartimeCache | None = None, use_cache: bool | None = None,
                labels: Tensor | None = None, logits_to_keep: int | Tensor = 0,
                num_items_in_batch: Tensor | int | None = None, **kwargs: Any) -> CausalLMOutputWithPast:
        """`LineartimeModel.forward`, then logits_BTV, of the last `logits_to_keep` columns unless it is 0.

        labels: `input_ids` again, with -100 for tokens to ignore; this method shifts them by one. The loss is the mean
        in nats, or the sum over `num_items_in_batch`, and 0 without labels to learn. In training the logits, which
        would take most of the memory, are returned only for a `logits_to_keep` other than 0."""
        refuse(kwargs)
        x_BTD, cache = self.hidden(input_ids, attention_mask, past_key_values, use_cache)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV = loss = None
        if labels is not None:
            loss = mean_loss(self.model, x_BTD[:, :-1], labels[:, 1:], num_items_in_batch)
        if labels is None or not self.training or kept != slice(0, None):
            logits_BTV = self.model.logits(x_BTD[:, kept])
        return CausalLMOutputWithPast(loss=loss, logits=logits_BTV, past_key_values=cache)

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any,
                                      **kwargs: Any) -> Any:
        """Give `generate` a `LineartimeCache` instead of its key-value cache."""
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = LineartimeCache()
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)


class LineartimeForMaskedLM(LineartimeModel):
    """The whole `LanguageModel` of a model that is not causal. Raises UsageError for a causal model."""

    def __init__(self, config: LineartimeConfig):
        require(not config.causal, "a causal model does not fill in masks", "causal = true",
                "AutoModelForCausalLM opens it")
        super().__init__(config)

    @can_return_tuple
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None,
                num_items_in_batch: Tensor | int | None = None, **kwargs: Any) -> MaskedLMOutput:
        """logits_BTV of the token at each place.

        attention_mask: 0 for padding, which may be anywhere and changes nothing. labels: the target tokens, -100
        elsewhere. The loss is their mean in nats, or their sum over `num_items_in_batch`, and 0 without targets. In
        training with labels no logits are returned, which would take most of the memory."""
        refuse(kwargs, known="input_ids, attention_mask, labels")
        x_BTD, _ = self.hidden(input_ids, attention_mask, None, False)
        logits_BTV = loss = None
        if labels is not None:
            loss = mean_loss(self.model, x_BTD, labels, num_items_in_batch)
        if labels is None or not self.training:
            logits_BTV = self.model.logits(x_BTD)
        return MaskedLMOutput(loss=loss, logits=logits_BTV)


class LineartimeForQuestionAnswering(LineartimeModel):
    """The `SpanModel` of `lineartime finetune`: the first and the last token of the answer in a window
    `[CLS] question [SEP] document [SEP]`, see `qa.spans`. Raises UsageError for a causal model."""

    _trunk = SpanModel

    @can_return_tuple
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, start_positions: Tensor | None = None,
                end_positions: Tensor | None = None, **kwargs: Any) -> QuestionAnsweringModelOutput:
        """start_logits and end_logits, `[B, T]`; padding (attention_mask 0) has the least value of the dtype.

        start_positions, end_positions: the answer's first and last token, 0 ([CLS]) without an answer. With both the
        loss is the mean of their losses in nats. Positions outside the row and in its padding are ignored; if all are,
        the loss is 0."""
        refuse(kwargs, known="input_ids, attention_mask, start_positions, end_positions")
        require((start_positions is None) == (end_positions is None), "an answer has two ends",
                "start_positions, end_positions", "give both or none")
        x_BTD, _ = self.hidden(input_ids, attention_mask, None, False)
        assert isinstance(self.model, SpanModel)
        logits_BT2 = self.model.span_head(x_BTD)
        if attention_mask is not None:
            logits_BT2 = logits_BT2.masked_fill(attention_mask[..., None] == 0, torch.finfo(logits_BT2.dtype).min)
        start_BT, end_BT = logits_BT2.unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            valid_BT = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            loss = (place_loss(start_BT, start_positions, valid_BT) + place_loss(end_BT, end_positions, valid_BT)) / 2
        return QuestionAnsweringModelOutput(loss=loss, start_logits=start_BT, end_logits=end_BT)


def place_loss(logits_BT: Tensor, place_B: Tensor, valid_BT: Tensor) -> Tensor:
    """-ln p of the places, the mean over those in a row's tokens (valid_BT is not 0); 0 without one."""
    inside_B = (place_B >= 0) & (place_B < logits_BT.shape[1])
    known_B = inside_B & (valid_BT.gather(1, torch.where(inside_B, place_B, 0)[:, None])[:, 0] != 0)
    total = F.cross_entropy(at_least_float32(logits_BT), torch.where(known_B, place_B, -100), reduction="sum")
    return total / known_B.sum().clamp(min=1)


def mean_loss(model: LanguageModel, x_BTD: Tensor, labels_BT: Tensor, n_items: Tensor | int | None) -> Tensor:
    """The mean of `LanguageModel.losses` over labels other than -100, or their sum over `n_items`; 0 without labels."""
    labels_N = labels_BT.flatten().to(x_BTD.device)
    at_K = (labels_N != -100).nonzero().flatten()
    total = model.losses(x_BTD.flatten(0, 1)[at_K], labels_N[at_K]).sum()
    return total / torch.as_tensor(len(at_K) if n_items is None else n_items).to(total.device).clamp(min=1)


def refuse(arguments: dict[str, Any], known: str = "input_ids, attention_mask, past_key_values, use_cache, labels, "
                                                   "logits_to_keep") -> None:
    """Raise UsageError for an argument that would be ignored, unless transformers passes it as None or False."""
    for name, value in arguments.items():
        require(value is None or value is False, "this model takes no such argument", name,
                f"it takes {known}")


register_checkpoint_conversion_mapping(
    "lineartime", [WeightConverter("scalar", "scalar", operations=[Reshaped()])], overwrite=True)
AutoConfig.register("lineartime", LineartimeConfig, exist_ok=True)
AutoTokenizer.register(LineartimeConfig, fast_tokenizer_class=LineartimeTokenizer, exist_ok=True)
AutoModel.register(LineartimeConfig, LineartimeModel, exist_ok=True)
AutoModelForCausalLM.register(LineartimeConfig, LineartimeForCausalLM, exist_ok=True)
AutoModelForMaskedLM.register(LineartimeConfig, LineartimeForMaskedLM, exist_ok=True)
AutoModelForQuestionAnswering.register(LineartimeConfig, LineartimeForQuestionAnswering, exist_ok=True)
