"""One row across ranks: what a rank with a part of a row needs from the ranks with the others.

A part is a number of whole chunks, so attention inside a chunk needs nothing. The linear half needs
one state: that of the document which is open where the part begins.

    entering(0) = 0,  entering(r + 1) = leaving(r) + passes(r) entering(r)

leaving(r) is the sum over the tokens of rank r's last document; passes(r) is whether that is also
the document that entered. Every rank sends both to all, and each adds what it needs, in the order
of the row. The backward pass sums gradients from the other end of the row.

The op below is opaque to `torch.compile`. Every rank makes the same calls: none leaves out a
message that it does not need itself, but that the others wait for."""

from typing import Any

import torch
from torch import Tensor

from lineartime.base.ranks import Ranks, gather


def exchange_states(leaving_DBF: Tensor, passes_B: Tensor, ranks: Ranks) -> Tensor:
    """The states that enter this rank's part of the rows: `[D, B, F]`, with D = 1 from the ranks
    before, with D = 2 also from those after. With gradients.

    leaving_DBF: floating, what the part hands on to the ranks after it, and to those before it.
    passes_B: whether the part is one document with the tokens before and after."""
    return torch.ops.lineartime.fold_states(leaving_DBF, passes_B, False, ranks.rank, ranks.size, ranks.group)


def with_neighbours(z_BTS: Tensor, segment_ids_BT: Tensor, around: tuple[int, int],
                    ranks: Ranks) -> tuple[Tensor, Tensor]:
    """This rank's part of rows, with the last around[0] positions of the part before in front and
    the first around[1] of the part after behind: row_BLS, with gradients, and ids_BL, the document
    of each; -1 for other documents and beyond the row's ends.

    z_BTS: floating. segment_ids_BT: see `layers.SequenceInfo`. around: as many after as before, or
    none after. A part is no shorter than each."""
    (n_before, n_after), n_tokens = around, z_BTS.shape[1]
    last_B1 = segment_ids_BT.amax(1, keepdim=True)
    # Sent: the last positions for the part after this one, then the first for the part before it.
    # The next part's document 0 is that of this part's last token, and so here.
    edges = [(slice(n_tokens - n_before, None), segment_ids_BT[:, -1:])]
    if n_after > 0:
        edges.append((slice(n_after), torch.zeros_like(last_B1)))
    # Whether an edge belongs to the document that crosses the border travels as one more feature.
    sent_DBKS = torch.stack([
        torch.cat([z_BTS[:, at], (segment_ids_BT[:, at] == document_B1)[..., None].to(z_BTS.dtype)], dim=-1)
        for at, document_B1 in edges])
    none_B = torch.zeros_like(last_B1[:, 0], dtype=torch.bool)  # an edge goes to the next part, and no further
    before_BKS, *after = exchange_states(sent_DBKS.flatten(2), none_B, ranks).view_as(sent_DBKS)
    row_BLS = torch.cat([before_BKS[..., :-1], z_BTS, *(after_BKS[..., :-1] for after_BKS in after)], dim=1)
    ids_BL = torch.cat([torch.where(before_BKS[..., -1] > 0, 0, -1), segment_ids_BT,
                        *(torch.where(after_BKS[..., -1] > 0, last_B1, -1) for after_BKS in after)], dim=1)
    return row_BLS, ids_BL


@torch.library.custom_op("lineartime::fold_states", mutates_args=())
def fold_states(states_DBF: Tensor, passes_B: Tensor, transposed: bool, rank: int, size: int,
                group: str | None) -> Tensor:
    """`exchange_states`, or its transpose: from gradients of what enters to what leaves."""
    # Every rank gets what all have sent, and adds in one order, so all agree to the bit.
    d, (b, f) = len(states_DBF), states_DBF.shape[1:]
    # One message has the states and whether a document passes through.
    sent = torch.cat([states_DBF.flatten(), passes_B.to(states_DBF.dtype)])
    received_W = gather(sent, Ranks(rank, size, group))
    states_WDBF, passes_WB = received_W[:, : d * b * f].view(size, d, b, f), received_W[:, d * b * f :] > 0
    # Direction 0 goes from left to right and 1 from right to left; gradients the other way.
    entering = []
    for direction in range(d):
        from_left = (direction == 0) != transposed
        total_BF = torch.zeros_like(states_DBF[0])
        for each in range(rank) if from_left else range(size - 1, rank, -1):
            total_BF = states_WDBF[each, direction] + torch.where(passes_WB[each, :, None], total_BF, 0.0)
        entering.append(total_BF)
    return torch.stack(entering)


def keep_states(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, passes_B, *ctx.how = inputs
    ctx.save_for_backward(passes_B)


def fold_gradients(ctx: Any, gradient_DBF: Tensor) -> tuple[Tensor | None, ...]:
    transposed, *ranks = ctx.how
    return torch.ops.lineartime.fold_states(gradient_DBF, *ctx.saved_tensors, not transposed, *ranks), *[None] * 5


fold_states.register_fake(lambda states_DBF, *_: states_DBF.new_empty(states_DBF.shape))
fold_states.register_autograd(fold_gradients, setup_context=keep_states)
