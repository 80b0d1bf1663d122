"""What the ordered sum of gradients costs beside the all-reduce of DistributedDataParallel, by bytes and by seconds:

    torchrun --standalone --nproc-per-node 4 tools/exchange.py flash

Each rank has a gradient of the model's size. In turn, five times: `ordered.exchange` and `ordered.gather_parts`,
and all-reduces of 25 MiB, DDP's buckets, without the computation that DDP overlaps them with."""

import json
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor

from lineartime import LanguageModel, model_config
from lineartime.distributed.ordered import exchange, gather_parts
from lineartime.distributed.ranks import Ranks, connected, wait_for_all

BUCKET = 25 * 2**20 // 4
"""Elements of DDP's bucket."""
REPEATS = 5


def main(name: str) -> None:
    model = LanguageModel(model_config(name))
    gradient = [torch.randn_like(p) for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in gradient])
    with connected() as ranks:
        ways = {"ordered": lambda: ordered(model, gradient, ranks), "all-reduce": lambda: all_reduce(flat)}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(REPEATS):
            for way, run in ways.items():
                wait_for_all(ranks)
                began = time.perf_counter()
                run()
                wait_for_all(ranks)
                seconds[way].append(time.perf_counter() - began)
        # Each rank sends every part but its own, twice: a reduce-scatter and an all-gather.
        sent = 2 * flat.nbytes * (ranks.size - 1) // ranks.size
        if ranks.is_first:
            for way, each in seconds.items():
                print(json.dumps({"way": way, "ranks": ranks.size, "parameters": len(flat), "bytes_sent_per_rank": sent,
                                  "seconds": round(statistics.median(each), 3), "all": [round(s, 3) for s in each]}))


def ordered(model: LanguageModel, gradient: list[Tensor], ranks: Ranks) -> None:
    exchange([g.clone() for g in gradient], ranks)
    gather_parts([p.detach() for p in model.parameters()], ranks)


def all_reduce(flat: Tensor) -> None:
    for bucket in flat.clone().split(BUCKET):
        dist.all_reduce(bucket)


if __name__ == "__main__":
    main(sys.argv[1])
