"""The processes that `torchrun` starts for one task. A process on its own is rank 0 of 1.

A rank that ends with an error says so in one line; the others lose their connection to it, and end
without a word. The store of `torchrun` counts who has spoken."""

import datetime
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from lineartime.base.errors import LineartimeError, RankError, ResourceError, Stopped, raised_as
from lineartime.base.settings import require

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.distributed_c10d import Store

WITH_RANKS = ("train", "finetune", "evaluate")
"""The verbs whose work `torchrun` divides; every other verb runs in one process."""
TIMEOUT_S, MOST_SECONDS, HEAD_START_S = 300, 10**7, 3.0
"""Seconds after which a rank that does not answer is lost; the most that may be asked for; and the
time in which a rank that has failed may say so before those that have lost it speak."""


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this one is: of all, or of the process group named `group`."""

    rank: int = 0
    size: int = 1
    group: str | None = None
    row: "Ranks | None" = None
    column: "Ranks | None" = None

    @property
    def in_row(self) -> "Ranks":
        """The ranks that share this rank's rows, in the order of their parts (context parallel)."""
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


def launched() -> Ranks:
    """The rank that `torchrun` gave this process; `ALONE` without one. Imports no torch. Raises
    UsageError for numbers that `torchrun` does not give."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return ALONE
    given = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    rank, size, port = (int(text) if text.isascii() and text.isdecimal() else -1 for text in given.values())
    require(0 <= rank < size and 0 <= port < 2**16, "not what torchrun sets", ", ".join(
        f"{name} = {text}" for name, text in given.items()), "unset them, or start with torchrun")
    return Ranks(rank, size)


def in_rows(ranks: Ranks, n_in_row: int) -> Ranks:
    """These ranks, of which every `n_in_row` consecutive ones share their rows, without process
    groups. Raises UsageError if `n_in_row` does not divide their number."""
    require(ranks.size % n_in_row == 0, "the number of ranks must be a multiple of context_parallel",
            f"{ranks.size} rank{'s' * (ranks.size > 1)}, context_parallel = {n_in_row}",
            f"start {n_in_row} with torchrun, or a multiple")
    row, column = Ranks(ranks.rank % n_in_row, n_in_row), Ranks(ranks.rank // n_in_row, ranks.size // n_in_row)
    return ranks if n_in_row == 1 else replace(ranks, row=row, column=column)


def with_groups(ranks: Ranks, timeout: datetime.timedelta) -> Ranks:
    """Ranks of `in_rows` with process groups. All ranks call it."""
    import torch.distributed as dist

    if ranks.row is None or ranks.column is None:
        return ranks
    # Rows are consecutive ranks, columns every n-th: of 4 ranks, rows 01 and 23, columns 02 and 13.
    n, row, column = ranks.row.size, ranks.row, ranks.column
    rows = [list(range(first, first + n)) for first in range(0, ranks.size, n)]
    group, _ = dist.new_subgroups_by_enumeration(rows, timeout=timeout)
    row = replace(row, group=group.group_name)
    if column.size > 1:
        columns = [list(range(first, ranks.size, n)) for first in range(n)]
        group, _ = dist.new_subgroups_by_enumeration(columns, timeout=timeout)
        column = replace(column, group=group.group_name)
    return replace(ranks, row=row, column=column)


@contextmanager
def connected(device_type: str = "cpu", timeout_s: float = TIMEOUT_S, n_in_row: int = 1,
              between: Callable[[], None] = lambda: None) -> Iterator[Ranks]:
    """Connect the ranks that `torchrun` launched, by gloo and on CUDA by nccl too; yields this one.
    n_in_row: ranks that share each row. between is called often until all are connected, and may
    raise. A process on its own, and a block inside another, connects nothing. Raises UsageError for
    a wrong timeout and as `in_rows` does, RankError when another rank ends or does not answer for
    `timeout_s` seconds, ResourceError for a port that cannot be opened."""
    import torch.distributed as dist

    require(0 < timeout_s <= MOST_SECONDS, "wrong value", f"rank_timeout = {timeout_s}",
            f"it takes numbers above 0, up to {MOST_SECONDS:,}")
    ranks = in_rows(launched(), n_in_row)
    if ranks.size == 1:
        yield ALONE
        return
    timeout = datetime.timedelta(seconds=timeout_s)
    if dist.is_initialized():
        yield with_groups(ranks, timeout)
        return

    def join() -> Ranks:
        own = open_store().clone()  # type: ignore[attr-defined]  # a connection of its own, in which it may wait
        own.set_timeout(timeout)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo", timeout=timeout, store=own,
                                rank=ranks.rank, world_size=ranks.size)
        return with_groups(ranks, timeout)

    try:
        yield within(timeout_s, join, between)
    except RuntimeError as e:
        if not (isinstance(e, dist.DistError) or any(each in str(e) for each in ("gloo", "NCCL", "Connection closed"))):
            raise
        time.sleep(HEAD_START_S)
        where = "rank {RANK} of {WORLD_SIZE} has lost another, MASTER_ADDR = {MASTER_ADDR}, MASTER_PORT = {MASTER_PORT}"
        raise RankError("a rank was lost", where.format_map(os.environ),
                        "see torchrun's report; the same command goes on from the last checkpoint") from e
    finally:
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()


def within(seconds: float, call: Callable[[], Any], between: Callable[[], None] = lambda: None) -> Any:
    """What `call` returns, or DistStoreError after `seconds`. It runs in a thread, because PyTorch
    may wait without end and then answers no signal. between is called often, and may raise."""
    from torch.distributed import DistStoreError

    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as e:
            done.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    last = time.monotonic() + seconds
    while not wait([done], 0.1).done:
        between()
        if time.monotonic() > last:
            raise DistStoreError("no answer")
    return done.result()


@cache
def open_store() -> "Store":
    """The keys that all ranks reach, in the store of `torchrun` or else one that rank 0 holds; a
    restart by `torchrun` has keys of its own. Raises ResourceError if rank 0 cannot hold it."""
    from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]

    # PyTorch's own wait is the longest there is: `within` bounds it, and tells what went wrong.
    ranks, env, patience = launched(), os.environ, datetime.timedelta(seconds=MOST_SECONDS)
    holds = ranks.is_first and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    port, todo = env["MASTER_PORT"], "choose a free port"
    with raised_as(ResourceError, "the ranks cannot meet", f"MASTER_PORT = {port}", DistError, todo=todo):
        store = TCPStore(env["MASTER_ADDR"], int(port), ranks.size, holds, patience, wait_for_workers=False,
                         multi_tenant=True)
    return PrefixStore(f"lineartime/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def speaks_first(ranks: Ranks, error: BaseException) -> bool:
    """Whether this rank is the first to speak of an error, for which it asks once. If the store
    does not answer, every rank speaks of its own errors; of a lost rank or a stop only ranks 0 and
    1 and each machine's first do."""
    if ranks.size == 1:
        return True
    import torch.distributed  # noqa: F401  # before the seconds are counted

    is_shared = isinstance(error, RankError | Stopped)
    if open_store.cache_info().currsize or not is_shared:
        with suppress(RuntimeError, LineartimeError):
            return bool(within(10, lambda: open_store().add("spoken", 1) == 1))
    return not is_shared or ranks.rank < 2 or os.environ.get("LOCAL_RANK") == "0"


def process_group(ranks: Ranks) -> Any:
    """The process group of some ranks; None: the one of all."""
    from torch.distributed import distributed_c10d

    return None if ranks.group is None else distributed_c10d._resolve_process_group(ranks.group)  # type: ignore


def gather(values: "Tensor", ranks: Ranks) -> "Tensor":
    """The values of every rank, in rank order: `[W, ...]`. values: alike in shape and dtype."""
    import torch.distributed as dist

    if ranks.size == 1:
        return values[None]
    out = values.new_empty(ranks.size * values.numel())
    # PyTorch 2.13 renamed it; 2.11 knows the old name alone.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    all_gather(out, values.contiguous().view(-1), group=process_group(ranks))
    return out.view(ranks.size, *values.shape)


def gather_rows(values: "Tensor", ranks: Ranks) -> list["Tensor"]:
    """The values of every rank, in rank order. values: `[N]`; N may differ between ranks."""
    import torch

    lengths = gather(torch.tensor(len(values)), ranks).tolist()
    rows = gather(torch.nn.functional.pad(values, (0, max(lengths) - len(values))), ranks)
    return [row[:n] for row, n in zip(rows, lengths, strict=True)]


def gather_json(value: Any, ranks: Ranks) -> list[Any]:
    """A JSON value of every rank, in rank order, on each."""
    import torch

    if ranks.size == 1:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(bytes(row.tolist())) for row in gather_rows(text, ranks)]


def wait_for_all(ranks: Ranks) -> None:
    """Return when every rank has come here."""
    gather_json(None, ranks)


def require_same(facts: Mapping[str, Any], ranks: Ranks) -> None:
    """Raise UsageError, with the first difference, unless every rank has the same facts."""
    first, *others = gather_json(dict(facts), ranks)
    for rank, other in enumerate(others, 1):
        for name in sorted({*first, *other}):
            require(first.get(name) == other.get(name), "the ranks were started differently",
                    f"{name} is {first.get(name)} on rank 0, {other.get(name)} on rank {rank}",
                    "give every rank the same arguments, data and versions")
