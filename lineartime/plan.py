"""The memory of each process of a training run, without running it: `lineartime info MODEL --plan N`.

Two steps are taken with tensors that have shapes and no data, and the bytes that are alive are counted op by op."""

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lineartime.config import ModelConfig
from lineartime.distributed.ordered import parts_of, require_fitting
from lineartime.distributed.ranks import ALONE, Ranks, in_rows
from lineartime.distributed.windows import differentiate_windows
from lineartime.info import mib, print_table
from lineartime.model import LanguageModel, token_losses
from lineartime.run_config import RunConfig
from lineartime.runtime import LARGEST_KEPT, rss_bytes

USES = {"process": "Python, PyTorch and this package", "weights": "weights", "moments": "moments of the optimizer",
        "gradients": "gradients of earlier micro-batches",
        "activations": "activations and gradients of one, and what is sent",
        "holes": "free memory that the C library keeps"}


@dataclass(frozen=True)
class Plan:
    """Bytes of one process when it has most, by what they are for, see `USES`."""

    process: int
    weights: int
    moments: int
    gradients: int
    activations: int
    holes: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


LIBRARIES = 25 * 2**20
"""What PyTorch's mathematics libraries load and set aside when they first compute."""
HOLES = 0.25
"""What the C library's heap has free, in parts of the blocks in it, which have less than `runtime.LARGEST_KEPT`: a
tensor does not always find the block that another of its size has left. Fitted to runs under glibc 2.36. A sharded run
gives its memory back, see `runtime.choose_allocator`."""


class LiveBytes(TorchDispatchMode):
    """The storages that ops inside the block make: the bytes that are alive, and the most there were."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        """known: tensors that are not counted."""
        super().__init__()
        self.now = self.now_kept = self.most = self.most_kept = 0
        self.seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, Tensor):
                self.add(made.untyped_storage())
        return out

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed."""
        key, n_bytes = storage._cdata, storage.nbytes()
        if key not in self.seen:
            self.seen.add(key)
            weakref.finalize(storage, self.free, key, n_bytes)
            self.now += n_bytes
            self.now_kept += n_bytes * (n_bytes < LARGEST_KEPT)
            self.most, self.most_kept = max(self.most, self.now), max(self.most_kept, self.now_kept)

    def free(self, key: int, n_bytes: int) -> None:
        """A storage is gone."""
        self.seen.discard(key)
        self.now -= n_bytes
        self.now_kept -= n_bytes * (n_bytes < LARGEST_KEPT)


def plan(config: RunConfig, n_ranks: int) -> Plan:
    """The memory of each of `n_ranks` processes that train `config` on a CPU, without `torch.compile`.

    Where a model computes documents one by one, a row is taken as one document. Raises UsageError for a number of
    processes that does not fit."""
    ranks = in_rows(Ranks(0, n_ranks), config.train.context_parallel)
    require_fitting(config.rows_per_step // config.micro_batch_rows, config.train.shard, ranks)
    process = (rss_bytes() or 0) + LIBRARIES
    live = count_steps(config, ranks)
    n_all, n_outer, n_layer = count_by_place(config)
    n_own = -(-n_all // n_ranks)
    is_sharded, n_pending = config.train.shard and n_ranks > 1, gradients_that_wait(config, ranks)
    weights = 4 * (n_own + n_outer + 3 * n_layer if is_sharded else n_all)
    moments = 4 * sum(sizes_of_moments(config, ranks))
    gradients = 4 * (n_own * (1 + n_pending) if is_sharded else n_all * n_pending)
    holes = 0 if config.train.shard else int(HOLES * live.most_kept)
    return Plan(process, weights, moments, gradients, live.most - weights - moments - gradients, holes)


def count_by_place(config: RunConfig) -> tuple[int, int, int]:
    """The numbers of all parameters, of those outside of layers, and of those of one layer."""
    with torch.device("meta"):
        model = LanguageModel(config.model)
    n_all, n_layers, n_layer = (sum(p.numel() for p in each.parameters())
                                for each in (model, model.layers, model.layers[0]))
    return n_all, n_all - n_layers, n_layer


def sizes_of_moments(config: RunConfig, ranks: Ranks) -> list[int]:
    """The numbers in each moment of the optimizer that a process has."""
    with torch.device("meta"):
        model = LanguageModel(config.model)
    if config.train.optimizer == "adamw":
        return [-(-p.numel() // ranks.size) for p in model.parameters() for _ in range(2)]
    # The first process has most of them: parameters outside of layers, with two moments, come before Muon's, with one.
    return [part.stop - part.start for part in parts_of(model, ranks, muon=True) for _ in part.moments]


def gradients_that_wait(config: RunConfig, ranks: Ranks) -> int:
    """Gradients beside that of a process's last micro-batch: the sums of those before it, see `tree_sum`."""
    return int(math.log2(config.rows_per_step // config.micro_batch_rows // ranks.in_column.size))


def count_steps(config: RunConfig, ranks: Ranks) -> LiveBytes:
    """The bytes that are alive in two steps of a process, one of `ranks`: its tensors have shapes and no data."""
    is_sharded, n_pending = config.train.shard and ranks.size > 1, gradients_that_wait(config, ranks)
    (n_all, n_outer, n_layer), sizes = count_by_place(config), sizes_of_moments(config, ranks)
    with FakeTensorMode():
        model = LanguageModel(config.model)
        parameters = list(model.parameters())
        with LiveBytes(parameters) as live:
            shares = [-(-p.numel() // ranks.size) for p in parameters]
            held = [torch.empty(n) for n in sizes]  # moments
            if is_sharded:
                # Shares of weights and gradients; all weights outside layers; those of two layers, of one twice.
                held += [torch.empty(n) for n in shares for _ in range(2 + n_pending)]
                held += [torch.empty(n_outer), torch.empty(3, n_layer)]
                for p in model.layers.parameters():
                    p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))  # only a share is kept
            else:
                held += [torch.empty_like(p) for p in parameters]
            for _ in range(2):
                pending = [[torch.empty_like(p) for p in parameters] for _ in range(0 if is_sharded else n_pending)]
                forward_and_backward(model, config, ranks.in_row)
                del pending
                if ranks.size > 1:
                    torch.empty(2, n_outer if is_sharded else n_all)  # what is sent and received
                model.zero_grad()
            del held
    return live


def numbers_sent(config: ModelConfig) -> int:
    """The numbers that a rank sends in a layer for each row that ranks share, forward, and backward again: a state, a
    count, and whether a document goes on; with a key convolution also the edges of its part."""
    n_directions, h, k = (1 if config.causal else 2), config.n_heads, config.qk_width
    if config.attn_type == "linear":
        return h * n_directions * k * (k + 1) + 1
    states = h * (n_directions * (k * config.v_width + 1) + 1)
    return states + (config.key_conv - 1) * (h * k + 1) * (config.key_conv > 0)


def forward_and_backward(model: LanguageModel, config: RunConfig, ranks: Ranks) -> None:
    """A process's part of one micro-batch. Of windows, of which one is alive at a time, two, beside what all of them
    give to each other.

    ranks: those that share the rows."""
    train, length = config.train, config.model.context
    model.config = replace(config.model, end_of_document=None if config.model.by_document else 0)
    model.activation_checkpointing = train.activation_checkpointing
    if config.model.by_document:  # documents cannot be told in a tensor without data
        length, ranks = length // ranks.size, ALONE
    if config.n_windows > 1:
        length = 2 * config.model.context // config.n_windows
    rows_BT = torch.zeros(config.micro_batch_rows, length + 1, dtype=torch.long)

    def loss(part: Ranks) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=train.precision == "bfloat16"):
            return token_losses(model, rows_BT, part).sum()

    if config.n_windows == 1:
        loss(ranks).backward()
        return
    n_given = numbers_sent(config.model) * len(model.attention_layers()) * config.n_windows * len(rows_BT)
    given = torch.empty(n_given)
    differentiate_windows(loss, loss, 2)
    del given


def print_plan(config: RunConfig, n_ranks: int) -> None:
    """Print `plan` as a table."""
    found, console = plan(config, n_ranks), Console(highlight=False)
    how = ", sharded" * config.train.shard + f", {config.train.precision}"
    console.print(f"Memory of each of {n_ranks} process{'es' * (n_ranks > 1)}{how}, micro-batches of "
                  f"{config.micro_batch_rows} x {config.model.context:,} tokens", style="bold")
    rows = [(USES[use], mib(n_bytes)) for use, n_bytes in asdict(found).items()]
    print_table(console, ("", ""), [*rows, ("most at once", mib(found.total))], total=True)
