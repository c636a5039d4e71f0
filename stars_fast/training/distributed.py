"""The processes of a run: one, or those that torchrun started."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stars_fast.training.tree import ConfigError


@dataclass(frozen=True)
class World:
    """This process among those of the run: its rank, their number, its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """True on the process that writes files and speaks."""
        return self.rank == 0

    def sum_(self, values: Tensor) -> Tensor:
        """`values` summed over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def largest(self, value: int) -> int:
        """The largest `value` of any process, agreed on the host without waiting for a device."""
        if self.size == 1:
            return value
        agreed = torch.tensor(value)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return int(agreed)

    def from_first(self, value: Any) -> Any:
        """The `value` of the first process, on all."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, device=torch.device("cpu"))
        return box[0]

    def wait(self) -> None:
        """Return once every process is here."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def processes(device: str = "auto") -> Iterator[World]:
    """Join the process group that torchrun's environment describes, and leave it at the end.

    `device` is "auto" (CUDA where there is one), "cpu" or "cuda"; with CUDA each process of a
    machine takes the device of its local rank. Raises ConfigError for "cuda" without one.
    """
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError("train.device is cuda but PyTorch sees no CUDA device")
    kind = "cuda" if has_cuda and device != "cpu" else "cpu"
    size, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    here = torch.device(kind, local) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(here)
    if size == 1:
        yield World(0, 1, here)
        return
    joined = not dist.is_initialized()
    if joined:
        dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    try:
        yield World(dist.get_rank(), size, here)
    finally:
        # A Gloo thread may still be letting go of the last collective, for which it needs the
        # interpreter's lock. The group's end waits for its threads and holds that lock: without
        # this pause, in which the lock is free, a process now and then never ends.
        time.sleep(0.2)
        if joined:
            dist.destroy_process_group()
