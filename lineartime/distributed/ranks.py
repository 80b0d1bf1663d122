"""The processes that `torchrun` starts for one task. A process on its own is rank 0 of 1, and communicates with nobody.

A rank that ends with an error says so in one line, and is the only one that speaks: the others lose their connection to
it, and end without a word. The store of `torchrun` counts who has spoken, and holds a sign of life of each rank."""

import datetime
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lineartime.errors import RankError, ResourceError, UsageError
from lineartime.settings import require

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.distributed_c10d import Store

WITH_RANKS = ("train", "finetune", "evaluate")
"""The verbs whose work `torchrun` divides; `benchmark step` measures it."""
TIMEOUT_S, MOST_SECONDS = 300, 10**7
"""Seconds after which a rank that does not answer is lost, and the most that may be asked for."""
SIGN_OF_LIFE_S = 0.5
"""Seconds between two signs of life of a rank."""
SILENCE_S = 3.0
"""Seconds without a sign of life after which a rank is named as lost."""


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this one is: of all, or of a group of them."""

    rank: int = 0
    size: int = 1
    group: str | None = None
    """The name of the group's process group; None: all processes."""
    row: "Ranks | None" = None
    """See `in_row`; None: this rank alone."""
    column: "Ranks | None" = None
    """See `in_column`; None: these ranks."""

    @property
    def in_row(self) -> "Ranks":
        """The ranks that share each of this rank's rows of tokens, in the order of their parts (context parallel)."""
        return self.row or ALONE

    @property
    def in_column(self) -> "Ranks":
        """The ranks that have the same part of other rows (data parallel)."""
        return self.column or self

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which holds the lock, writes the files and talks to people."""
        return self.rank == 0

    def share(self, n: int) -> slice:
        """This rank's consecutive share of n things; n is a multiple of the number of ranks."""
        return slice(self.rank * n // self.size, (self.rank + 1) * n // self.size)


ALONE = Ranks()
RENDEZVOUS: dict[str, Any] = {}
"""`tiles.Turns` by name of the group, where the ranks of a group are tiles of one process."""


def launched() -> Ranks:
    """The rank that `torchrun` gave this process by its environment; `ALONE` without one. Imports no torch."""
    env = os.environ
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        return ALONE
    return Ranks(int(env["RANK"]), int(env["WORLD_SIZE"]))


def in_rows(ranks: Ranks, n_in_row: int) -> Ranks:
    """These ranks without process groups, `n_in_row` consecutive ones of which share each row. Raises UsageError if
    that does not divide their number."""
    if ranks.size % n_in_row:
        raise UsageError("the number of ranks must be a multiple of context_parallel",
                         f"{ranks.size} rank{'s' * (ranks.size > 1)}, context_parallel = {n_in_row}",
                         f"start {n_in_row} with torchrun, or a multiple")
    row, column = Ranks(ranks.rank % n_in_row, n_in_row), Ranks(ranks.rank // n_in_row, ranks.size // n_in_row)
    return ranks if n_in_row == 1 else replace(ranks, row=row, column=column)


def with_groups(ranks: Ranks, timeout: datetime.timedelta) -> Ranks:
    """Ranks of `in_rows` with process groups. All ranks call it."""
    import torch.distributed as dist

    if ranks.row is None or ranks.column is None:
        return ranks
    n, named = ranks.row.size, []
    rows = [list(range(first, first + n)) for first in range(0, ranks.size, n)]
    columns = [list(range(first, ranks.size, n)) for first in range(n)]
    for own, groups in ((ranks.row, rows), (ranks.column, columns)):
        made = [dist.new_group(group, timeout=timeout) for group in groups] if own.size > 1 else []
        names = [each.group_name for group, each in zip(groups, made, strict=False) if ranks.rank in group]
        named.append(replace(own, group=names[0]) if names else own)
    return replace(ranks, row=named[0], column=named[1])


@contextmanager
def connected(device_type: str = "cpu", timeout_s: float = TIMEOUT_S, n_in_row: int = 1) -> Iterator[Ranks]:
    """Connect the ranks that `torchrun` launched, by gloo and on CUDA by nccl too, for the block; yields this rank.

    n_in_row: ranks that share each row, see `in_rows`. Inside a block that is open already no connection is made, and
    in a process on its own nothing happens. Raises RankError, with the ranks that were lost, when another rank ends or
    does not answer for `timeout_s` seconds; ResourceError for an address that cannot be used; and as `in_rows`."""
    import torch.distributed as dist

    require(0 < timeout_s <= MOST_SECONDS, "wrong value", f"rank_timeout = {timeout_s}",
            f"it takes numbers above 0, up to {MOST_SECONDS:,}")
    ranks = in_rows(launched(), n_in_row)
    if ranks.size == 1:
        yield ALONE
        return
    timeout = datetime.timedelta(seconds=timeout_s)
    if dist.is_initialized():
        yield with_groups(in_rows(Ranks(dist.get_rank(), dist.get_world_size()), n_in_row), timeout)
        return
    with living(ranks, timeout_s):
        meet(ranks, timeout_s)
        try:
            dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo", timeout=timeout,
                                    store=open_store(ranks, "group", timeout_s), rank=ranks.rank,
                                    world_size=ranks.size)
            yield with_groups(ranks, timeout)
        except RuntimeError as e:
            if not is_lost_connection(e):
                raise
            raise RankError("a rank was lost", lost_ranks(ranks) or "it cannot be said which",
                            "see its own output; the same command goes on from the last checkpoint") from e
        finally:
            with suppress(RuntimeError):
                dist.destroy_process_group()


def open_store(ranks: Ranks, name: str, timeout_s: float = 10.0) -> "Store":
    """The keys `name` of the store that all ranks reach: that of `torchrun`, or else one that rank 0 holds. A restart
    by `torchrun` has keys of its own. Raises ResourceError if it cannot be reached."""
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import PrefixStore

    env, timeout = os.environ, datetime.timedelta(seconds=timeout_s)
    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    holds = ranks.is_first and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(host, port, ranks.size, holds, timeout, wait_for_workers=False, multi_tenant=True)
    except DistError as e:
        raise ResourceError("the ranks cannot meet", f"MASTER_ADDR = {host}, MASTER_PORT = {port}",
                            "choose a free port of a host that every rank reaches") from e
    return PrefixStore(f"lineartime/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}", store)


@contextmanager
def living(ranks: Ranks, timeout_s: float) -> Iterator[None]:
    """Give signs of life of this rank inside the block, from a thread with a connection of its own. timeout_s: seconds
    that rank 0 may take to open the store."""
    store, end = open_store(ranks, "life", timeout_s), threading.Event()

    def beat() -> None:
        count = 0
        with suppress(RuntimeError):
            while not end.wait(SIGN_OF_LIFE_S):
                count += 1
                store.set(str(ranks.rank), str(count))

    store.set(str(ranks.rank), "0")
    thread = threading.Thread(target=beat, name="sign of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def meet(ranks: Ranks, timeout_s: float) -> None:
    """Return when all ranks live. Raises RankError if one of them ends with an error before, or does not come."""
    lives, errors, began = open_store(ranks, "life"), open_store(ranks, "errors"), time.monotonic()
    while not lives.check([str(rank) for rank in range(ranks.size)]):
        if errors.check(["spoken"]):
            raise RankError("a rank ended before it met the others", todo="see its own output")
        if time.monotonic() - began > timeout_s:
            absent = [str(rank) for rank in range(ranks.size) if not lives.check([str(rank)])]
            raise RankError("ranks did not come", f"rank {', '.join(absent)} of {ranks.size}",
                            "look at their machines, or raise --rank-timeout")
        time.sleep(0.05)


def lost_ranks(ranks: Ranks) -> str:
    """The ranks that gave no sign of life for some seconds, in words; "" if all did or the store is gone."""
    with suppress(RuntimeError, ResourceError):
        store = open_store(ranks, "life")

        def seen() -> list[bytes | None]:
            return [store.get(str(rank)) if store.check([str(rank)]) else None for rank in range(ranks.size)]

        before = seen()
        time.sleep(SILENCE_S)
        silent = [rank for rank, (a, b) in enumerate(zip(before, seen(), strict=True)) if a == b and rank != ranks.rank]
        return f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))} of {ranks.size}" if silent else ""
    return ""


def is_lost_connection(error: RuntimeError) -> bool:
    """Whether PyTorch raised an error because a rank ended or did not answer."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or any(name in str(error) for name in ("gloo", "NCCL", "Connection closed"))


def speaks_first(ranks: Ranks) -> bool:
    """Whether this rank is the first to speak of an error. Every rank asks once, before it does."""
    if ranks.size == 1:
        return True
    with suppress(RuntimeError, ResourceError):
        return open_store(ranks, "errors").add("spoken", 1) == 1
    return True


def process_group(ranks: Ranks) -> Any:
    """The process group of some ranks; None: the one of all."""
    from torch.distributed import distributed_c10d

    return None if ranks.group is None else distributed_c10d._resolve_process_group(ranks.group)  # type: ignore


def gather(values: "Tensor", ranks: Ranks) -> "Tensor":
    """The values of every rank, in rank order: `[W, ...]` on each. values: a tensor of one shape and dtype on all."""
    import torch.distributed as dist

    if ranks.size == 1:
        return values[None]
    if ranks.group in RENDEZVOUS:
        return RENDEZVOUS[ranks.group].gather(values, ranks.rank)
    out = values.new_empty(ranks.size * values.numel())
    # PyTorch 2.13 renamed it; 2.11 knows the old name alone.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    all_gather(out, values.contiguous().view(-1), group=process_group(ranks))
    return out.view(ranks.size, *values.shape)


def gather_json(value: Any, ranks: Ranks) -> list[Any]:
    """A JSON value of every rank, in rank order, on each."""
    import torch

    if ranks.size == 1:
        return [value]
    text = json.dumps(value).encode()
    lengths = gather(torch.tensor([len(text)]), ranks).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = gather(padded, ranks)
    return [json.loads(bytes(row[:n].tolist())) for row, n in zip(rows, lengths, strict=True)]


def wait_for_all(ranks: Ranks) -> None:
    """Return when every rank has come here."""
    gather_json(None, ranks)


def require_same(facts: Mapping[str, Any], ranks: Ranks) -> None:
    """Raise UsageError, with the first difference, unless every rank has the same facts."""
    first, *others = gather_json(dict(facts), ranks)
    for rank, other in enumerate(others, 1):
        for name in sorted({*first, *other}):
            if first.get(name) != other.get(name):
                raise UsageError("the ranks were started differently",
                                 f"{name} is {first.get(name)} on rank 0, {other.get(name)} on rank {rank}",
                                 "give every rank the same arguments, data and versions")
