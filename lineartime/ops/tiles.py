"""Functions that several kernels call: to make heads, load and store tiles, score and mask.

A kernel is a program that runs once per tile of its output, in parallel. Shape letters are those of
`layers`. A suffix 1 or 2 marks the first or the second half of the 128 dimensions of a head, the
two halves that RoPE rotates. Values are float32 outside matmuls. The operands of a matmul have the
dtype of the inputs; its sums are float32."""

import triton
import triton.language as tl

HALF: tl.constexpr = tl.constexpr(64)  # half of `query_key_dim`
SIZE: tl.constexpr = tl.constexpr(128)
"""Width of a head in the kernels: `query_key_dim`; narrower heads are filled up with zeros."""


@triton.jit
def dot(a, b, acc):
    """acc + a b. Float32 operands are not rounded to TF32."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def silu_slope(x):
    """The derivative of silu."""
    s = tl.sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


@triton.jit
def load_base(z_row, token, n_tokens, F):
    """silu of z's two halves of tokens, 0 past `n_tokens`. z_row: pointer to z of token 0."""
    column = tl.arange(0, HALF)
    z1 = load_tile(z_row, token, column, n_tokens, F).to(tl.float32)
    return silu(z1), silu(load_tile(z_row + HALF, token, column, n_tokens, F).to(tl.float32))


@triton.jit
def load_angles(sin_row, cos_row, token, n_tokens):
    """sin and cos of the positions of the tokens `token`, 0 past `n_tokens`."""
    column = tl.arange(0, HALF)
    sin = load_tile(sin_row, token, column, n_tokens, HALF).to(tl.float32)
    return sin, load_tile(cos_row, token, column, n_tokens, HALF).to(tl.float32)


@triton.jit
def rotate(x1, x2, sin, cos):
    """RoPE of two halves (Code 3)."""
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


@triton.jit
def rotate_back(x1, x2, sin, cos):
    """The transpose of `rotate`: takes a gradient back through RoPE."""
    return x1 * cos + x2 * sin, x2 * cos - x1 * sin


@triton.jit
def make_head(z1, z2, gamma, beta, head, sin, cos, dtype: tl.constexpr):
    """The two halves of one head, in `dtype`: scale and offset of z (Eq. 5), then RoPE."""
    at = head * 2 * HALF + tl.arange(0, HALF)
    x1 = z1 * tl.load(gamma + at).to(tl.float32)[None, :] + tl.load(beta + at).to(tl.float32)[None, :]
    x2 = z2 * tl.load(gamma + at + HALF).to(tl.float32)[None, :] + tl.load(beta + at + HALF).to(tl.float32)[None, :]
    x1, x2 = rotate(x1, x2, sin, cos)
    return x1.to(dtype), x2.to(dtype)


@triton.jit
def visible_tile(query, key, documents, first, n_tokens, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr):
    """True where a query sees a key: in the row, of one document, when causal not later.

    query, key: indices in the row, a column and a row. documents: pointer to the documents of
    tokens, -1 for padding, those of the row from `first` on."""
    visible = (query < n_tokens) & (key < n_tokens)
    if CAUSAL:
        visible = visible & (key <= query)
    if DOCUMENTS:
        query_document = tl.load(documents + first + query, mask=query < n_tokens, other=-1)
        key_document = tl.load(documents + first + key, mask=key < n_tokens, other=-1)
        visible = visible & (query_document == key_document) & (key_document >= 0)
    return visible


@triton.jit
def mask_of(row, column, n_rows, width):
    """The rows before `n_rows` and, unless `width` is None, the columns before `width`."""
    mask = row[:, None] < n_rows
    if width is not None:
        mask = mask & (column[None, :] < width)
    return mask


@triton.jit
def load_tile(first, row, column, n_rows, stride, width=None, AGAIN: tl.constexpr = False):
    """Load the rows `row` and columns `column` of `mask_of`, else 0. first: pointer to row 0.

    Offsets are 32 bits, which take half the registers. Tiles that differ only in `first` share
    them."""
    at, mask = first + row[:, None] * stride + column[None, :], mask_of(row, column, n_rows, width)
    if AGAIN:  # another instruction than the second load, so that the compiler does not keep the tile in registers
        return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_last")
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def store_tile(first, row, column, n_rows, stride, tile, width=None):
    """Store the tile that `load_tile` would load."""
    at, mask = first + row[:, None] * stride + column[None, :], mask_of(row, column, n_rows, width)
    tl.store(at, tile.to(first.dtype.element_ty), mask=mask)


@triton.jit
def head_product(a_rows, a, n_a, b_rows, b, n_b, acc, BS: tl.constexpr):
    """acc + x y^T, with x the rows `a` of one head and y the rows `b` of another, BS dimensions at
    a time: all 128 on tensor cores, fewer where operands must be in registers."""
    for part in range(0, SIZE, BS):
        column = part + tl.arange(0, BS)
        x, y = load_tile(a_rows, a, column, n_a, SIZE), load_tile(b_rows, b, column, n_b, SIZE)
        acc = dot(x, tl.trans(y), acc)
    return acc
