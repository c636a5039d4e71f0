"""FSDP2 for a module whose layers run once a turn: many times in one forward and one backward."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from stars_fast.training.scale.distributed import World, join


def shard(
    root: nn.Module,
    layers: Sequence[nn.Module],
    precision: str,
    world: World,
    copies: int | None,
    reshard: bool,
    offload: bool,
) -> None:
    """Replace the parameters of each of `layers`, and what is left in `root`, by shards.

    `copies` is the number of groups of processes that hold all weights between them, None for one
    group without the dimension for copies. The others as in `parallel.ParallelConfig`.
    """
    options: dict[str, Any] = {
        "mesh": _mesh(world, copies),
        # Arguments are masks and tables that have their dtypes for a reason.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if precision == "mixed" else None,
            reduce_dtype=None if precision == "float32" else torch.float32,
            cast_forward_inputs=False,
        ),
        "offload_policy": (
            CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if offload else OffloadPolicy()
        ),
    }
    for layer in layers:
        fully_shard(layer, reshard_after_forward=reshard, **options)
    fully_shard(root, reshard_after_forward=False, **options)
    if hasattr(root, "with_weights"):
        register_fsdp_forward_method(root, "with_weights")
    for part in _parts(root):
        # Else the weights would be dropped after the backward of each turn, and gathered again for
        # the next; `shard_sync` drops them once, at the end of a window.
        part.set_reshard_after_backward(reshard, recurse=False)


@contextmanager
def shard_sync(root: nn.Module, now: bool) -> Iterator[None]:
    """See `parallel.gradient_sync`."""
    parts = _parts(root)
    for part in parts:
        part.set_requires_gradient_sync(now, recurse=False)
    yield
    if now:
        release(root)


def release(root: nn.Module) -> None:
    """Drop all gathered weights."""
    for part in _parts(root):
        part.reshard()


def _parts(root: nn.Module) -> list[FSDPModule]:
    return [part for part in root.modules() if isinstance(part, FSDPModule)]


def _mesh(world: World, copies: int | None) -> DeviceMesh:
    kind = world.device.type
    if not dist.is_initialized():
        join(kind, alone=True)
    if copies is None:
        return init_device_mesh(kind, (world.size,), mesh_dim_names=("shard",))
    shape = copies, world.size // copies
    return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
