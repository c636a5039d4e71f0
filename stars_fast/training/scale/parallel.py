"""A model over the processes of a run: whole on each, or its weights shared out among them.

    ddp    every process holds all weights; gradients are averaged
    fsdp   every process holds a share of each weight, of its gradient and of AdamW's averages, and
           gathers a layer's weights where it runs
    hsdp   fsdp within groups of processes, gradients averaged between the groups

Gradients are averaged over all processes whatever the kind, in the last micro-batch of a window.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stars_fast.base.errors import ConfigError
from stars_fast.training.scale.distributed import World

PARALLEL_KINDS = ("auto", "ddp", "fsdp", "hsdp")


@dataclass
class ParallelConfig:
    """The model over the processes.

    kind: ddp (all weights on each process), fsdp (weights, gradients and optimiser state shared
        out), hsdp (shared out within groups of processes, copied between them) or auto, which is
        ddp where there are several processes.
    shard: processes among which hsdp shares out one copy of the weights; none for those of a
        machine.
    reshard: drop a layer's gathered weights after it ran; less memory, but every layer is gathered
        anew in every turn. With fsdp and hsdp.
    offload: keep weights, gradients and optimiser state in host memory, where the optimiser then
        runs; the device holds what is gathered. With fsdp and hsdp, also in one process.
    """

    kind: Literal["auto", "ddp", "fsdp", "hsdp"] = "auto"
    shard: int | None = None
    reshard: bool = False
    offload: bool = False

    def __post_init__(self) -> None:
        if self.kind not in PARALLEL_KINDS:
            raise ValueError(
                f"kind: expected one of {', '.join(PARALLEL_KINDS)}, got {self.kind!r}"
            )
        if self.shard is not None and self.shard < 1:
            raise ValueError(f"shard: expected at least 1 or none, got {self.shard}")
        if self.shard is not None and self.kind != "hsdp":
            raise ValueError(f"shard goes with kind hsdp, got {self.shard} and kind {self.kind}")
        for name in ("reshard", "offload"):
            if getattr(self, name) and not self.sharded:
                raise ValueError(f"{name} goes with kind fsdp or hsdp, got kind {self.kind}")

    @property
    def sharded(self) -> bool:
        """Whether parameters become shards (`DTensor`), also in one process."""
        return self.kind in ("fsdp", "hsdp")

    def copies(self, world: World) -> int:
        """Among how many groups of processes hsdp copies the weights.

        Raises:
            ConfigError: the processes can't be divided so.
        """
        shard = world.local_size if self.shard is None else self.shard
        if world.size % shard:
            raise ConfigError(
                f"parallel.shard must divide the number of processes, {world.size}, got {shard}"
            )
        return world.size // shard


def parallelise(
    step_loss: nn.Module,
    layers: Sequence[nn.Module],
    config: ParallelConfig,
    precision: str,
    world: World,
) -> nn.Module:
    """The module to call in place of `step_loss`.

    With ddp a wrapper, or in one process `step_loss` itself. With fsdp and hsdp `step_loss` too,
    its parameters replaced by shards: make the optimiser afterwards, and run what uses weights
    through a call of `step_loss`, on every process alike, for that gathers what is in no layer. One
    process is a group of one then, which is made if there is none, with the same casts, hooks and
    shards as several.

    Args:
        step_loss: a module whose forward gives the loss; its parameters on `world.device` and of
            `precision.parameter_dtype`. On CUDA its forward must take no tensor of the host in a
            tuple, list or mapping: fsdp moves it to the device.
        layers: modules inside it whose weights are gathered together; each may be called any
            number of times in a forward.
        precision: with "mixed" and shards, weights are gathered in bf16, and gradients kept and
            reduced in fp32. Inputs of layers are not cast.

    Raises:
        ConfigError: `config.shard` does not divide the processes.
    """
    if config.sharded:
        from stars_fast.training.scale.sharding import shard  # loading FSDP takes a second

        copies = config.copies(world) if config.kind == "hsdp" else None
        shard(step_loss, layers, precision, world, copies, config.reshard, config.offload)
    elif world.size > 1:
        return DistributedDataParallel(step_loss, gradient_as_bucket_view=True)
    return step_loss


def gradient_sync(module: nn.Module, now: bool) -> AbstractContextManager[None]:
    """Around forward and backward of a micro-batch: gradients are reduced in it only if `now`.

    `module` is what `parallelise` returned; `now` is true for the last micro-batch of a window,
    after which gradients, and the shards of parameters, are ready for the optimiser. With fsdp and
    hsdp a layer is reduced twice in it: with its first backward what the micro-batches before have
    left, with its last what this one adds.
    """
    if isinstance(module, DistributedDataParallel):
        return nullcontext() if now else module.no_sync()
    if hasattr(module, "set_requires_gradient_sync"):  # FSDP's
        from stars_fast.training.scale.sharding import shard_sync

        return shard_sync(module, now)
    return nullcontext()
