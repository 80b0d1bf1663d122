"""The models as `transformers` classes: `import lineartime.hf`, then
`AutoModelForCausalLM.from_pretrained(DIR)`, or `AutoModelForMaskedLM` for a model that is not
causal. With `trust_remote_code=True` an exported folder needs no import."""

import copy
import dataclasses
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor
from transformers import modeling_outputs as outputs
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple

from lineartime.base.errors import CheckpointError, UsageError, found_in
from lineartime.base.settings import require
from lineartime.config import MODEL_FIELDS, REMOVED, ModelConfig, to_dict
from lineartime.data.tokenizer import END_OF_DOCUMENT, MASK, PAD, SEPARATOR, TOKENIZER_FILE
from lineartime.folders import CONFIG_FILE, WEIGHTS_FILE, model_config_of
from lineartime.model.language_model import LanguageModel, SpanModel, init_head, init_weights
from lineartime.model.layout import checked_mask, unwrapped
from lineartime.ops.dtypes import at_least_float32
from lineartime.tasks.pooling import document_means
from lineartime.weights.checkpoint import MANIFEST, check_finite, first_five
from lineartime.weights.hf_cache import LineartimeCache
from lineartime.weights.load import check_shared, has_optimizer, weight_files
from lineartime.weights.transformers_files import AUTO_MAP, CLASSES, CODE, CODE_FILE, LONGEST, padding_token

__all__ = [*CLASSES.values(), "LineartimeCache", "LineartimeTokenizer", "document_means"]

SAME_AS_POSITIONS = {"max_length_q", "max_length_k", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"}
"""Collators that pack documents give these beside position_ids, which say the same."""


class WithoutCopyOfCode:
    """A saved folder imports this package: transformers would copy a class that is registered."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        pass


class LineartimeConfig(WithoutCopyOfCode, transformers.PreTrainedConfig):
    """The fields of `ModelConfig` and of transformers. By default bos and eos are the
    end-of-document token, and in a masked model pad; in a causal one pad is the id behind the
    vocabulary. Raises UsageError as `ModelConfig` does."""

    model_type = "lineartime"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {"hidden_size": "d_model", "num_hidden_layers": "n_layers",
                                               "num_attention_heads": "n_heads"}
    __eq__ = transformers.PreTrainedConfig.__eq__  # the base class would generate an == that ignores our fields

    def __init__(self, **fields: Any):
        model = model_config_of(fields)
        for name, value in to_dict(model).items():
            setattr(self, name, value)
        ends = dict.fromkeys(("bos_token_id", "eos_token_id"), model.end_of_document)
        fields = ends | {name: each for name, each in fields.items() if name not in {*MODEL_FIELDS, *REMOVED}}
        pad = fields.pop("pad_token_id", model.vocab_size if model.causal else model.end_of_document)
        super().__init__(**fields)
        self.pad_token_id, self.auto_map = pad, AUTO_MAP

    def validate(self) -> None:
        """Check all but pad, which transformers would call outside the vocabulary."""
        pad, self.pad_token_id = self.pad_token_id, None
        try:
            super().validate()
        finally:
            self.pad_token_id = pad

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Load as `PreTrainedConfig` does. Raises CheckpointError for a config.json unlike its
        manifest, UsageError with the file where `ModelConfig` refuses a value."""
        place = Path(kwargs.get("name_or_path") or "", CONFIG_FILE)
        if kwargs.get("name_or_path") and place.is_file():
            check_shared(place.parent, [CONFIG_FILE])
        with found_in(place):
            return super().from_dict(config_dict, **kwargs)

    def model_config(self) -> ModelConfig:
        return ModelConfig(**{name: getattr(self, name) for name in MODEL_FIELDS})

    @property
    def max_position_embeddings(self) -> int:
        """Most tokens of a row, also after training: a position table's length, else `LONGEST`."""
        return self.model_config().max_len or LONGEST


class LineartimeTokenizer(WithoutCopyOfCode, transformers.TokenizersBackend):
    """A checkpoint's tokenizer.json. Texts begin with the end-of-document token; padding goes left.
    A special token that a text spells is text (`split_special_tokens`), but for an end-of-document
    token at its end, which trainers write there. Special tokens are read from chats, and from all
    texts if the checkpoint has "[MASK]", or once a special token is added."""

    padding_side = "left"

    # Not in __init__: for a class that has one transformers changes the tokenizer.json.
    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> "LineartimeTokenizer":
        """Load as the base class does. Raises CheckpointError for a file unlike its manifest."""
        folder = Path(pretrained_model_name_or_path, kwargs.get("subfolder") or "")
        if folder.is_dir():
            check_shared(folder, [TOKENIZER_FILE])
        tokenizer = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        for name in ("bos_token", "eos_token"):
            if getattr(tokenizer, name) is None:
                setattr(tokenizer, name, END_OF_DOCUMENT)
        there = {token.content: token for token in tokenizer.added_tokens_decoder.values() if token.special}
        for name, content in (("mask_token", MASK), ("sep_token", SEPARATOR)):
            if getattr(tokenizer, name) is None and content in there:
                setattr(tokenizer, name, there[content])
        if tokenizer.pad_token is None:
            vocabulary = tokenizer.get_vocab()
            has_gaps = len({*vocabulary.values()}) <= max(vocabulary.values())
            pad = padding_token(tokenizer.mask_token is not None, has_gaps, PAD in vocabulary)
            tokenizer.add_special_tokens({} if pad is None else {"pad_token": pad})
        # Set as it was saved: `_add_tokens` may have changed it while the vocabulary was loaded.
        is_text = tokenizer.init_kwargs.get("split_special_tokens", there.keys() <= {END_OF_DOCUMENT, PAD})
        tokenizer.split_special_tokens = is_text
        for name in ("padding_side", "split_special_tokens"):
            tokenizer.init_kwargs.setdefault(name, getattr(tokenizer, name))  # saved, for a plain class to read
        tokenizer.add_bos_token = kwargs.get("add_bos_token", True)
        return tokenizer

    def _add_tokens(self, new_tokens: Any, special_tokens: bool = False) -> int:
        """Add tokens. From then on a user's own special tokens are read from text."""
        own = {str(token) for token in new_tokens if special_tokens or getattr(token, "special", False)}
        if own - {END_OF_DOCUMENT, MASK, SEPARATOR, str(self.pad_token)}:
            self.split_special_tokens = False
        return super()._add_tokens(new_tokens, special_tokens=special_tokens)

    def tokenize(self, text: str, pair: str | None = None, add_special_tokens: bool = False, **how: Any) -> list[str]:
        """As in the base class, also where `_encode_plus` has ids alone."""
        return self.convert_ids_to_tokens(self(text, pair, add_special_tokens=add_special_tokens, **how).input_ids)

    def apply_chat_template(self, *args: Any, tokenizer_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """As in the base class; a template's special tokens are tokens."""
        how = {"split_special_tokens": False, **(tokenizer_kwargs or {})}
        return super().apply_chat_template(*args, tokenizer_kwargs=how, **kwargs)

    def _encode_plus(self, text: Any, text_pair: Any = None, **how: Any) -> transformers.BatchEncoding:
        """What all methods that encode call. An end token at a text's end is a token."""
        texts, end, split = [text] if isinstance(text, str) else text, self.eos_token, how.get("split_special_tokens")
        is_single = text_pair is None and not how.get("is_split_into_words")
        spells_text = self.split_special_tokens if split is None else split
        if not (spells_text and is_single and end and any(isinstance(t, str) and t.endswith(end) for t in texts)):
            return super()._encode_plus(text, text_pair, **how)
        if not any(token in each.removesuffix(end) for each in texts for token in self.all_special_tokens):
            return super()._encode_plus(text, **how | {"split_special_tokens": False})
        # Special tokens elsewhere in these texts are text.
        rows = [self._ids_with_end(each, how) for each in texts]
        ids = rows[0] if isinstance(text, str) and not how.get("return_tensors") else rows
        named = ("max_length", "pad_to_multiple_of", "padding_side", "return_attention_mask", "return_tensors")
        return self.pad({"input_ids": ids}, padding=how.get("padding_strategy", False),
                        **{name: how.get(name) for name in named})

    def _ids_with_end(self, text: str, how: dict[str, Any]) -> list[int]:
        """The ids of a text whose last end token alone is a token, truncated; at the left its
        beginning stays. Raises UsageError where more than ids is asked for."""
        made = ("return_tensors", "return_attention_mask")
        more = [name for name in how if name.startswith("return_") and how[name] and name not in made]
        require(not more, "a text that spells a special token and ends with the end token has ids alone",
                ", ".join(more), f"take {self.eos_token} from its end")
        begins = how.get("add_special_tokens", True)
        ids: list[int] = super()._encode_plus(text.removesuffix(self.eos_token), split_special_tokens=True,
                                              add_special_tokens=begins).input_ids
        ids += [self.eos_token_id] * text.endswith(self.eos_token)
        how_cut = how.get("truncation_strategy", "do_not_truncate")
        if how_cut == "do_not_truncate" or len(ids) <= (n := int(how["max_length"])):
            return ids
        n_begin = self.num_special_tokens_to_add() if begins else 0
        return ids[:n] if self.truncation_side == "right" else ids[:n_begin] + ids[len(ids) - n + n_begin :]


class LineartimeModel(WithoutCopyOfCode, transformers.PreTrainedModel):
    """`LanguageModel` up to its last norm. A checkpoint has the names of `LanguageModel`; here
    "model." precedes them. transformers adds it in loading, `save_pretrained` removes it."""

    config_class = LineartimeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embed"
    _is_stateful = True  # `generate` then refuses an assistant, for which a cache would have to forget tokens
    _no_split_modules = ("LanguageModel", "SpanModel")  # `device_map="auto"` puts all of it on one device
    _trunk: ClassVar[type[LanguageModel]] = LanguageModel

    def __init__(self, config: LineartimeConfig):
        super().__init__(config)
        self.model = self._trunk(config.model_config())
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        if isinstance(module, LanguageModel):
            # Weights that were loaded stay: transformers guards them in torch.nn.init alone.
            loaded = [(p, p.detach().clone()) for p in module.parameters() if getattr(p, "_is_hf_initialized", False)]
            init_weights(module)
            with torch.no_grad():
                for p, value in loaded:
                    p.copy_(value)
        if isinstance(module, torch.nn.Linear) and module in (getattr(self.model, "span_head", None),
                                                              getattr(self, "score", None)):
            init_head(module)

    @can_return_tuple
    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
                past_key_values: LineartimeCache | None = None, position_ids: Tensor | None = None,
                inputs_embeds: Tensor | None = None, **kwargs: Any) -> outputs.BaseModelOutputWithPast:
        """The hidden states `[B, T, D]`, and the cache if one is given or `use_cache` is true.

        attention_mask: 0 for padding, which may be anywhere and changes nothing, else 1. With a
        cache it covers the new tokens, or all. By default the token `padding` is padding, but with
        a cache only if it is not in the vocabulary: others may have been generated. position_ids:
        what the mask says, or from 0 in each document of a packed row. inputs_embeds: vectors `[B,
        T, D]` for input_ids, in all classes; none begins a document. output_hidden_states: blocks'
        inputs and the last states too. Raises UsageError for other positions, masks, arguments."""
        x_BTD, _, cache, states = self.hidden(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds,
                                              cache=past_key_values, **kwargs)
        return outputs.BaseModelOutputWithPast(last_hidden_state=x_BTD, past_key_values=cache, hidden_states=states)

    def hidden(self, input_ids: Tensor | None, attention_mask: Tensor | None, position_ids: Tensor | None, *,
               inputs_embeds: Tensor | None = None, cache: LineartimeCache | None = None,
               use_cache: bool | None = None, output_hidden_states: bool | None = None,
               **kwargs: Any) -> tuple[Tensor, Tensor, LineartimeCache | None, tuple[Tensor, ...] | None]:
        """For all heads: x_BTD, valid_BT (False for padding), the cache, the states of blocks."""
        # `generate` passes on the tokenizer of `stop_strings`.
        known = {"tokenizer"} | (SAME_AS_POSITIONS if position_ids is not None else set())
        for name, value in kwargs.items():
            require(value is None or value is False or name in known, "this model takes no such argument", name,
                    "leave it out")
        if cache is None and use_cache:
            cache = LineartimeCache()
        require(cache is None or isinstance(cache, LineartimeCache), "wrong cache", type(cache).__name__,
                "use a LineartimeCache")
        require((input_ids is None) != (inputs_embeds is None), "this model takes either tokens or vectors",
                "input_ids, inputs_embeds", "give one of them")
        if input_ids is None:  # -2 stands for a vector: it is no token, and no padding either
            assert inputs_embeds is not None
            input_ids = torch.full(inputs_embeds.shape[:2], -2, device=inputs_embeds.device)
        valid_BT = self.valid(input_ids, attention_mask, cache)
        # Padding has any id. What the mask counts and is no token, as behind `generate`, is an end.
        ids_BT = input_ids.masked_fill((input_ids == self.no_token) | ~valid_BT, self.config.end_of_document or 0)
        segment_ids_BT = self.segment_ids(position_ids, ids_BT, valid_BT, cache)

        if hasattr(self.model.embed, "base_layer"):  # PEFT's warning is for embeddings with the name `embed_tokens`
            warnings.warn("an adapter on `embed` of a model whose head is tied to it: merging changes the head too",
                          stacklevel=2)
        asked = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        collected: list[Tensor] | None = [] if asked else None
        if cache is None:
            # A graph cannot ask whether there is padding: a mask without any changes nothing.
            no_padding = not torch.compiler.is_compiling() and bool(unwrapped(valid_BT).all())
            x_BTD = self.model.hidden(ids_BT, segment_ids_BT, None if no_padding else valid_BT,
                                      collected=collected, embeds_BTD=inputs_embeds)
        else:
            x_BTD = cache.extend(self.model, ids_BT, valid_BT, collected, inputs_embeds)
        return x_BTD, valid_BT, cache, None if collected is None else (*collected, x_BTD)

    def valid(self, ids_BT: Tensor, mask: Tensor | None, cache: LineartimeCache | None) -> Tensor:
        """Which new tokens count, bool `[B, T]`. Raises UsageError for a wrong attention_mask."""
        if mask is None:
            return ids_BT != (self.padding if cache is None else self.no_token)
        n_rows, n_new = ids_BT.shape
        if not torch.compiler.is_exporting():  # a graph cannot refuse numbers
            n_past = 0 if cache is None else cache.get_seq_length()
            require(mask.shape in ((n_rows, n_new), (n_rows, n_past + n_new)), "wrong attention_mask",
                    f"{list(mask.shape)} for {n_rows} rows of {n_new} tokens", "one number per row and token")
        return checked_mask(mask, "attention_mask")[:, mask.shape[1] - n_new :]

    @property
    def padding(self) -> int:
        """The padding token, or -1: without one, and for one that begins or ends texts too."""
        config = self.config
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        is_own = config.pad_token_id not in (None, config.end_of_document, config.bos_token_id, *ends)
        return config.pad_token_id if is_own else -1

    @property
    def no_token(self) -> int:
        """`padding` that is behind the vocabulary, so that no text has it; else -1."""
        return self.padding if self.padding >= self.config.vocab_size else -1

    def segment_ids(self, position_ids: Tensor | None, ids_BT: Tensor, valid_BT: Tensor,
                    cache: LineartimeCache | None) -> Tensor | None:
        """The documents, which begin at position 0 and at end-of-document tokens; None if positions
        say no more than the mask. Raises UsageError for other positions."""
        in_graph = torch.compiler.is_exporting()
        if position_ids is None or (in_graph and cache is not None):
            return None
        position_BT, expected_BT = position_ids.expand_as(ids_BT), valid_BT.cumsum(1) - 1
        if cache is not None and cache.state is not None:
            expected_BT = expected_BT + cache.state.seq_lens_B[:, None]
        if not in_graph and ((position_BT == expected_BT) | ~valid_BT).all():
            return None
        begins_BT = valid_BT & (position_BT == 0)
        first_BT = torch.where(begins_BT, expected_BT, 0).cummax(1)[0]
        packed = cache is None and (in_graph or bool(((position_BT == expected_BT - first_BT) | ~valid_BT).all()))
        require(packed, "positions that this model does not take", "position_ids",
                "leave them out: tokens are counted from 0, without padding, and from 0 again where a document begins, "
                "if there is no cache")
        if self.config.end_of_document is not None:
            begins_BT = begins_BT | (valid_BT & (ids_BT == self.config.end_of_document))
        return begins_BT.cumsum(1)

    def get_submodule(self, target: str) -> torch.nn.Module:
        """As in `Module`; for PEFT's prompt tuning the embedding has BERT's name too."""
        return super().get_submodule("model.embed" if target == "embeddings.word_embeddings" else target)

    @property
    def gradient_checkpointing(self) -> bool:
        return self.model.activation_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool) -> None:
        self.model.activation_checkpointing = enable

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, output_loading_info: bool = False,
                        ignore_mismatched_sizes: bool = False, **kwargs: Any) -> Any:
        """Load as `PreTrainedModel` does. Raises CheckpointError for a file unlike its manifest,
        for a weight that is not finite, has another shape or, unless the loading info is asked for,
        is missing; UsageError for a `device_map` of several devices."""
        place = pretrained_model_name_or_path
        if place is not None and (folder := Path(place, kwargs.get("subfolder") or "")).is_dir():
            check_shared(folder, [CONFIG_FILE, *weight_files(folder)])
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
        devices = {str(device) for device in getattr(model, "hf_device_map", {}).values()}
        require(len(devices) < 2 and "disk" not in devices, "a model is whole on one device",
                f"device_map has {', '.join(sorted(devices))}", 'name a device, such as device_map="cuda"')
        readable = {name: p for name, p in model.named_parameters() if type(p.data) is Tensor}
        check_finite(readable, place)  # quantised weights are not
        return (model, found) if output_loading_info else model

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True,
                        state_dict: dict[str, Tensor] | None = None, **kwargs: Any) -> None:
        """Save weights by their names in `LanguageModel`, with or without a given `state_dict`."""
        own_names = {name.removeprefix("model."): value for name, value in (state_dict or self.state_dict()).items()}
        folder = Path(save_directory)
        if is_main_process and not folder.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / CODE_FILE).write_text(CODE)  # before `push_to_hub` uploads the folder
        super().save_pretrained(save_directory, is_main_process=is_main_process, state_dict=own_names, **kwargs)
        if is_main_process and (folder / MANIFEST).exists() and not has_optimizer(folder):
            (folder / MANIFEST).unlink()  # of an export whose files were replaced

    def load_state_dict(self, state_dict: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Load weights by their names in a checkpoint or in `state_dict()`."""
        own = self.state_dict()
        names = {name if name in own else f"model.{name}": value for name, value in state_dict.items()}
        return super().load_state_dict(names, *args, **kwargs)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None,
                                mean_resizing: bool = True) -> torch.nn.Module:
        """Change the number of tokens. Old ones keep their bits; new ones get what the base class
        gives them and the mean bias. Raises UsageError if the end-of-document token would go."""
        step, n_old = pad_to_multiple_of or 1, self.model.embed.num_embeddings
        n = -(-(new_num_tokens or n_old) // step) * step
        require(n > (self.config.end_of_document or 0), "no room for the end-of-document token", f"{n} tokens",
                f"its id is {self.config.end_of_document}")
        if n != n_old:
            self.model.embed = self._get_resized_embeddings(self.model.embed, n, None, mean_resizing)
            if self.model.head_weight is not None:
                old = torch.nn.Linear(self.config.d_model, len(self.model.head_weight), bias=False)
                old.weight = self.model.head_weight
                self.model.head_weight = self._get_resized_lm_head(old, n, mean_resizing=mean_resizing).weight
            kept_V = self.model.head_bias.detach()[:n]
            bias_V = torch.cat([kept_V, kept_V.mean().expand(n - len(kept_V))])
            self.model.head_bias = torch.nn.Parameter(bias_V, self.model.head_bias.requires_grad)
            self.config.vocab_size = n
            self.model.config = dataclasses.replace(self.model.config, vocab_size=n)
        return self.model.embed


class LineartimeForCausalLM(LineartimeModel, transformers.GenerationMixin):
    """The whole causal `LanguageModel`, with `generate`. Raises UsageError for any other."""

    def __init__(self, config: LineartimeConfig):
        require(config.causal, "only a causal model predicts the next token", "causal = false",
                "AutoModelForMaskedLM opens it")
        super().__init__(config)

    @can_return_tuple
    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
                past_key_values: LineartimeCache | None = None, position_ids: Tensor | None = None,
                labels: Tensor | None = None, logits_to_keep: int | Tensor = 0,
                num_items_in_batch: Tensor | int | None = None, **kwargs: Any) -> outputs.CausalLMOutputWithPast:
        """logits_BTV, with `logits_to_keep` other than 0 of so many last columns or these. labels:
        `input_ids` again, with -100 for tokens to ignore; this method shifts them by one. Padding
        and what stands behind it are ignored too. The loss, in nats: see `token_loss`. In training
        with labels the logits, most of the memory, are returned unless `logits_to_keep` is 0."""
        x_BTD, valid_BT, cache, states = self.hidden(input_ids, attention_mask, position_ids,
                                                     cache=past_key_values, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV = loss = None
        if labels is not None:
            learned_BT = valid_BT[:, 1:] & valid_BT[:, :-1] & (labels[:, 1:] != self.no_token)
            loss = token_loss(self.model, x_BTD[:, :-1], labels[:, 1:].masked_fill(~learned_BT, -100),
                              num_items_in_batch)
        if labels is None or not self.training or kept != slice(0, None):
            logits_BTV = self.model.logits(x_BTD[:, kept])
        return outputs.CausalLMOutputWithPast(loss=loss, logits=logits_BTV, past_key_values=cache, hidden_states=states)

    @property
    def base_model(self) -> Any:
        """The same modules as a `LineartimeModel`, which returns hidden states."""
        trunk = copy.copy(self)
        trunk.__class__ = LineartimeModel
        trunk.__dict__.pop("forward", None)  # of a library that put its own there
        return trunk

    def get_encoder(self, modality: str | None = None) -> Any:
        """This model: transformers then sees that there is no encoder."""
        return self

    def get_output_embeddings(self) -> Any:
        return SimpleNamespace(weight=self.model.head_matrix, bias=self.model.head_bias)

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any,
                                      **kwargs: Any) -> Any:
        """Give `generate` a `LineartimeCache` instead of its key-value cache."""
        if generation_config.use_cache is False or model_kwargs.get("past_key_values") is not None:
            return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        kind = generation_config.cache_implementation
        require(kind in (None, "dynamic"), "this model has a cache of its own", f"cache_implementation = {kind}",
                "leave it out")
        model_kwargs["past_key_values"] = LineartimeCache()

    def _get_logits_processor(self, *args: Any, encoder_input_ids: Any = None, **kwargs: Any) -> Any:
        """Processors that never see padding: some look up the logits of a prompt's tokens."""
        made, ids, mask = WithoutPadding(), encoder_input_ids, (kwargs.get("model_kwargs") or {}).get("attention_mask")
        made.n_tokens, made.replacement = self.config.vocab_size, self.config.end_of_document or 0
        if ids is not None and ids.dim() == 2:  # no vectors
            made.padding_BP = mask == 0 if mask is not None and mask.shape == ids.shape else None
            encoder_input_ids = made.seen(ids)
        made += super()._get_logits_processor(*args, encoder_input_ids=encoder_input_ids, **kwargs)
        return made

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Raises UsageError, for `generate_batch` and `transformers serve` too."""
        raise UsageError("this model has no keys and values to keep in pages", "continuous batching",
                         "call generate, with padding for prompts of different lengths")


class WithoutPadding(transformers.LogitsProcessorList):
    """Logits processors that see the token `replacement` where prompts have padding, and for ids
    that are no tokens, which `generate` writes behind rows that have ended."""

    n_tokens = replacement = 0
    padding_BP: Tensor | None = None

    def seen(self, ids_BT: Tensor) -> Tensor:
        hidden_BT = ids_BT >= self.n_tokens
        if self.padding_BP is not None:  # a prompt has several adjacent rows in a search
            n_rows, n_new = len(ids_BT) // len(self.padding_BP), ids_BT.shape[1] - self.padding_BP.shape[1]
            hidden_BT |= torch.nn.functional.pad(self.padding_BP.repeat_interleave(n_rows, 0), [0, n_new])
        return ids_BT.masked_fill(hidden_BT, self.replacement)

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return super().__call__(self.seen(input_ids), scores, **kwargs)


class LineartimeForMaskedLM(LineartimeModel):
    """The whole `LanguageModel` that is not causal. Raises UsageError for any other."""

    get_output_embeddings = LineartimeForCausalLM.get_output_embeddings

    def __init__(self, config: LineartimeConfig):
        require(not config.causal, "a causal model does not fill in masks", "causal = true",
                "AutoModelForCausalLM opens it")
        super().__init__(config)

    @can_return_tuple
    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
                position_ids: Tensor | None = None, labels: Tensor | None = None,
                num_items_in_batch: Tensor | int | None = None, **kwargs: Any) -> outputs.MaskedLMOutput:
        """logits_BTV, but none in training with labels: they would take most of the memory. labels:
        target tokens, -100 elsewhere; those of padding are ignored. The loss: `token_loss`."""
        x_BTD, valid_BT, _, states = self.hidden(input_ids, attention_mask, position_ids, **kwargs)
        logits_BTV = loss = None
        if labels is not None:
            loss = token_loss(self.model, x_BTD, labels.masked_fill(~valid_BT, -100), num_items_in_batch)
        if labels is None or not self.training:
            logits_BTV = self.model.logits(x_BTD)
        return outputs.MaskedLMOutput(loss=loss, logits=logits_BTV, hidden_states=states)


class LineartimeForQuestionAnswering(LineartimeModel):
    """The `SpanModel` of `lineartime finetune`: the answer's first and last token in a window
    `[CLS] question [SEP] document [SEP]`. Raises UsageError for a causal model."""

    _trunk = SpanModel

    @can_return_tuple
    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
                start_positions: Tensor | None = None, end_positions: Tensor | None = None,
                position_ids: Tensor | None = None, **kwargs: Any) -> outputs.QuestionAnsweringModelOutput:
        """start_logits and end_logits, `[B, T]`; padding has the least value of the dtype.
        start_positions, end_positions: the answer's first and last token, 0 ([CLS]) without an
        answer. The loss is their mean in nats, without positions behind the row's end."""
        x_BTD, valid_BT, _, states = self.hidden(input_ids, attention_mask, position_ids, **kwargs)
        logits_BT2 = self.model.logits(x_BTD)
        logits_BT2 = logits_BT2.masked_fill(~valid_BT[..., None], torch.finfo(logits_BT2.dtype).min)
        start_BT, end_BT = logits_BT2.unbind(-1)
        loss = self.loss_function(at_least_float32(start_BT), at_least_float32(end_BT), start_positions, end_positions)
        return outputs.QuestionAnsweringModelOutput(loss=loss, start_logits=start_BT, end_logits=end_BT,
                                                    hidden_states=states)


class LineartimeForSequenceClassification(LineartimeModel):
    """A class, several, or numbers for each row, by `config.problem_type`: a linear layer, `score`,
    on the mean over the row's tokens. By default one label is a number."""

    accepts_loss_kwargs = False  # the mean over micro-batches is then taken by Trainer

    def __init__(self, config: LineartimeConfig):
        super().__init__(config)
        self.score = torch.nn.Linear(config.d_model, config.num_labels)

    @can_return_tuple
    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
                labels: Tensor | None = None, position_ids: Tensor | None = None,
                **kwargs: Any) -> outputs.SequenceClassifierOutput:
        """logits `[B, num_labels]`. labels: a class or a number for each row, `[B]`; or 1.0 for
        each of several classes, or numbers, `[B, num_labels]`. Without `problem_type` integers are
        classes, and floats several. The loss is the mean in nats, or of the squared error."""
        x_BTD, valid_BT, _, states = self.hidden(input_ids, attention_mask, position_ids, **kwargs)
        mean_BD = document_means(at_least_float32(x_BTD), valid_BT.long() - 1, n=1)[:, 0]
        logits_BL, loss = self.score(mean_BD.to(getattr(self.score.weight, "dtype", x_BTD.dtype))), None
        if labels is not None:
            loss = self.loss_function(labels, at_least_float32(logits_BL), self.config)
        return outputs.SequenceClassifierOutput(loss=loss, logits=logits_BL, hidden_states=states)


def token_loss(model: LanguageModel, x_BTD: Tensor, labels_BT: Tensor, n_items: Tensor | int | None) -> Tensor:
    """The mean of `LanguageModel.losses`, in nats, over labels but -100, or their sum divided by
    n_items (`num_items_in_batch`); 0 without labels. Other tokens' logits are not computed."""
    labels_N = labels_BT.flatten().to(x_BTD.device)
    at_K = (labels_N != -100).nonzero().flatten()
    total = model.losses(x_BTD.flatten(0, 1)[at_K], labels_N[at_K]).sum()
    return total / torch.as_tensor(len(at_K) if n_items is None else n_items).to(total.device).clamp(min=1)


transformers.AutoConfig.register("lineartime", LineartimeConfig, exist_ok=True)
transformers.AutoTokenizer.register(LineartimeConfig, fast_tokenizer_class=LineartimeTokenizer, exist_ok=True)
for auto_class in CLASSES.keys() - {"AutoConfig"}:
    getattr(transformers, auto_class).register(LineartimeConfig, globals()[CLASSES[auto_class]], exist_ok=True)
# Trainer shifts the labels of label smoothing for classes with these names only.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["lineartime"] = LineartimeForCausalLM.__name__
