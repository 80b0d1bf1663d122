"""Rows that ranks share, measured against the same rows in one process: `context_ranks.py OUT DATA`
forks `WORLD` ranks, which do every case, and writes the largest errors into OUT."""

import datetime
import json
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from lineartime.base.ranks import Ranks, connected, gather, in_rows, with_groups
from lineartime.config import TrainConfig
from lineartime.ops import reference
from lineartime.training.gradient import Division, compute_gradient
from lineartime.training.language import train
from lineartime.training.masking import NO_TARGET
from lineartime.training.objectives import MaskedTokens, NextToken
from lineartime.training.ordered import gather_parts, parameter_parts
from lineartime.training.run_config import RunConfig, run_config
from tiny_models import BIDIRECTIONAL, BOTH_GRIDS, CONFIGS, UNPACKED, random_ids, random_model
from tiny_runs import SETTINGS

WORLD, LENGTH, N_LAYOUTS = 4, 48, 8
TIMEOUT = datetime.timedelta(seconds=60)
BEGIN = [(), (12, 24, 36), (16, 32), (16,), (15, 31)]
"""Where documents begin in chosen rows: where the parts of 2, 3 or 4 ranks do, and before it."""
SHARED = ["flash", "flash heads", "flash softmax", "flash no gate", "flash scale_norm", "flash sum", "flash local",
          "flash global", "flash key conv", "flash write gate", "flash rope base", "flash+",
          "flash global heads long memory", "mc-tfm++", "mc-tfm++ long memory", "performer", "performer blocks",
          "performer, own grid",
           "flash others' options"]
"""Of `BOTH_GRIDS`, the models whose rows ranks can share."""
ON_PUSH = ["flash", "flash key conv", "flash+", "mc-tfm++", "performer", "performer, own grid",
           "flash others' options"]  # a model for each thing that ranks exchange
OFTEN = ["flash+"]  # what 2, 3 and 4 ranks share; the others 3
REFUSED = ["transformer", "transformer+", "transformer++", "flash-quad", "combiner", "flash overlap",
           "mc-tfm++ overlap", "transformer++ relu2", "flash-quad key conv", "flash-quad in flash+", "hybrid",
           "flash, own grid"]
NEXT_TOKEN, MASKED_TOKENS = (kind(None, None, None) for kind in (NextToken, MaskedTokens))
SHARDED = {"shard": True, "clip_scope": "global"}


def model_of(name, causal, end_of_document=None):
    return random_model(replace(BOTH_GRIDS[name], context=LENGTH, causal=causal, end_of_document=end_of_document))


def run_of(name, model=None, **train):
    config = {**BOTH_GRIDS, **UNPACKED, **BIDIRECTIONAL}[name]
    base = run_config({"model": "flash", "data": "data", "out": "out", "context": config.context,
                       "micro_batch_tokens": config.context, "tokens_per_step": 4 * config.context})
    return RunConfig(replace(config, **model or {}), replace(base.train, **train), "p", "t", "data", "out")


def layouts(n, seed=0):
    """Segment ids of rows of one to many documents: those of `BEGIN`, one that ends with its first
    part, and others, which may end inside a chunk or leave ranks without a token."""
    generator = torch.Generator().manual_seed(seed)
    density_N = torch.tensor([0.0, 0.03, 0.1, 0.4])[torch.arange(n) % 4]
    starts_NT = torch.rand(n, LENGTH, generator=generator) < density_N[:, None]
    tokens_N = torch.where(torch.arange(n) % 3 == 0, torch.randint(1, LENGTH, (n,), generator=generator), LENGTH)
    tokens_N[: len(BEGIN)] = LENGTH
    tokens_N[len(BEGIN) : len(BEGIN) + 1] = 12
    for starts_T, at in zip(starts_NT, BEGIN, strict=False):
        starts_T.zero_()[list(at)] = True
    return torch.where(torch.arange(LENGTH) < tokens_N[:, None], starts_NT.cumsum(1), -1)


def losses_of(model, rows_BL, segment_ids_BT, weight_BT, ranks):
    """The loss of every token of all ranks, and every gradient of their weighted sum. Ranks take
    each row as a batch of its own: what they leave out must not depend on the documents, and a
    batch of many rows has every kind."""
    own, losses = ranks.share(LENGTH), []
    model.zero_grad()
    for at in torch.arange(len(rows_BL)).split(len(rows_BL) if ranks.size == 1 else 1):
        ids_BT = None if segment_ids_BT is None else segment_ids_BT[at]
        losses.append(model(rows_BL[at, :-1], ids_BT, targets=rows_BL[at, 1:][:, own], ranks=ranks))
        (losses[-1] * weight_BT[at][:, own]).sum().backward()
    losses_BT = torch.cat(losses)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    flat = sum(gather(torch.cat([g.flatten() for g in gradients]), ranks))
    split = flat.split([g.numel() for g in gradients])
    return torch.cat(list(gather(losses_BT.detach(), ranks)), dim=1), [
        part.view_as(g) for part, g in zip(split, gradients, strict=True)]


class Case:
    def __init__(self, name, causal, n_rows=N_LAYOUTS, ends=False):
        self.model = model_of(name, causal, 0 if ends else None)
        self.rows_BL = random_ids(n_rows, LENGTH + 1)
        self.ids_BT = None if ends else layouts(n_rows)
        weight_BT = torch.rand(n_rows, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        self.weight_BT = weight_BT if ends else weight_BT * (self.ids_BT >= 0)
        self.wanted = losses_of(self.model, self.rows_BL, self.ids_BT, self.weight_BT, Ranks())

    def error(self, ranks):
        """The largest error of losses, and of each gradient in parts of its largest entry."""
        losses_BT, gradients = losses_of(self.model, self.rows_BL, self.ids_BT, self.weight_BT, ranks)
        wanted_BT, wanted_gradients = self.wanted
        most = max(g.abs().max() for g in wanted_gradients)
        errors = [((losses_BT - wanted_BT) * (self.weight_BT > 0)).abs().max()]
        errors += [(a - b).abs().max() / b.abs().max().clamp(min=1e-3 * most)
                   for a, b in zip(gradients, wanted_gradients, strict=True)]
        return max(map(float, errors))


@contextmanager
def counted():
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    sent, send = [], getattr(dist, name)

    def counting(out, values, group=None):
        sent.append(values.numel() * values.element_size())
        return send(out, values, group=group)

    with mock.patch.object(dist, name, counting):
        yield sent


def numbers_sent(config):
    """The numbers that a rank sends in a layer for each row, forward, and backward again: a state,
    a count, and whether a document goes on; with a key convolution also the edges of its part."""
    n_directions, h, k = (1 if config.causal else 2), config.n_heads, config.qk_width
    if config.attn_type == "linear":
        return h * n_directions * k * (k + 1) + 1
    states = h * (n_directions * (k * config.v_width + 1) + 1)
    return states + ((config.key_conv - 1) * (h * k + 1) + 1) * (config.key_conv > 0)


def bytes_per_layer(name, causal, length, ranks):
    """Of the forward and the backward pass, by rank and row: measured, and by formula."""
    config = replace(CONFIGS[name], context=length, causal=causal)
    model, rows_BL = random_model(config), random_ids(5, length + 1)
    with counted() as forward:
        loss = model(rows_BL[:, :-1], targets=rows_BL[:, 1:][:, ranks.share(length)], ranks=ranks).sum()
    with counted() as backward:
        loss.backward()
    return [*(sum(sent) / (5 * config.n_layers * 8) for sent in (forward, backward)), numbers_sent(config)]


def gradient_error(world, causal, clip_scope):
    """Clipped gradient, loss and norm of a step of 4 micro-batches against one process."""
    model = model_of("flash+", causal)
    rows_BL = random_ids(8, LENGTH + 1, seed=3)
    batch = [rows_BL]
    if not causal:
        asked_BT = torch.rand(8, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.2
        asked_BT[:, LENGTH // 2 :] &= torch.arange(8)[:, None] > 3  # in two micro-batches a rank has no target
        batch = [rows_BL[:, :-1], torch.where(asked_BT, rows_BL[:, 1:], NO_TARGET)]
    objective = NEXT_TOKEN if causal else MASKED_TOKENS
    config = TrainConfig(tokens_per_step=8 * LENGTH, micro_batch_tokens=2 * LENGTH, clip=0.1, clip_scope=clip_scope)
    wanted = compute_gradient(model, objective, batch, 2, config)
    gradients = [p.grad.clone() for p in model.parameters()]
    parts = parameter_parts(model, world)
    shared = replace(config, context_parallel=world.in_row.size)
    own = world.in_column.share(8)
    found = compute_gradient(model, objective, [part[own] for part in batch], 2, shared,
                             division=Division(parts, world))
    with torch.no_grad():
        for part in parts:
            part.updated.copy_(part.updated.grad)
    gather_parts([p.detach() for p in model.parameters()], world)
    most = max(g.abs().max() for g in gradients)
    return max(*(abs(a / b - 1) for a, b in zip(found, wanted, strict=True)),
               *(float((p.detach() - g).abs().max() / most)
                 for p, g in zip(model.parameters(), gradients, strict=True)))


def run_cases(world, data, folder):
    results = {"errors": {}, "bytes": {}, "steps": {}}
    groups = {n: dist.new_group(range(n), timeout=TIMEOUT) for n in range(2, WORLD + 1)}
    ranks_of = {n: Ranks(world.rank, n, group.group_name) for n, group in groups.items() if world.rank < n}
    for causal in (True, False):
        for name in ON_PUSH:
            case = Case(name, causal, N_LAYOUTS if name in OFTEN else 6)
            for n, ranks in ranks_of.items():
                if n == 3 or name in OFTEN:
                    results["errors"][f"{name}, causal {causal}, {n} ranks"] = case.error(ranks)
                if n == 4 and name in OFTEN:
                    case.model.train()
                    case.model.activation_checkpointing = True
                    results["errors"][f"checkpointing, causal {causal}"] = case.error(ranks)
                if n == 3 and name == "flash":
                    with mock.patch.object(reference, "SCAN_BLOCK", 3):
                        results["errors"][f"blocks of blocks, causal {causal}"] = case.error(ranks)
        case = Case("flash+", causal, ends=True)
        if 3 in ranks_of:
            results["errors"][f"documents by tokens, causal {causal}"] = case.error(ranks_of[3])
    if 3 in ranks_of:
        for name in ("flash", "flash+", "mc-tfm++", "performer blocks"):
            for causal in (True, False):
                results["bytes"][f"{name}, causal {causal}"] = [bytes_per_layer(name, causal, length, ranks_of[3])
                                                                for length in (LENGTH, 4 * LENGTH)]
    dist.barrier()
    for n_in_row in (2, 4):
        shared = with_groups(in_rows(world, n_in_row), TIMEOUT)
        for causal in (True, False):
            scope = "local" if causal == (n_in_row == 2) else "global"
            key = f"{n_in_row} ranks a row, causal {causal}, {scope} clipping"
            results["steps"][key] = gradient_error(shared, causal, scope)
    settings = {"model": "flash", "data": data, **SETTINGS, **SHARDED, "steps": 3}
    for n in (2, 4):
        train({**settings, "context_parallel": n, "out": str(folder / f"shared-{n}")}, device="cpu")
    return results


def main(out, data):
    children = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            os.environ["RANK"] = str(rank)
            with connected("cpu", timeout_s=TIMEOUT.seconds) as world:
                results = run_cases(world, data, Path(out).parent)
                if world.is_first:
                    Path(out).write_text(json.dumps(results))
                dist.barrier()
            os._exit(0)
        children.append(pid)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
