"""The next tokens of rows one by one in C on a processor: `ops/decode.c` works on the tensors of a
model and its state where they are. `dispatch.unsupported_in_c` says which models take PyTorch."""

import ctypes
import functools
import itertools
import operator
import struct
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

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
PARTS: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()
table, pool = functools.cache(frequencies), functools.cache(ThreadPoolExecutor)


def parts_of(model: Any, state: DecodingState) -> tuple[list[Any], list[Tensor | None]]:
    """Hooks, modules and parameters of a model, looked up when they are not as before; and what C
    reads in its order: the weights and the state of each layer, then what is outside."""
    dicts, parts, weights, _ = PARTS.get(model, ([], [], [], None))
    if not dicts or not all(map(operator.is_, itertools.chain.from_iterable(map(dict.values, dicts)), parts)):
        dicts = [model._modules, *(each for m in [*model.modules()][1:] for each in (
            m._forward_hooks, m._forward_pre_hooks, *filter(None, (m._modules, m._parameters))))]
        parts = [x for each in dicts for x in each.values()]
        own = [{name.replace("scalar", "weight"): x for name, x in m.named_parameters()} for m in model.layers]
        weights = [*([*map(each.get, WEIGHTS)] for each in own),
                   [*model.abs_pos.parameters(), *model.norm.parameters(), None][:3]]
        PARTS[model] = [dicts, parts, weights, None]
    layers = zip(weights, map(OF_CACHE, state.caches), strict=False)
    return parts, [*(x for both in layers for x in itertools.chain(*both)), *weights[-1]]


@functools.cache
def expected(make: Any, config: ModelConfig, n_rows: int, dtype: torch.dtype) -> tuple[list[Any], list[Tensor | None]]:
    """`parts_of` a model without data, as `make` makes it."""
    model = make(config).to(dtype)
    return parts_of(model, model.decoding_state(n_rows))


def pointers(model: Any, state: DecodingState, dtype: torch.dtype, make: Any) -> list[int] | None:
    """To what C reads, 0 where there is nothing. None if it cannot: for hooks, adapters, other
    types and shapes, gaps, and a state that has a gradient."""
    parts, tensors = parts_of(model, state)
    found = [0 if x is None else x.data_ptr() for x in tensors], len(state.seq_lens_B), dtype
    if PARTS[model][-1] != found:
        wanted_parts, wanted = expected(make, model.config, *found[1:])
        alike = (x is y if x is None or y is None else x.is_cpu and x.is_contiguous()
                 and (type(x), x.dtype, x.shape) == (type(y), y.dtype, y.shape)
                 for x, y in zip(tensors, wanted, strict=True))
        if [*map(type, parts)] != [*map(type, wanted_parts)] or not all(alike) or any(
                cache.wants_gradient(()) for cache in state.caches):
            return None
        PARTS[model][-1] = found
    return found[0]


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
    if (at := pointers(model, state, dtype, make)) is None:
        return None
    e, s, cpu = c.d_inner, c.query_key_dim, state.start_B.device
    tables = table(d, d, device=cpu), table(c.qk_width, c.n_rotated, c.rope_base, cpu)
    layers, own_grid = struct.pack(f"{len(at)}q", *at), c.document_grid == "own"
    outside = at[-3] if c.abs_pos == "scaled_sin" else 0, *at[-2:], *(x.data_ptr() for x in tables)
    sizes = struct.pack("10q2d5q", c.n_layers, d, e, s, c.chunk_size, c.key_conv, own_grid, c.chunk_pooling == "mean",
                        c.linear_rope, c.local_key_conv, c.norm_eps, model.norm.eps, *outside)
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
    parts = [(sizes, layers, min(share, n_rows - row), row, n_rows, n_tokens,
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
