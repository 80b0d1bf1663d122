"""Functions that several kernels call: to make heads, load and store tiles, score and mask.

A kernel is a program that runs once per tile of its output, in parallel. Shape letters are those of
`layers`. A suffix 1 or 2 marks the first or the second half of the 128 dimensions of a head, the
two halves that RoPE rotates. Values are float32 outside matmuls. The operands of a matmul have the
dtype of the inputs; its sums are float32."""

import triton
import triton.language as tl

HALF: tl.constexpr = tl.constexpr(64)
"""Half of `query_key_dim`."""
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
    at = z_row + token[:, None] * F + tl.arange(0, HALF)[None, :]
    mask = token[:, None] < n_tokens
    z1 = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    z2 = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    return silu(z1), silu(z2)


@triton.jit
def load_angles(sin_row, cos_row, token, n_tokens):
    """sin and cos of the positions of the tokens `token`, 0 past `n_tokens`."""
    at = token[:, None] * HALF + tl.arange(0, HALF)[None, :]
    mask = token[:, None] < n_tokens
    sin = tl.load(sin_row + at, mask=mask, other=0.0).to(tl.float32)
    return sin, tl.load(cos_row + at, mask=mask, other=0.0).to(tl.float32)


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
def visible_tile(query, key, query_document, key_document, n_tokens, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr):
    """True where a query sees a key: in the row, of one document, when causal not later.

    query, key: indices in the row, a column and a row. query_document, key_document: as these, -1
    for padding."""
    visible = (query < n_tokens) & (key < n_tokens)
    if CAUSAL:
        visible = visible & (key <= query)
    if DOCUMENTS:
        visible = visible & (query_document == key_document) & (key_document >= 0)
    return visible


@triton.jit
def load_rows(x_row, token, column, n_tokens, width, stride):
    """Load the rows `token` and columns `column`, 0 past `n_tokens` and `width`.

    Offsets are 32 bits, which take half the registers; x_row is a 64-bit pointer close to the
    tile."""
    mask = (token[:, None] < n_tokens) & (column[None, :] < width)
    at = x_row + token[:, None] * stride + column[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def store_rows(x_row, token, column, n_tokens, width, stride, tile):
    """Store the tile that `load_rows` would load."""
    mask = (token[:, None] < n_tokens) & (column[None, :] < width)
    at = x_row + token[:, None] * stride + column[None, :]
    tl.store(at, tile.to(x_row.dtype.element_ty), mask=mask)


@triton.jit
def load_tile(first, row, column, n_rows, stride, AGAIN: tl.constexpr = False):
    """Load the rows `row` and columns `column`, 0 from row `n_rows` on. first: pointer to row 0.

    Offsets are 32 bits. Tiles that differ only in `first` share them."""
    at = first + row[:, None] * stride + column[None, :]
    if AGAIN:  # another instruction than the second load, so that the compiler does not keep the tile in registers
        return tl.load(at, mask=row[:, None] < n_rows, other=0.0, eviction_policy="evict_last")
    return tl.load(at, mask=row[:, None] < n_rows, other=0.0)


@triton.jit
def store_tile(first, row, column, n_rows, stride, tile):
    """Store the tile that `load_tile` would load."""
    at = first + row[:, None] * stride + column[None, :]
    tl.store(at, tile.to(first.dtype.element_ty), mask=row[:, None] < n_rows)


@triton.jit
def head_product(a_rows, a, n_a, b_rows, b, n_b, acc, BS: tl.constexpr):
    """acc + x y^T, with x the rows `a` of one head and y the rows `b` of another, BS dimensions at
    a time: all 128 on tensor cores, fewer where operands must be in registers."""
    for part in range(0, SIZE, BS):
        column = part + tl.arange(0, BS)
        x, y = load_tile(a_rows, a, column, n_a, SIZE), load_tile(b_rows, b, column, n_b, SIZE)
        acc = dot(x, tl.trans(y), acc)
    return acc


@triton.jit
def relu_scores(a_rows, a, n_a, b_rows, b, n_b, w, distance, visible, scale, BS: tl.constexpr):
    """relu(x y^T * scale + bias) where visible, else 0. Its square is the attention weight.

    x, y: see `head_product`; queries and keys, or keys and queries. w: pointer to the bias of
    distance 0. distance: key minus query. The matmul adds onto the bias."""
    bias = tl.load(w + distance).to(tl.float32)
    score = head_product(a_rows, a, n_a, b_rows, b, n_b, bias / scale, BS) * scale
    return tl.where(visible, tl.maximum(score, 0.0), 0.0)
