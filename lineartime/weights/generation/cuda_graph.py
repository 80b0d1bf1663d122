"""A decode step as a CUDA graph: one launch per token, instead of dozens per layer."""

import torch
from torch import Tensor

from lineartime.base.settings import require
from lineartime.model.decoding.cache import ChunkState
from lineartime.model.decoding.state import DecodingState
from lineartime.model.language_model import LanguageModel
from lineartime.weights.generation.step import last_tokens, step_in_window

WINDOW = 1024
"""The window of keys grows to multiples of this, at most to a position table's end; the graph is then made anew."""


class CapturedStep:
    """`generate.decode_step` for one state, which no other code may update meanwhile. Raises UsageError for a model
    whose step may not be repeated, see `Cache.replayable`.

    On CUDA the step is captured and replayed; on other devices the same code runs without a graph. Whole chunks and
    whole windows of keys are read, with masks, so that no shape depends on the position. A full chunk is closed outside
    of the graph."""

    def __init__(self, model: LanguageModel, state: DecodingState):
        require(all(cache.replayable for cache in state.caches), "a step of this model cannot be captured",
                model.config.attn_type, "decode without capture")
        self.model, self.state = model, state
        self.ids_B = torch.zeros_like(state.seq_lens_B)
        self.lengths: list[int] = state.in_grid_B(model.config).tolist()
        self.window = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def __call__(self, ids_B: Tensor) -> Tensor:
        """Append one token to every row; returns the logits of the next, `[B, V]`. Raises UsageError past the end of a
        position table."""
        longest = max(self.lengths) + 1
        self.model.check_length(longest)
        self.ids_B.copy_(ids_B)
        if longest > self.window:
            self.window = min(-(-longest // WINDOW) * WINDOW, self.model.config.max_len or longest + WINDOW)
            self.state.reserve(self.window)
            if self.ids_B.is_cuda:
                self.capture()
        if self.graph is None:
            self.logits_BV = self.step()
        else:
            self.graph.replay()
        if self.model.config.document_grid == "row":
            self.lengths = [length + 1 for length in self.lengths]
        else:  # which rows begin a document only the device knows
            self.lengths = self.state.in_grid_B(self.model.config).tolist()
        c = self.model.config.chunk_size
        if c is not None and any(length % c == 0 for length in self.lengths):
            self.close()
        return self.logits_BV.clone()

    def step(self) -> Tensor:
        """Append `ids_B` to the state without host synchronisation: logits_BV."""
        x_BD, start_B = step_in_window(self.model, self.ids_B, self.state, self.window)
        self.state.start_B.copy_(start_B)
        self.state.seq_lens_B.add_(1)
        return self.model.logits(x_BD)

    def capture(self) -> None:
        """Record the step as a graph. A run on a side stream warms up before; its new positions are put back."""
        seq_lens_B, start_B = self.state.seq_lens_B.clone(), self.state.start_B.clone()
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self.step()
        torch.cuda.current_stream().wait_stream(aside)
        self.state.seq_lens_B.copy_(seq_lens_B)
        self.state.start_B.copy_(start_B)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits_BV = self.step()

    def close(self) -> None:
        """Close the chunks that the last token filled."""
        inputs = last_tokens(self.model.config, self.state)
        for cache in self.state.caches:
            if isinstance(cache, ChunkState):
                at = inputs.for_heads(cache.n_heads).token_position(self.model.config, cache.kv_BSE.dtype)
                cache.close(at)
