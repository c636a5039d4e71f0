"""All that is checked on several processes, in one start: python parallel.py FOLDER.

Each kind of parallelism runs a window of three micro-batches, then takes optimiser steps, beside
the same on whole weights. What came out is saved as FOLDER/RANK.pt for the tests to look at.
"""

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))
from looped_loss import LoopedLoss, micro_batch

from stars_fast.base.errors import ConfigError
from stars_fast.training.scale.distributed import World, processes
from stars_fast.training.scale.parallel import ParallelConfig, gradient_sync, parallelise
from stars_fast.training.step.optim import OptimConfig, gradient_norm, make_optimizer, step_if

TURNS = [(3, 0), (4, 2), (2, 0)]
CASES = {
    "ddp": ({"kind": "ddp"}, "none"),
    "fsdp": ({"kind": "fsdp"}, "none"),
    "hsdp-2x1": ({"kind": "hsdp", "shard": 1}, "none"),
    "hsdp-1x2": ({"kind": "hsdp"}, "none"),
    "ddp-recompute": ({"kind": "ddp"}, "layer"),
    "fsdp-offload-recompute-turn": ({"kind": "fsdp", "offload": True}, "turn"),
    "fsdp-reshard-recompute-layer": ({"kind": "fsdp", "reshard": True}, "layer"),
    "fsdp-reshard-recompute-turn": ({"kind": "fsdp", "reshard": True}, "turn"),
}
OPTIM = OptimConfig(lr=0.01, clip=0.5)


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def apart(some, others):
    """The largest difference over all tensors, relative to the largest entry of each."""
    return max(
        float((whole(a) - whole(b)).abs().max() / whole(b).abs().max().clamp_min(1e-12))
        for a, b in zip(some, others, strict=True)
    )


def steps(module, optimizer):
    """A step, one that is not finite, and a step; the weights after each."""
    after = []
    for finite in (True, False, True):
        step_if(optimizer, torch.tensor(finite), OPTIM.lr)
        after.append([whole(p) for p in module.parameters()])
    return after


class Counted(TorchDispatchMode):
    """Counts reductions and gathers."""

    def __init__(self):
        super().__init__()
        self.reduce = self.gather = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.reduce += "reduce" in func.__name__
            self.gather += "gather" in func.__name__
        return func(*args, **(kwargs or {}))


def compare(world: World, parallel, recompute):
    """Gradients, norm, clipping and steps of `parallel` beside those of whole weights."""
    single = LoopedLoss()
    split = copy.deepcopy(single)
    split.recompute = recompute
    module = parallelise(split, split.layers, ParallelConfig(**parallel), "float32", world)
    found: dict = {"comm": []}
    for micro, turns in enumerate(TURNS):
        for rank in range(world.size):
            single(micro_batch(micro + 3 * rank, *turns)).backward()
        with Counted() as comm, gradient_sync(module, micro == len(TURNS) - 1):
            loss = module(micro_batch(micro + 3 * world.rank, *turns))
            (loss * world.size).backward()
        found["comm"].append((comm.reduce, comm.gather))
    names = [name for name, p in single.named_parameters() if p.grad is not None]
    mine, plain = ([p for p in m.parameters() if p.grad is not None] for m in (split, single))
    found["parameters"] = len(names), len(mine)
    found["gradients"] = apart([p.grad for p in mine], [p.grad for p in plain])
    norms = [gradient_norm(m, OPTIM.clip) for m in (split, single)]
    found["norms"] = [float(norm) for norm in norms]
    found["plain"] = type(norms[0]) is torch.Tensor and norms[0].dim() == 0
    found["clipped"] = apart([p.grad for p in mine], [p.grad for p in plain])
    found["norm after"] = float(gradient_norm(split, None))
    mine, plain = (steps(m, make_optimizer(OPTIM, m)) for m in (split, single))
    found["steps"] = [apart(a, b) for a, b in zip(mine, plain, strict=True)]
    found["skipped"] = all(torch.equal(a, b) for a, b in zip(mine[0], mine[1], strict=True))
    found["moved"] = apart(mine[2], mine[1])
    return found


def rounded(world: World, parallel):
    """Steps of 1e-5 with stochastic rounding: whether the processes' weights agree, and the part of
    them that moved."""
    loss = LoopedLoss(penalised=False).bfloat16()
    before = [whole(p) for p in loss.parameters()]
    module = parallelise(loss, loss.layers, ParallelConfig(**parallel), "bfloat16", world)
    optimizer = make_optimizer(OptimConfig(stochastic_rounding=True), loss)
    torch.manual_seed(world.rank)  # the run's own draws differ between the processes
    for step in range(3):
        with gradient_sync(module, True):
            module(micro_batch(step + 3 * world.rank, 2)).backward()
        gradient_norm(loss, 1.0)
        step_if(optimizer, torch.tensor(step != 1), 1e-5)
        optimizer.zero_grad()
    after = torch.cat([whole(p).flatten() for p in loss.parameters()])
    others = [torch.empty_like(after) for _ in range(world.size)]
    dist.all_gather(others, after)
    moved = torch.cat([p.flatten() for p in before]) != after
    return {
        "agree": all(torch.equal(other, after) for other in others),
        "moved": float(moved.float().mean()),
        "steps": {float(state["step"]) for state in optimizer.state.values()},
        "draw": float(torch.rand(())),
    }


def main(folder):
    found = {}
    with processes("cpu") as world:
        for name, (parallel, recompute) in CASES.items():
            found[name] = compare(world, parallel, recompute)
        with torch.compiler.set_stance("force_eager"):
            found["rounding ddp"] = rounded(world, {"kind": "ddp"})
            found["rounding hsdp"] = rounded(world, {"kind": "hsdp", "shard": 1})
        found["world"] = world.local_rank, world.local_size, world.local_first
        try:
            module = LoopedLoss()
            config = ParallelConfig(kind="hsdp", shard=3)
            parallelise(module, module.layers, config, "float32", world)
        except ConfigError as error:
            found["error"] = str(error)
    torch.save(found, Path(folder) / f"{world.rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
