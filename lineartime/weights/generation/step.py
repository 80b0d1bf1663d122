"""A decode step as a function of tensors, one graph for torch.compile, torch.export and ONNX."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from lineartime.base.settings import require, require_counts
from lineartime.model.decoding.cache import Cache
from lineartime.model.decoding.state import DecodingState
from lineartime.model.language_model import LanguageModel


def step_in_window(model: LanguageModel, ids_B: Tensor, state: DecodingState, window: int,
                   collected: list[Tensor] | None = None,
                   embeds_B1D: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Append one token to every row without host synchronisation: the hidden states x_BD, and the
    start of each row's document. Only the state's caches are updated, and full chunks not closed.
    window: see `DecodeInputs`. collected, embeds_B1D: see `LanguageModel.hidden`."""
    ids_B1 = ids_B[:, None]
    inputs = state.inputs(model.config, torch.ones_like(ids_B), model.begins(ids_B1), window)
    embeds_B1D = model.embed(ids_B1) if embeds_B1D is None else embeds_B1D
    return model.extend_layers(embeds_B1D, inputs, state.caches, collected)[:, 0], state.starts_B(inputs)


class DecodeStep(nn.Module):
    """`generate.decode_step` on tensors: (ids_B, state) to (logits_BV, state). The state is a
    dictionary of tensors, written in place, without a gradient; by rows, or rows times heads.

    window: for models with keys and values the most tokens of a row; FLASH needs none. Position
    biases are computed now, so load and move the model before. Raises UsageError for a window that
    is missing, not needed or past a position table, a model that does not decode, a combiner."""

    def __init__(self, model: LanguageModel, window: int | None = None):
        super().__init__()
        with torch.no_grad():
            state = model.decoding_state(1)
        require(model.config.attn_type != "rowmajor_axial", "a step of this model is not one graph",
                model.config.attn_type, "decode with lineartime.generate")
        self.grows = any(cache.growing for cache in state.caches)
        require(self.grows == (window is not None), f"a window is {'missing' if self.grows else 'not needed'}",
                f"window = {window}", "give the most tokens of a row" if self.grows else "the state is constant")
        require_counts(window=window)
        model.check_length(window or 0)
        self.model, self.window = model, window or 1
        state.reserve(self.window)
        with torch.no_grad():
            step_in_window(model, state.seq_lens_B, state, self.window)  # computes what is constant, such as biases
        self.caches = state.caches
        # In a graph torch.compile of 2.11 takes neither copy.copy nor vars: the names are listed.
        self.names = [[*cache.tensors()] for cache in self.caches]
        self.others = [{name: value for name, value in vars(cache).items() if name not in names}
                       for cache, names in zip(self.caches, self.names, strict=True)]

    def empty_state(self, n_rows: int) -> dict[str, Tensor]:
        """The state of rows that have no token yet."""
        return self.to_tensors(self.model.decoding_state(n_rows))

    def to_tensors(self, state: DecodingState) -> dict[str, Tensor]:
        """A copy of a state as tensors. Raises UsageError for rows that fill the window."""
        longest = int(state.in_grid_B(self.model.config).max()) if self.grows else 0
        require(longest < self.window, "the rows fill the window", f"{longest} tokens, window = {self.window}",
                "make the step with a larger window")
        state.reserve(self.window)
        growing = {f"{n}.{name}" for n, cache in enumerate(state.caches) for name in cache.growing}
        with torch.inference_mode(False):  # what is made in that mode can be written only in it
            return {name: (tensor[:, : self.window] if name in growing else tensor).clone()
                    for name, tensor in self.tensors_of(state).items()}

    def tensors_of(self, state: DecodingState) -> dict[str, Tensor]:
        """The tensors of a state by name, those of cache 3 as "3.kv_BSE"."""
        return {"seq_lens_B": state.seq_lens_B, "start_B": state.start_B} | {
            f"{n}.{name}": getattr(state.caches[n], name) for n, names in enumerate(self.names) for name in names}

    def to_state(self, state: dict[str, Tensor]) -> DecodingState:
        """The inverse of `to_tensors`, of the tensors themselves."""
        caches: list[Cache] = []
        for n, cache in enumerate(self.caches):
            caches.append(object.__new__(type(cache)))
            for name, value in {**self.others[n], **{name: state[f"{n}.{name}"] for name in self.names[n]}}.items():
                setattr(caches[-1], name, value)
        return DecodingState(caches, state["seq_lens_B"], state["start_B"])

    def forward(self, ids_B: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """logits_BV, and the state after ids_B. That rows fit the window is not checked."""
        return self.model.logits(self.hidden(ids_B, state)), state

    def hidden(self, ids_B: Tensor, state: dict[str, Tensor], *more: Any) -> Tensor:
        """`forward` up to the hidden states x_BD. more: see `step_in_window`."""
        now = self.to_state(state)
        x_BD, now.start_B = step_in_window(self.model, ids_B, now, self.window, *more)
        now.seq_lens_B = now.seq_lens_B + 1
        put(self.tensors_of(now), state)  # most are there
        closing = [f"{n}.{name}" for n, names in enumerate(self.names)
                   for name in self.caches[n].closing if name in names]
        if closing:
            is_full = (now.in_grid_B(self.model.config) % (self.model.config.chunk_size or 1) == 0).any()
            if torch.compiler.is_exporting():  # takes no branch that writes
                put(torch.cond(is_full, self.closed, lambda now: {x: now[x].clone() for x in closing}, (state,)), state)
            elif torch.compiler.is_compiling():
                torch.cond(is_full, lambda now: put(self.closed(now), now), lambda now: put({}, now), (state,))
            elif is_full:
                put(self.closed(state), state)
        return x_BD

    def closed(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Close the chunks that the last token filled: the tensors of the state that change."""
        config, now = self.model.config, self.to_state({name: tensor.clone() for name, tensor in state.items()})
        before = dataclasses.replace(now, seq_lens_B=now.seq_lens_B - 1)
        begins_B1 = torch.zeros_like(now.start_B[:, None]).bool()
        inputs = before.inputs(config, torch.ones_like(now.start_B), begins_B1, self.window)
        return {f"{n}.{name}": tensor for n, cache in enumerate(now.caches)
                for name, tensor in cache.closed(inputs, config).items()}


def put(new: dict[str, Tensor], state: dict[str, Tensor]) -> Tensor:
    """Write new values into the tensors of a state. Returns any tensor, as `torch.cond` wants."""
    for name, tensor in new.items():
        if tensor is not state[name]:
            state[name].copy_(tensor)
    return torch.zeros(())
