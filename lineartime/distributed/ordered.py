"""The sum of a step's gradients in one order, whatever the number of ranks: the same bits on 1, 2, 4, ... processes.

The gradient of a step is the complete binary tree over its micro-batches, in their order: ((g0 + g1) + (g2 + g3)) + ...
A rank has a consecutive block of 2^k micro-batches, which is a subtree, and sums it alone. Then every rank gets its own
part of all blocks' sums, by one all-to-all, and adds them as the tree's upper levels. It updates its part of the
parameters, and one all-gather brings the new parameters to all. This sends as many bytes as a reduce-scatter and an
all-gather, and the moments of the optimizer are sharded over the ranks.

Where ranks share each row of a micro-batch (`Ranks.in_row`), its gradient is the tree over their shares of it, in the
row's order: each of them gets its part of the sum by an all-to-all, and keeps only this part of what follows."""

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lineartime.distributed.ranks import ALONE, Ranks, gather, process_group
from lineartime.settings import require

BLOCK = 1024
"""Elements of a parameter between the places where it may be cut: the same whatever the number of ranks."""


class Part(NamedTuple):
    """The elements [start, stop) of a flattened parameter, which one rank updates."""

    name: str
    whole: nn.Parameter
    start: int
    stop: int
    own: nn.Parameter
    """The optimizer's parameter: `whole` itself, or a part of its storage, `[stop - start]`."""


def require_fitting(n_micro_batches: int, ranks: Ranks) -> None:
    """Raise UsageError, with the numbers of ranks that do fit, unless each rank has 2^k micro-batches."""
    n_in_row = ranks.in_row.size
    fitting = [n * n_in_row for n in range(1, n_micro_batches + 1)
               if n == 1 or (n_micro_batches % n == 0 and (n_micro_batches // n).bit_count() == 1)]
    shared = f", {n_in_row} of which share a row" if n_in_row > 1 else ""
    require(ranks.size in fitting, "this number of ranks does not fit",
            f"{ranks.size} ranks{shared}, {n_micro_batches} micro-batches in a step",
            f"run {', '.join(map(str, fitting))}, or change tokens_per_step or micro_batch_tokens: "
            "every rank has 1, 2, 4, ... micro-batches")


def tree_sum(terms: Iterable[list[Tensor]]) -> list[Tensor]:
    """The sum of lists of tensors by a complete binary tree in their order; a term without a partner goes up alone.

    Tensors of the terms are overwritten. At most one list per level is kept, log2 of their number."""
    pending: list[tuple[int, list[Tensor]]] = []  # the roots of finished subtrees and their heights, falling
    for term in terms:
        pending.append((0, term))
        while len(pending) > 1 and pending[-1][0] == pending[-2][0]:
            merge(pending)
    while len(pending) > 1:
        merge(pending)
    return pending[0][1]


def merge(pending: list[tuple[int, list[Tensor]]]) -> None:
    """Add the last subtree to the one before it."""
    (height, left), (_, right) = pending[-2:]
    torch._foreach_add_(left, right)
    pending[-2:] = [(height + 1, left)]


def parts_of(model: nn.Module, ranks: Ranks = ALONE) -> list[Part]:
    """The parts of the model's parameters that this rank updates: all of them in a process on its own."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if ranks.size == 1:
        return [Part(name, p, 0, p.numel(), p) for name, p in named]
    own = shares(tuple(p.numel() for _, p in named), ranks.in_row.size, ranks.in_column.size)[ranks.rank]
    return [Part(name, p, start, stop, nn.Parameter(p.detach().view(-1)[start:stop]))
            for (name, p), (start, stop) in zip(named, own, strict=True) if start < stop]


@cache
def cut(sizes: tuple[int, ...], n_ranks: int) -> list[list[tuple[int, int]]]:
    """The elements [start, stop) of each of several flattened tensors that each rank has: equally many consecutive
    blocks of at most `BLOCK` elements."""
    n_blocks = [-(-size // BLOCK) for size in sizes]
    shares = []
    for rank in range(n_ranks):
        whole = Ranks(rank, n_ranks).share(sum(n_blocks))
        before, share = 0, []
        for size, n in zip(sizes, n_blocks, strict=True):
            start, stop = (min(max(at - before, 0), n) * BLOCK for at in (whole.start, whole.stop))
            share.append((min(start, size), min(stop, size)))
            before += n
        shares.append(share)
    return shares


@cache
def shares(sizes: tuple[int, ...], n_in_row: int, n_in_column: int) -> list[list[tuple[int, int]]]:
    """What each rank has of flattened parameters, in rank order: `cut` for the ranks of a row, then each part for the
    ranks that have the same part of other rows."""
    in_rows = []
    for outer in cut(sizes, n_in_row):
        inner = cut(tuple(stop - start for start, stop in outer), n_in_column)
        in_rows.append([[(first + start, first + stop) for (first, _), (start, stop) in zip(outer, own, strict=True)]
                        for own in inner])
    return [in_row[place] for place in range(n_in_column) for in_row in in_rows]


def exchange(total: list[Tensor], ranks: Ranks) -> list[Tensor]:
    """This rank's parts of the sum over `ranks` of a list of tensors, flattened, as `cut` has them, the empty ones left
    out. A process on its own gets its list back."""
    if ranks.size == 1:
        return total
    cuts = cut(tuple(t.numel() for t in total), ranks.size)
    lengths = [sum(stop - start for start, stop in share) for share in cuts]
    own = lengths[ranks.rank]
    out = total[0].new_empty(ranks.size * own)
    sent = torch.cat([t.reshape(-1)[start:stop] for share in cuts
                      for t, (start, stop) in zip(total, share, strict=True)])
    dist.all_to_all_single(out, sent, [own] * ranks.size, lengths, group=process_group(ranks))
    (flat,) = tree_sum([piece] for piece in out.split(own))
    return list(flat.split([stop - start for start, stop in cuts[ranks.rank] if start < stop]))


@torch.no_grad()
def gather_parameters(model: nn.Module, ranks: Ranks) -> None:
    """Copy the parts that the other ranks have updated into this rank's parameters."""
    if ranks.size == 1:
        return
    parameters = [p.detach().view(-1) for p in model.parameters() if p.requires_grad]
    of_ranks = shares(tuple(map(len, parameters)), ranks.in_row.size, ranks.in_column.size)
    sent = torch.cat([p[start:stop] for p, (start, stop) in zip(parameters, of_ranks[ranks.rank], strict=True)])
    for rank, (row, share) in enumerate(zip(gather_rows(sent, ranks), of_ranks, strict=True)):
        if rank != ranks.rank:
            pieces = row.split([stop - start for start, stop in share])
            for p, (start, stop), piece in zip(parameters, share, pieces, strict=True):
                p[start:stop] = piece


def gather_rows(values: Tensor, ranks: Ranks) -> list[Tensor]:
    """The values of every rank, in rank order, which may be of different lengths. values: `[N]`."""
    lengths = gather(torch.tensor(len(values)), ranks).tolist()
    rows = gather(nn.functional.pad(values, (0, max(lengths) - len(values))), ranks)
    return [row[:n] for row, n in zip(rows, lengths, strict=True)]


def norm_of(parts: list[Tensor], ranks: Ranks) -> Tensor:
    """The norm of all ranks' parts together, `[]` on the CPU, in the same bits for any number of ranks.

    The squares of a block are added in halves, element by element; a reduction of the library's would depend on the
    shape. parts: as `exchange` returns them."""
    sums = []
    for part in parts:
        flat = part.reshape(-1)
        square = nn.functional.pad(flat, (0, -len(flat) % BLOCK)).square().view(-1, BLOCK)
        while square.shape[1] > 1:
            left, right = square.chunk(2, dim=1)
            square = left + right
        sums.append(square[:, 0])
    rows = gather_rows(torch.cat(sums).cpu(), ranks)
    n = ranks.in_row.size  # the first ranks of all rows have the first part of the parameters, and so on
    return torch.cat([row for place in range(n) for row in rows[place::n]]).sum().sqrt()
