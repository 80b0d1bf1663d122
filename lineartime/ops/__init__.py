"""The attention ops. The norm is in `ops.reference`, the loss in `ops.cross_entropy`.

| op | what | takes -> returns | kernels in |
|---|---|---|---|
| gated_chunk_attention | FLASH, in chunks | `[B, T, F]` -> `[B, T, E]` | `mixed_chunk` |
| chunk_attention | the same, of plain values | `[B, T, E]` -> `[B, T, E]` | `mixed_chunk` |
| gated_quadratic_attention | FLASH-Quad | `[B, T, F]` -> `[B, T, E]` | `quadratic` |

B rows of T tokens; E is `d_inner`, S `query_key_dim`. The first argument is u, v and z side by
side, before silu, and F = 2 E + S; `heads` says how queries and keys are made from z. In chunks
`heads` may be these queries and keys, and F = 2 E. `chunk_attention` takes v alone, as it is: no
silu, no gate. The functions of the same names in `reference` are the definition, in plain PyTorch;
kernels have the same signatures. Attention in chunks has `windows` too, which keeps less for the
backward pass. `impl` selects:

| impl | what runs |
|---|---|
| None | what supports the inputs: kernels on CUDA, `windows` on a processor, the reference |
| "reference" | the PyTorch reference |
| "triton" | kernels; `UsageError` where they do not support the inputs |

`windows` is in PyTorch and C, and needs a C compiler: `compiled`. `dispatch` says which inputs it
and the kernels support; on CUDA the reason against kernels is logged once. Attention over rows
without a token (B or T of 0) goes to the reference."""

from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from lineartime.base.errors import UsageError
from lineartime.base.settings import require
from lineartime.ops import dispatch, reference, windows
from lineartime.ops.reference import CarriedState, Exchange, Heads, HeadsFromZ

if dispatch.HAS_TRITON:
    from lineartime.ops import mixed_chunk, quadratic

__all__ = ["HeadsFromZ", "chunk_attention", "gated_chunk_attention", "gated_quadratic_attention"]


def gated_chunk_attention(uvz_BTF: Tensor, heads: Heads, w: Tensor | None, *, chunk_size: int, causal: bool,
                          segment_ids_BT: Tensor | None = None, pooling: str = "mean", gate_BT: Tensor | None = None,
                          exchange: Exchange | None = None, impl: str | None = None) -> Tensor:
    """A FLASH layer between its two projections: u * (mixed chunk attention of v) (Code 8).

    | argument | shape, dtype | meaning |
    |---|---|---|
    | uvz_BTF | `[B, T, 2 E + S]`, floating | u, v and z, before silu; with made heads no z |
    | heads | a `HeadsFromZ` | of four heads `[4, S]`, and angles `[1 or B, T, S / 2]` |
    | or | four of `[B, T, S]`, uvz's dtype | q and k of the quadratic, then of the linear half |
    | w | `[2 C - 1]`, floating, or None | position bias, b[i, j] = w[j - i + C - 1]; None: none |
    | chunk_size | integer | C, and n of relu(q k^T / n + b)^2 |
    | causal | bool | True: no token sees a later one |
    | segment_ids_BT | `[B, T]`, integers or None | documents, see `SequenceInfo`; unchecked |
    | pooling | "mean", "sum", "written" | the linear half is divided by tokens, 1, or gates |
    | gate_BT | `[B, T]`, float32 at least, or None | the gates of the linear keys, for "written" |
    | exchange | callable, or None | for parts of rows: a `CarriedState`, or what ranks exchange |
    | impl | | see the table of this module |

    Returns `[B, T, E]` of uvz's dtype, for float16 in float32. Raises UsageError for an unknown
    impl, impl "triton" on inputs that the kernels do not support, gates of heads that are not made,
    a pooling that does not go with the gates, and a `CarriedState` for rows that are not causal or
    not whole chunks."""
    require(gate_BT is None or not isinstance(heads, HeadsFromZ), "gates are for heads that are made", "gate_BT")
    module = module_for_chunks(uvz_BTF, heads, w, chunk_size, causal, pooling, gate_BT, exchange, impl, gated=True)
    return module.gated_chunk_attention(uvz_BTF, heads, w, chunk_size=chunk_size, causal=causal,
                                        segment_ids_BT=segment_ids_BT, pooling=pooling, gate_BT=gate_BT,
                                        exchange=exchange)


def chunk_attention(v_BTE: Tensor, heads: Sequence[Tensor], w: Tensor | None = None, *, chunk_size: int, causal: bool,
                    segment_ids_BT: Tensor | None = None, pooling: str = "mean", gate_BT: Tensor | None = None,
                    exchange: Exchange | None = None, impl: str | None = None) -> Tensor:
    """Mixed chunk attention of values as they are, for layers with an activation and a gate of
    their own: relu(q k^T / n + b)^2 v inside a chunk, plus q sum(k^T v) across chunks (Code 8).

    v_BTE: `[B, T, E]`, floating. heads: four of `[B, T, S]`, v's dtype.

    The other arguments, the result and the errors are as in `gated_chunk_attention`."""
    module = module_for_chunks(v_BTE, heads, w, chunk_size, causal, pooling, gate_BT, exchange, impl, gated=False)
    return module.chunk_attention(v_BTE, heads, w, chunk_size=chunk_size, causal=causal, segment_ids_BT=segment_ids_BT,
                                  pooling=pooling, gate_BT=gate_BT, exchange=exchange)


def module_for_chunks(x_BTF: Tensor, heads: Heads, w: Tensor | None, chunk_size: int, causal: bool, pooling: str,
                      gate_BT: Tensor | None, exchange: Exchange | None, impl: str | None, *,
                      gated: bool) -> ModuleType:
    """Where the function runs that is named as the op: `reference`, `windows` or `mixed_chunk`."""
    n_tokens = x_BTF.shape[1]
    require(pooling in ("mean", "sum", "written") and (pooling == "written") == (gate_BT is not None),
            "pooling and gates do not agree", f"pooling = {pooling}", 'give "mean" or "sum", or "written" with gate_BT')
    # Not `require`, whose words would make n_tokens a constant for torch.compile.
    if isinstance(exchange, CarriedState) and (not causal or n_tokens % chunk_size):
        raise UsageError("a state is carried over whole chunks of causal rows",
                         f"{n_tokens} tokens in chunks of {chunk_size}" if causal else "causal = false")
    in_kernels = dispatch.use_kernels(impl, x_BTF.device, dispatch.unsupported_chunks, x_BTF, heads, chunk_size,
                                      pooling, gated)
    if dispatch.use_windows(impl, exchange is not None, x_BTF, *heads, w, gate_BT):
        return windows
    return mixed_chunk if in_kernels and x_BTF.numel() > 0 else reference


def gated_quadratic_attention(uvz_BTF: Tensor, heads: HeadsFromZ, w: Tensor | None, *, scale_len: float, causal: bool,
                              segment_ids_BT: Tensor | None = None, impl: str | None = None) -> Tensor:
    """A FLASH-Quad layer between its two projections: u * (relu(q k^T / n + b)^2 v) (Code 6).

    heads: of q and of k. w: `[2 T - 1]`, floating, position bias, b[i, j] = w[j - i + T - 1]; None:
    none. scale_len: n, a positive number.

    The other arguments, the result and the errors are as in `gated_chunk_attention`."""
    in_kernels = dispatch.use_kernels(impl, uvz_BTF.device, dispatch.unsupported_rows, uvz_BTF, heads)
    module = quadratic if in_kernels and uvz_BTF.numel() > 0 else reference
    return module.gated_quadratic_attention(uvz_BTF, heads, w, scale_len=scale_len, causal=causal,
                                            segment_ids_BT=segment_ids_BT)
