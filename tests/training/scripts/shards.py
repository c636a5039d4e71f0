"""Checkpoints of two processes, sharded and whole: python shards.py FOLDER. Each is killed at the
end, in the midst of a save."""

import os
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import pytest
import torch
import torch.distributed as dist
from checkpointed import Net, adamw, advance, assert_same, everything
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from stars_fast.base.checkpoints import checkpoints
from stars_fast.training.run.checkpoint import Checkpoints, SaveError
from stars_fast.training.scale.distributed import World

FSDP, HSDP = (2,), (2, 1)


def make(mesh=None, seed=0):
    net = Net(seed=seed)
    if mesh:
        mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])
        fully_shard(net.body, mesh=mesh)
        fully_shard(net, mesh=mesh, reshard_after_forward=False)
    return net, adamw(net)


def expect(step, run):
    """Keep for the test what `run` is now."""
    expected = everything(*run)
    if world.first:
        torch.save(expected, folder / f"expected-{step}.pt")
    return expected


folder = Path(sys.argv[1])
dist.init_process_group("gloo")
world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
store = Checkpoints(folder / "run", world)

# Sharded, saved while the whole weights are still gathered from an evaluation, and going on
run = make(FSDP)
advance(*run, 0, 3)
third = expect(3, run)
with torch.no_grad():
    run[0].eval()(torch.arange(3))
store.save(3, *run, {"step": 3})
advance(run[0].train(), run[1], 3, 4)
store.wait()
fourth = expect(4, run)
path = folder / "run" / "step-000003"

# Loaded sharded, whole and in two copies of shards, and going on from there
for mesh in (FSDP, None, HSDP):
    other = make(mesh, seed=1)
    assert store.load(path, *other) == {"step": 3}
    assert_same(everything(*other), third)
    if mesh == FSDP:
        advance(*other, 3, 4)
        assert_same(everything(*other), fourth)
    if mesh == HSDP:
        store.save(2, *other, {"step": 2})
        store.load(folder / "run" / "step-000002", *(again := make(FSDP, seed=1)))
        assert_same(everything(*again), third)

# Whole, as with DDP
whole = make(seed=2)
store.load(path, *whole)
advance(*whole, 3, 4)
fourth = expect(4, whole)
store.save(4, *whole, {"step": 4})
sharded = make(FSDP, seed=3)
store.load(folder / "run" / "step-000004", *sharded)
assert_same(everything(*sharded), fourth)

# What goes wrong on one is told on both
write_data = FileSystemWriter.write_data


def fail(*_, **__):
    raise OSError("No space left on device")


for victim, method in ((1, "write_data"), (0, "finish")):
    real = getattr(FileSystemWriter, method)
    if world.rank == victim:
        setattr(FileSystemWriter, method, fail)
    store.save(5, *run, {})
    with pytest.raises(SaveError, match="No space left"):
        store.wait()
    setattr(FileSystemWriter, method, real)
assert sorted(checkpoints(folder / "run")) == [2, 3, 4]


def killed(*args):
    if world.first:
        write_data(*args)
    os.kill(os.getpid(), signal.SIGKILL)


FileSystemWriter.write_data = killed
store.save(5, *run, {})
store.wait()
