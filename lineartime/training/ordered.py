"""The sum of a step's gradients in one order: the same bits on 1, 2, 4, ... processes.

The gradients of micro-batches are added as a complete binary tree: ((g0 + g1) + (g2 + g3)) + ...

1. A rank has a consecutive block of 2^k micro-batches. That is a subtree, which it adds alone
   (`add_in_order`, `merge_all`).
2. One all-to-all gives every rank its own part of all blocks' sums. It adds these as the tree's
   upper levels (`exchange`), so it has that part of the step's gradient.
3. It updates its part of the parameters, for which alone it keeps the optimizer's moments, and one
   all-gather brings the new parameters to all (`gather_parts`).

Ranks that share each row (`Ranks.in_row`) first add their gradients of it (`sum_over_row`)."""

import math
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lineartime.base.ranks import ALONE, Ranks, gather, gather_rows, process_group
from lineartime.base.settings import require

VECTOR = 64
"""Elements that fill whole vector registers. The optimizer rounds what is left at a tensor's end in
another way, so tensors are cut at multiples of it, or padded."""


class ParameterPart(NamedTuple):
    """The elements [start, stop) of a flattened parameter, which one rank updates."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    updated: nn.Parameter
    """What the optimizer updates: `parameter` itself, a part of its storage, `[stop - start]`, or a
    copy that is padded to a multiple of `VECTOR`."""
    by_muon: bool = False  # whether Muon updates it: one rank has the whole matrix, the others nothing

    @property
    def place(self) -> tuple[torch.Size, int, int]:
        return self.parameter.shape, self.start, self.stop

    @property
    def moments(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.by_muon else ("exp_avg", "exp_avg_sq")

    def uncut(self, x: Tensor) -> Tensor:
        """A tensor of the parameter's shape for `cut_for_ranks`, which never cuts a single row."""
        return x.reshape(1, -1) if self.by_muon else x


def require_fitting(n: int, shard: bool, ranks: Ranks) -> None:
    """Raise UsageError, with the numbers of ranks that fit, unless each rank's block of a step's
    `n` micro-batches is a complete subtree; if sharded, those that all ranks compute at once."""
    in_row = ranks.in_row.size
    fitting = [size * in_row for size in range(1, n + 1)
               if n % size == 0 and (size in (1, n) or (size if shard else n // size).bit_count() == 1)]
    shared = f", {in_row} of which share a row" if in_row > 1 else ""
    require(ranks.size in fitting, "this number of ranks does not fit",
            f"{ranks.size} ranks{shared}, {n} micro-batches in a step",
            f"run {', '.join(map(str, fitting))}, or change tokens_per_step or micro_batch_tokens")


def own_rows(n_rows: int, micro_batch_rows: int, shard: bool, ranks: Ranks) -> list[int]:
    """The rows of a step that this rank reads: consecutive micro-batches; if sharded every W-th."""
    rows, column = range(n_rows), ranks.in_column
    if not shard:
        return list(rows[column.share(n_rows)])
    firsts = rows[column.rank * micro_batch_rows :: column.size * micro_batch_rows]
    return [row for first in firsts for row in rows[first : first + micro_batch_rows]]


Sums = list[tuple[int, list[Tensor]]]
"""The height and the sum of each complete subtree so far, from the highest to the lowest."""


def tree_sum(terms: Iterable[list[Tensor]]) -> list[Tensor]:
    """The sum of lists of tensors by a complete binary tree in their order; a term without a
    partner goes up alone. Tensors of the terms are overwritten."""
    sums: Sums = []
    for term in terms:
        add_in_order(sums, term)
    return merge_all(sums)


def add_in_order(sums: Sums, term: list[Tensor]) -> None:
    """Add the next term of `tree_sum`. At most one list a level is kept."""
    height = 0
    while sums and sums[-1][0] == height:
        _, left = sums.pop()
        torch._foreach_add_(left, term)
        height, term = height + 1, left
    sums.append((height, term))


def merge_all(sums: Sums) -> list[Tensor]:
    """The sum of all terms that were added, of which `sums` keeps none."""
    _, total = sums.pop()
    while sums:
        _, left = sums.pop()
        torch._foreach_add_(left, total)
        total = left
    return total


def parameter_parts(model: nn.Module, ranks: Ranks = ALONE, muon: bool = False) -> list[ParameterPart]:
    """What this rank updates of each parameter. muon: whether Muon has the matrices of layers."""
    wholes = [ParameterPart(name, p, 0, p.numel(), p, muon and "layers." in name and p.dim() < 3 and is_matrix(name, p))
              for name, p in model.named_parameters() if p.requires_grad]
    if ranks.size == 1:
        return wholes
    # A part shares the memory of its parameter, so that the optimizer's update is the model's.
    parts = []
    own = cut_for_ranks(tuple(each.uncut(each.parameter).shape for each in wholes), ranks.size)[ranks.rank]
    for each, (start, stop) in zip(wholes, own, strict=True):
        flat = each.parameter.detach().view(-1)[start:stop]
        shape = each.parameter.shape if each.by_muon and start < stop else flat.shape
        parts.append(each._replace(start=start, stop=stop, updated=nn.Parameter(flat.view(shape))))
    return parts


def is_matrix(name: str, p: Tensor) -> bool:
    """Whether it is a matrix or a table of embeddings: no bias, norm, scale or position bias."""
    return name.endswith("weight") and p.dim() >= 2


@cache
def cut_for_ranks(shapes: tuple[torch.Size, ...], n_ranks: int) -> list[list[tuple[int, int]]]:
    """The elements [start, stop) of each of several flattened tensors that each rank has, about
    equally many: whole slices along the first axis, and multiples of `VECTOR`."""
    total, shares = sum(map(math.prod, shapes)), []
    for rank in range(n_ranks):
        # The rank has about [begin, end) of all elements. In each tensor both are rounded up to the
        # next place where it may be cut: what one rank leaves out the next one has.
        begin, end, before, share = total * rank // n_ranks, total * (rank + 1) // n_ranks, 0, []
        for shape in shapes:
            size, unit = math.prod(shape), math.lcm(math.prod(shape[1:]), VECTOR)
            start, stop = (min(max(-(-(at - before) // unit) * unit, 0), size) for at in (begin, end))
            share.append((start, stop))
            before += size
        shares.append(share)
    return shares


def exchange(total: list[Tensor], ranks: Ranks) -> list[Tensor]:
    """This rank's parts of the sum over all ranks of a list of tensors, flattened. total: the sum
    over the rank's own micro-batches, the same on all ranks of `in_row`."""
    if ranks.size == 1:
        return total
    # The ranks of a row have the same total. Each exchanges its own column's parts: none twice.
    column = ranks.in_column
    shares = cut_for_ranks(tuple(t.shape for t in total), ranks.size)[ranks.in_row.rank :: ranks.in_row.size]
    lengths = [sum(stop - start for start, stop in share) for share in shares]
    own = lengths[column.rank]
    sent = torch.cat([t.reshape(-1)[start:stop] for share in shares
                      for t, (start, stop) in zip(total, share, strict=True)])
    received = sent
    if column.size > 1:
        received = sent.new_empty(own * column.size)
        dist.all_to_all_single(received, sent, [own] * column.size, lengths, group=process_group(column))
    # The ranks' blocks are the lower levels of the tree, in rank order; this adds the upper ones.
    (flat,) = tree_sum([piece] for piece in received.split(own))
    return list(flat.split([stop - start for start, stop in shares[column.rank]]))


def sum_over_row(gradient: list[Tensor], ranks: Ranks) -> None:
    """Replace the gradient of this rank's part of some rows, which `ranks` share, by the rows'."""
    if ranks.size == 1:
        return
    # Each rank adds its own parts in the order of the row, and gives them to the others.
    shares = cut_for_ranks(tuple(g.shape for g in gradient), ranks.size)[ranks.rank]
    for g, (start, stop), own in zip(gradient, shares, exchange(gradient, ranks), strict=True):
        g.view(-1)[start:stop] = own
    gather_parts(gradient, ranks)


@torch.no_grad()
def gather_parts(tensors: list[Tensor], ranks: Ranks) -> None:
    """Copy what the other ranks have of each tensor, see `cut_for_ranks`, into this rank's."""
    if ranks.size == 1:
        return
    shares = cut_for_ranks(tuple(t.shape for t in tensors), ranks.size)
    flat = [t.view(-1) for t in tensors]
    # One message has a rank's parts of all tensors.
    sent = torch.cat([t[start:stop] for t, (start, stop) in zip(flat, shares[ranks.rank], strict=True)])
    for rank, (row, share) in enumerate(zip(gather_rows(sent, ranks), shares, strict=True)):
        if rank != ranks.rank:
            pieces = row.split([stop - start for start, stop in share])
            for t, (start, stop), piece in zip(flat, share, pieces, strict=True):
                t[start:stop] = piece


def norm_of(gradient: list[Tensor], parts: list[ParameterPart], ranks: Ranks) -> Tensor:
    """The norm of all ranks' gradients, `[]` on the CPU: the same bits for any number of ranks.
    gradient: of this rank's parts, of any shapes."""
    # A part is whole rows of its parameter. One rank adds a row's squares, always in the same
    # order, and all ranks add the rows as one process would: by parameter, in their order.
    squares = [row_squares(g.reshape(-1, math.prod(part.parameter.shape[1:])))
               for g, part in zip(gradient, parts, strict=True)]
    n_rows = gather(torch.tensor([len(square) for square in squares]), ranks).tolist()
    by_rank = [row.split(n) for row, n in zip(gather_rows(torch.cat(squares).cpu(), ranks), n_rows, strict=True)]
    return torch.cat([part for of_parameter in zip(*by_rank, strict=True) for part in of_parameter]).sum().sqrt()


def row_squares(x_RN: Tensor) -> Tensor:
    """The sum of each row's squares: `[R]`. Halves of a row are added element by element, because
    the order of a library's sum depends on the number of rows."""
    n = x_RN.shape[1]
    square = nn.functional.pad(x_RN, (0, (1 << (n - 1).bit_length()) - n)).square()  # zeros up to a power of 2
    while square.shape[1] > 1:
        left, right = square.chunk(2, dim=1)
        square = left + right
    return square[:, 0]
