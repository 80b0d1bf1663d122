"""What the kernels share: heads made from their base, tiles read and written, scores and masks of a tile.

A kernel is a program that runs once per tile of its output, all of them side by side. Letters as everywhere; a trailing
1 or 2 marks the first or the second half of the 128 dimensions of a head, which RoPE turns against one another. Numbers
are float32 between a load and a product, and in the inputs' type when they enter one; products add up in float32.
"""

import triton
import triton.language as tl

HALF: tl.constexpr = tl.constexpr(64)
"""Half of `query_key_dim`, which is 128 wherever the kernels run."""
SIZE: tl.constexpr = tl.constexpr(128)
"""All of it."""


@triton.jit
def dot(a, b, acc):
    """acc + a b. Float32 is multiplied as float32, not as the shorter type of the matrix units."""
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
    """silu of z's two halves for some tokens, 0 past `n_tokens`. z_row: where z of token 0 is; see `load_rows`."""
    at = z_row + token[:, None] * F + tl.arange(0, HALF)[None, :]
    there = token[:, None] < n_tokens
    z1 = tl.load(at, mask=there, other=0.0).to(tl.float32)
    z2 = tl.load(at + HALF, mask=there, other=0.0).to(tl.float32)
    return silu(z1), silu(z2)


@triton.jit
def load_angles(sin_row, cos_row, token, n_tokens):
    """sin and cos of the tokens' positions."""
    at = token[:, None] * HALF + tl.arange(0, HALF)[None, :]
    there = token[:, None] < n_tokens
    sin = tl.load(sin_row + at, mask=there, other=0.0).to(tl.float32)
    return sin, tl.load(cos_row + at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def make_head(z1, z2, gamma, beta, head, sin, cos, kind: tl.constexpr):
    """One head (Eq. 5 and Code 3): scale, offset and turn of z, by halves and in type `kind`."""
    at = head * 2 * HALF + tl.arange(0, HALF)
    x1 = z1 * tl.load(gamma + at).to(tl.float32)[None, :] + tl.load(beta + at).to(tl.float32)[None, :]
    x2 = z2 * tl.load(gamma + at + HALF).to(tl.float32)[None, :] + tl.load(beta + at + HALF).to(tl.float32)[None, :]
    return (x1 * cos - x2 * sin).to(kind), (x2 * cos + x1 * sin).to(kind)


@triton.jit
def visible_tile(query, key, query_document, key_document, n_tokens, CAUSAL: tl.constexpr, DOCUMENTS: tl.constexpr):
    """True where a query sees a key: not past the row's end, not later when causal, and of its document.

    query, key: indices in the row, one as a column and the other as a row; documents likewise, -1 for padding."""
    visible = (query < n_tokens) & (key < n_tokens)
    if CAUSAL:
        visible = visible & (key <= query)
    if DOCUMENTS:
        visible = visible & (query_document == key_document) & (key_document >= 0)
    return visible


@triton.jit
def load_rows(x_row, token, column, n_tokens, width, stride):
    """A tile of rows `token` and columns `column`, 0 past `n_tokens` and `width`.

    Offsets are 32 bits, as wider ones take twice the registers: x_row is moved, in 64 bits, to where they are small."""
    there = (token[:, None] < n_tokens) & (column[None, :] < width)
    at = x_row + token[:, None] * stride + column[None, :]
    return tl.load(at, mask=there, other=0.0)


@triton.jit
def store_rows(x_row, token, column, n_tokens, width, stride, tile):
    """The inverse of `load_rows`."""
    there = (token[:, None] < n_tokens) & (column[None, :] < width)
    at = x_row + token[:, None] * stride + column[None, :]
    tl.store(at, tile.to(x_row.dtype.element_ty), mask=there)


@triton.jit
def load_tile(first, row, column, n_rows, stride, AGAIN: tl.constexpr = False):
    """A tile of rows and columns, 0 from row `n_rows` on. first: where row 0 is.

    Offsets are 32 bits, as wider ones take twice the registers. Best are tiles that differ in `first` alone."""
    at = first + row[:, None] * stride + column[None, :]
    if AGAIN:  # will be read again: another instruction, so that the compiler does not keep it in registers instead
        return tl.load(at, mask=row[:, None] < n_rows, other=0.0, eviction_policy="evict_last")
    return tl.load(at, mask=row[:, None] < n_rows, other=0.0)


@triton.jit
def store_tile(first, row, column, n_rows, stride, tile):
    """The inverse of `load_tile`."""
    at = first + row[:, None] * stride + column[None, :]
    tl.store(at, tile.to(first.dtype.element_ty), mask=row[:, None] < n_rows)


@triton.jit
def head_product(a_rows, a, n_a, b_rows, b, n_b, acc, BS: tl.constexpr):
    """acc + x y^T, x the rows `a` of one head and y the rows `b` of another, by BS dimensions at a time: all where
    matrix units multiply, few where numbers must lie in registers."""
    for part in range(0, SIZE, BS):
        column = part + tl.arange(0, BS)
        x, y = load_tile(a_rows, a, column, n_a, SIZE), load_tile(b_rows, b, column, n_b, SIZE)
        acc = dot(x, tl.trans(y), acc)
    return acc


@triton.jit
def relu_scores(a_rows, a, n_a, b_rows, b, n_b, w, distance, visible, scale, BS: tl.constexpr):
    """relu(x y^T * scale + bias) where visible, else 0: its square is the weight, twice it the square's slope.

    x, y: see `head_product`; queries and keys, or keys and queries. w: where the bias of distance 0 is. distance: key
    minus query. The product is added where the bias is, which saves registers."""
    bias = tl.load(w + distance).to(tl.float32)
    score = head_product(a_rows, a, n_a, b_rows, b, n_b, bias / scale, BS) * scale
    return tl.where(visible, tl.maximum(score, 0.0), 0.0)
