"""The processes of a run: one, or those that torchrun started."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from stars_fast.base.errors import ConfigError

T = TypeVar("T")

LONGEST_WAIT = timedelta(hours=24)
"""How long processes wait for one that tokenises the data or runs lm-eval."""


@dataclass(frozen=True)
class World:
    """This process among those of the run: its rank, their number, its device.

    local_rank, local_size: the same among the processes of its machine; by default it is alone.
    patient: the group in which processes wait for one that is long at work; the default if None.
    """

    rank: int
    size: int
    device: torch.device
    local_rank: int = 0
    local_size: int = 1
    patient: dist.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        """True on the process that writes files and speaks."""
        return self.rank == 0

    @property
    def local_first(self) -> bool:
        """True on the one process of each machine that writes what a machine needs once."""
        return self.local_rank == 0

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

    def total(self, values: Sequence[int]) -> list[int]:
        """`values` summed over the processes, on the host without waiting for a device."""
        if self.size == 1:
            return list(values)
        sums = torch.tensor(values)
        dist.all_reduce(sums)
        return sums.tolist()

    def from_first(self, value: Any) -> Any:
        """The `value` of the first process, on all."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, device=torch.device("cpu"))
        return box[0]

    def together(self, work: Callable[[], T]) -> T:
        """The result of `work` on this process, once all have done theirs, however long it takes.

        Raises:
            ConfigError: on all processes if one raised it.
        """
        result, mistake = None, None
        try:
            result = work()
        except ConfigError as error:
            mistake = str(error)
        mistake = self.first_reason(mistake)
        if mistake is not None:
            raise ConfigError(mistake)
        return cast(T, result)

    def first_reason(self, reason: str | None) -> str | None:
        """The `reason` of the first process that has one, on all, once all are here."""
        if self.size == 1:
            return reason
        reasons: list[str | None] = [None] * self.size
        dist.all_gather_object(reasons, reason, group=self.patient)
        return next((each for each in reasons if each is not None), None)

    def wait(self) -> None:
        """Return once every process is here."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1), group=self.patient)


def join(kind: str, alone: bool = False) -> None:
    """Join the group that torchrun's environment describes, or with `alone` make one of this
    process. With CUDA it has a part for the host, which agrees on things without a device."""
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    if alone:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0" or os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        dist.init_process_group(backend)
        return
    # torchrun's store still has the addresses of the processes before. Machines count their
    # restarts apart, so that a part of the store by their number is of one machine alone
    store, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"restart {restarts}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


@contextmanager
def processes(device: str = "auto") -> Iterator[World]:
    """Join the process group that torchrun's environment describes, and leave it at the end.

    `device` is "auto" (CUDA where there is one), "cpu" or "cuda"; with CUDA each process of a
    machine takes the device of its local rank. Without torchrun the process is alone and joins
    nothing; a group that is made meanwhile is left too.

    Raises:
        ConfigError: "cuda" without one, and for more processes on a machine than devices.
    """
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError("train.device is cuda but PyTorch sees no CUDA device")
    kind = "cuda" if has_cuda and device != "cpu" else "cpu"
    size, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if kind == "cuda" and local >= torch.cuda.device_count():
        raise ConfigError(
            f"torchrun's --nproc-per-node: expected at most the number of CUDA devices, "
            f"{torch.cuda.device_count()}, got {local_size}"
        )
    here = torch.device(kind, local) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(here)
    joined, patient = not dist.is_initialized(), None
    if joined and size > 1:
        join(kind)
    try:
        if size == 1:
            yield World(0, 1, here)
            return
        patient = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
        yield World(dist.get_rank(), size, here, local, local_size, patient)
    finally:
        if dist.is_initialized():
            settle()
            if joined:
                dist.destroy_process_group()
            elif patient is not None:
                dist.destroy_process_group(patient)


def settle() -> None:
    """To be called between the last collective of a Gloo group and the group's end.

    One of Gloo's threads may still be letting go of that collective, for which it needs the
    interpreter's lock. The group's end waits for its threads and holds that lock: without this
    pause, in which the lock is free, a process now and then never ends.
    """
    time.sleep(0.2)
