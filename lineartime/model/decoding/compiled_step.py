"""The next tokens of rows one by one in C on a processor: `ops/decode.c` works on the tensors of a
model and its state where they are. `dispatch.unsupported_in_c` says which models take PyTorch."""

import ctypes
import functools
import itertools
import operator
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from lineartime.config import ModelConfig
from lineartime.model.decoding.state import DecodingState
from lineartime.ops import compiled
from lineartime.ops.dispatch import unsupported_in_c
from lineartime.ops.reference import frequencies

FEW_TOKENS, FEW_ROWS = 64, 16  # of all rows to read one by one, and of the head: PyTorch takes more
TOGETHER = 16  # rows that share a pass over the weights, so many at most
WEIGHTS = ("norm.weight", "norm.bias", "in_proj.weight", "in_proj.bias", "scale_offset.gamma", "scale_offset.beta",
           "out_proj.weight", "out_proj.bias", "key_conv.taps", "linear_gate.weight", "linear_gate.bias")
OF_CACHE = operator.attrgetter("k_quad_BCS", "k_lin_BCS", "v_BCE", "z_BKS", "kv_BSE", "gate_BC", "written_B", "bias_M")
"""A layer's weights and its state, in the order of the C file."""
table, pool = functools.cache(frequencies), functools.cache(ThreadPoolExecutor)


class Seen(NamedTuple):
    """A model, and the tensors of a state, as a step found them: the next sees quickly whether they
    are still the same. `DecodingState.seen` keeps it."""

    model: Any
    n_hooks: int  # registered so far in this process
    inside: list[dict[str, nn.Module]]  # the modules inside others
    modules: list[nn.Module]  # what those were
    places: list[dict[str, Any]]  # where each weight that C reads is found, and its name there; outside layers last
    names: list[str]
    state: list[Tensor | None]
    found: Sequence[Any] = ()  # the weights' pointers, their type, the configuration
    structs: tuple[bytes, bytes] = b"", b""  # `Model` and all `Layer` of the C file


def look_at(model: Any, state: list[Tensor | None]) -> Seen:
    """What a model is now."""
    inside, named = [m._modules for m in model.modules() if m._modules], dict(model.named_modules())
    places, names = [], []
    for path in [*(f"layers.{i}.{name}" for i in range(len(model.layers)) for name in WEIGHTS), "norm.weight",
                 "norm.bias", *(f"abs_pos.{name}" for name in model.abs_pos._parameters)]:
        owner, _, name = path.rpartition(".")
        places.append(own := named[owner]._parameters if owner in named else {})
        names.append("scalar" if name == "weight" and "scalar" in own else name)  # of a norm without a bias
    return Seen(model, RemovableHandle.next_id, inside, [m for x in inside for m in x.values()], places, names, state)


def tensors_of(state: DecodingState) -> list[Tensor | None]:
    """What C reads of a state, layer by layer."""
    return [*itertools.chain.from_iterable(map(OF_CACHE, state.caches))]


@functools.cache
def expected(make: Any, config: ModelConfig, n_rows: int, dtype: torch.dtype) -> Seen:
    """What is seen of a model without data, as `make` makes it."""
    model = make(config).to(dtype)
    return look_at(model, tensors_of(model.decoding_state(n_rows)))


def pointers(tensors: Iterable[Tensor | None]) -> list[int]:
    """Where tensors are; 0 where there is none."""
    return [0 if x is None else x.data_ptr() for x in tensors]


def checked(model: Any, state: DecodingState, dtype: torch.dtype, make: Any) -> tuple[bytes, bytes] | None:
    """`Model` and all `Layer` of the C file. None if C cannot read them: for hooks, adapters, other
    types and shapes, gaps, and a state that has a gradient."""
    seen, tensors = state.seen, tensors_of(state)
    if (seen is None or seen.model is not model or seen.n_hooks != RemovableHandle.next_id
            or not all(map(operator.is_, seen.state, tensors))
            or [m for inside in seen.inside for m in inside.values()] != seen.modules):
        seen = state.seen = look_at(model, tensors)
    weights = [*map(dict.get, seen.places, seen.names)]
    found = [*pointers(weights), dtype, model.config]
    if found != seen.found:
        wanted = expected(make, model.config, len(state.seq_lens_B), dtype)
        alike = (x is y if x is None or y is None else x.is_cpu and x.is_contiguous()
                 and (type(x), x.dtype, x.shape) == (type(y), y.dtype, y.shape)
                 for x, y in zip([*weights, *tensors], [*map(dict.get, wanted.places, wanted.names), *wanted.state],
                                 strict=True))
        if (any(m._forward_hooks or m._forward_pre_hooks for m in seen.modules) or not all(alike)
                or [*map(type, seen.modules)] != [*map(type, wanted.modules)]
                or any(cache.wants_gradient(()) for cache in state.caches)):
            return None
        seen = state.seen = seen._replace(found=found, structs=structs_of(model, found, pointers(tensors)))
    return seen.structs


def structs_of(model: Any, weights: list[int], state: list[int]) -> tuple[bytes, bytes]:
    """`Model` and all `Layer` of the C file, from the pointers to weights and state."""
    c, cpu, n = model.config, torch.device("cpu"), len(WEIGHTS)
    *outside, scale = weights[n * c.n_layers :][:3]  # the last norm's, and that of ScaledSin
    tables = table(c.d_model, c.d_model, device=cpu), table(c.qk_width, c.n_rotated, c.rope_base, cpu)
    layers = (weights[n * i :][:n] + state[8 * i :][:8] for i in range(c.n_layers))
    made = struct.pack("10q2d5q", c.n_layers, c.d_model, c.d_inner, c.query_key_dim, c.chunk_size, c.key_conv,
                       c.document_grid == "own", c.chunk_pooling == "mean", c.linear_rope, c.local_key_conv, c.norm_eps,
                       model.norm.eps, scale if c.abs_pos == "scaled_sin" else 0, *outside, *pointers(tables))
    return made, struct.pack(f"{(n + 8) * c.n_layers}q", *itertools.chain.from_iterable(layers))


def call(name: str, dtype: torch.dtype, *arguments: int | bytes) -> None:
    """Call a function of the C file for weights of a dtype by integers, pointers and structs."""
    function = getattr(compiled.library(), f"{name}_{str(dtype).removeprefix('torch.')}")
    function(*(x if isinstance(x, bytes) else ctypes.c_void_p(x) for x in arguments))


def extend(model: Any, embeds_BND: Tensor, begins_BN: Tensor, n_new_B: Tensor, state: DecodingState,
           make: Any) -> Tensor | None:
    """`LanguageModel.extend` by C; None where PyTorch is to do it. make: `empty_model`."""
    (n_rows, n_tokens, d), c, dtype = embeds_BND.shape, model.config, embeds_BND.dtype
    many = n_tokens > 1 and (n_rows * n_tokens > FEW_TOKENS or c.max_len is not None)
    if unsupported_in_c(model, embeds_BND) or many or n_rows != len(state.seq_lens_B):
        return None
    if not torch.is_inference_mode_enabled():  # so that autograd knows of what is written
        if state.seq_lens_B.is_inference():  # PyTorch copies what that mode has made
            return None
        increment_version([x for cache in state.caches for x in cache.tensors().values()])
    if (structs := checked(model, state, dtype, make)) is None:
        return None
    e, s, own_grid = c.d_inner, c.query_key_dim, c.document_grid == "own"
    x_NBD = embeds_BND.transpose(0, 1).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    begins_NB, length_B, start_B = begins_BN.T.contiguous(), state.seq_lens_B.clone(), state.start_B.clone()
    if c.abs_pos == "learned":
        position_B = torch.where(begins_NB[0] & own_grid, 0, state.in_grid_B(c))
        model.check_length(int((position_B + n_new_B).max()))
        x_NBD += model.abs_pos(position_B.clamp(max=c.context - 1))
    # Rows that share a pass over the weights; several threads take fewer each, but not few.
    share = min(TOGETHER, max(-(-n_rows // torch.get_num_threads()), 4))
    scratch = x_NBD.new_empty(-(-n_rows // share), share * (d + 3 * e + 2 * s) + 5 * s + c.chunk_size)
    given = (n_new_B.long().contiguous(), 8), (begins_NB, 1), (length_B, 8), (start_B, 8), (x_NBD, 4 * d)
    parts = [(*structs, min(share, n_rows - row), row, n_rows, n_tokens,
              *(x.data_ptr() + row * n_bytes for x, n_bytes in given), work.data_ptr())
             for row, work in zip(range(0, n_rows, share), scratch, strict=True)]
    list((map if len(parts) == 1 else pool(torch.get_num_threads()).map)(lambda x: call("step", dtype, *x), parts))
    state.seq_lens_B, state.start_B = length_B, start_B
    return x_NBD.to(dtype).transpose(0, 1)


def logits(model: Any, x: Tensor) -> Tensor | None:
    """`LanguageModel.logits` of a few rows in C; None where PyTorch is to do it."""
    w_VD, b_V, n_rows = model.head_matrix, model.head_bias, x.numel() // x.shape[-1]
    if unsupported_in_c(model, x) or not 0 < n_rows <= FEW_ROWS or any(
            (type(p), p.dtype, p.is_contiguous()) != (nn.Parameter, x.dtype, True) for p in (w_VD, b_V)):
        return None
    x, y = x.float().contiguous(), x.new_zeros(*x.shape[:-1], len(w_VD), dtype=torch.float32)
    call("linear", w_VD.dtype, *(p.data_ptr() for p in (w_VD, b_V, x)), n_rows, *w_VD.shape, y.data_ptr())
    return y.to(w_VD.dtype)
