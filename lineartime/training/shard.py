"""Models that one process cannot hold: FSDP2 shards weights, gradients and moments over the ranks.

Each layer is a unit, whose parameters are gathered for forward and for backward; the embedding, the
last norm and the head are one unit more. Parameters stay in float32 and autocast is inside, because
a policy of bfloat16 would round the angles of positions too. Rank r takes every W-th micro-batch,
and the gradients of W consecutive ones are the lower levels of the tree in `ordered`: any number of
ranks ends in the same bits."""

import gc
import hashlib
import math
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from lineartime.base.ranks import Ranks
from lineartime.model.language_model import LanguageModel
from lineartime.training.ordered import VECTOR, ParameterPart, tree_sum


class OrderedReduceScatter:
    """What FSDP2 calls with a unit's gradients: this rank's part of their sum, as a tree in rank
    order, each times `share`: the share of the step's targets in its rank's micro-batch."""

    share = 1.0

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object,
                 async_op: bool = False) -> None:
        """input_tensor: `[W N]`, gradients by the rank they go to; output_tensor: `[N]`."""
        # Not PyTorch's reduce-scatter, which adds in an order that depends on the number of ranks.
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor * self.share, group=group)
        (total,) = tree_sum([piece] for piece in received.chunk(group.size()))
        output_tensor.copy_(total)


def shard_model(model: LanguageModel, seed: int, ranks: Ranks, device: torch.device) -> OrderedReduceScatter:
    """Give a model on the meta device its initial values and shard it in place, a layer at a time;
    returns what adds its gradients. A process on its own shards nothing.

    A layer's values are drawn from (seed, place), so they do not depend on the number of ranks. A
    model that is never sharded draws all from one generator, and starts from others."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # nothing of ours writes to it
    reduce_scatter = OrderedReduceScatter()
    mesh = init_device_mesh(device.type, (ranks.size,)) if ranks.size > 1 else None

    def share_out(unit: nn.Module) -> None:
        if mesh is not None:
            fully_shard(unit, mesh=mesh)
            assert isinstance(unit, FSDPModule)
            unit.set_custom_reduce_scatter(reduce_scatter)  # type: ignore[arg-type]  # its base class is private
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)

    # A layer is given memory, its values, and then its share, so no process ever has all.
    for place, layer in enumerate(model.residual_layers()):
        layer.to_empty(device=device)
        torch.manual_seed(seed_of(seed, f"layers.{place}"))
        layer.init_weights(model.config.init_std)
        share_out(layer)
        if mesh is not None:
            register_fsdp_forward_method(layer, "add")  # the model calls it in place of `forward`
    # What is in no layer: the embedding, the last norm and the head, which are one unit.
    for module in model.modules():
        if any(p.is_meta for p in module.parameters(recurse=False)):
            module.to_empty(device=device, recurse=False)
    torch.manual_seed(seed_of(seed, "outer"))
    model.init_outer_weights()
    share_out(model)
    return reduce_scatter


def seed_of(seed: int, name: str) -> int:
    """A seed for this name: 63 bits of a hash of the seed and the name."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little") >> 1


def sharded_parts(model: nn.Module, ranks: Ranks) -> list[ParameterPart]:
    """What this rank of a sharded model holds of each parameter: consecutive rows, as in FSDP2."""
    parts = []
    for name, p in model.named_parameters():
        # FSDP2 gives each rank equally many rows, rounded up; the last ranks may have none.
        per_rank = -(-p.shape[0] // ranks.size) * math.prod(p.shape[1:])
        start, stop = (min(rank * per_rank, p.numel()) for rank in (ranks.rank, ranks.rank + 1))
        parts.append(ParameterPart(name, p, start, stop, nn.Parameter(padded_to_vector(local(p)))))
    return parts


def forget_shards() -> None:
    """Drop what PyTorch keeps of sharded models and their process group, whose threads would go on
    while Python ends; now and then that aborted a process whose work was done."""
    _clear_sharding_prop_cache()
    gc.collect()  # FSDP2 and the model refer to each other


def padded_to_vector(x: Tensor) -> Tensor:
    """A tensor, flattened; a copy with zeros at its end if its size is no multiple of `VECTOR`."""
    flat = x.reshape(-1)
    return torch.cat([flat, flat.new_zeros(-len(flat) % VECTOR)]) if len(flat) % VECTOR else flat


def local(x: Tensor) -> Tensor:
    """What this rank holds of a tensor that is sharded, or all of it."""
    x = x.detach()
    return x.to_local() if isinstance(x, DTensor) else x


@torch.no_grad()
def write_back(parts: list[ParameterPart]) -> None:
    """Copy the optimizer's parameters that are copies into the model's."""
    for part in parts:
        held = local(part.parameter)
        if len(part.updated) != held.numel():
            held.view(-1).copy_(part.updated[: held.numel()])
