"""Memory that activations may take on a device, beside weights, gradients and averages."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stars_fast.training.scale.distributed import World
from stars_fast.training.scale.memory import GIB, Activations, MemoryConfig

USABLE = 0.9
"""Part of the free memory that activations may take; allocators lose some to fragments."""


def activation_budget(
    config: MemoryConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    whole_gradients: bool = False,
    gradients_held: bool = False,
    gathered: int = 0,
) -> int | None:
    """Bytes that activations may take on this process's device; None where that is not known.

    Free memory less what is not there yet: gradients, the optimiser's averages (two a parameter,
    as Adam's), one gradient before it is added to its sum, and under FSDP2 what is `gathered`
    (`gathered_bytes`). With `whole_gradients` FSDP2 keeps them, in fp32, between the micro-batches
    of a step. With `gradients_held` the memory of all gradients is taken already: DDP makes its
    buckets, which they are views of, when it wraps the model. A margin of a tenth stays free.
    Weights must not be gathered when this is called.
    """
    if config.budget is not None:
        return round(config.budget * GIB)
    params = [p for p in model.parameters() if p.requires_grad]
    free = free_memory(next(model.parameters()).device)
    if free is None:
        return None
    sizes = [local_bytes(p) for p in params]
    coming = 0
    if not gradients_held:
        coming += sum(size for p, size in zip(params, sizes, strict=True) if p.grad is None)
    coming += sum(
        2 * size for p, size in zip(params, sizes, strict=True) if not optimizer.state.get(p)
    )
    coming += max(sizes, default=0) + gathered
    if whole_gradients:
        coming += sum(4 * p.numel() for p in params)
    return max(int(USABLE * (free - coming)), 0)


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process can still take on `device`; None where the system does not say.

    On the CPU processes of one machine share alike, as torchrun counts them.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    limits = [limit for limit in (_available(), _group_limit()) if limit is not None]
    return min(limits) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if limits else None


def agree(
    activations: Activations, budget: int | None, world: World
) -> tuple[Activations, int | None]:
    """The largest activations and the smallest budget of any process, so that all choose alike.

    Under FSDP the choice sets the order of the collectives. Every process must call this.
    """
    sizes: dict[str, Any] = activations._asdict()
    sizes = {name: None if size is None else world.largest(size) for name, size in sizes.items()}
    unknown = world.largest(int(budget is None))
    smallest = -world.largest(-(budget or 0))
    return Activations(**sizes), None if unknown else smallest


def local_bytes(tensor: Tensor) -> int:
    """Bytes of this process's part of a tensor."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


def gathered_bytes(model: nn.Module, dtype: torch.dtype | None, reshard: bool) -> int:
    """Bytes of the weights that FSDP2 gathers in `dtype`, by default their own; 0 without it.

    Each of its units is gathered as a whole: all of them together, and two of the biggest (being
    gathered, and its gradient), or with `reshard` three of the biggest.
    """
    if not any(hasattr(p, "to_local") for p in model.parameters()):
        return 0
    from torch.distributed.fsdp import FSDPModule

    counted: set[int] = set()
    units = [0]
    for unit in reversed([each for each in model.modules() if isinstance(each, FSDPModule)]):
        # Inner ones first: what they own is not their parent's.
        own = [p for p in unit.parameters() if id(p) not in counted]
        counted |= {id(p) for p in own}
        units.append(sum(p.numel() * (dtype or p.dtype).itemsize for p in own))
    return (max(units) if reshard else sum(units)) + 2 * max(units)


def _available() -> int | None:
    """Bytes of the machine's memory that can be taken without swapping (Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _group_limit() -> int | None:
    """Bytes left under the limit of this process's control group (containers on Linux)."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such file, or "max"
        return None
    return max(limit - used + int(stat.get("inactive_file", 0)), 0)
