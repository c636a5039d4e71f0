"""Loss and gradients of Huginn and of a looped decoder on two processes against one:
torchrun looped_parallel.py huginn|looped."""

import sys

import torch
import torch.distributed as dist
from huginn_models import model as huginn
from shared_gradients import compare, gradients
from test_looped_decoder import looped
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from stars_fast import fused_jsrr
from stars_fast.models.looped_block import looped_block
from stars_fast.training.scale.distributed import settle

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, kind = dist.get_rank(), sys.argv[1]
mesh = init_device_mesh("cpu", (2,))


def load():
    """In evaluation mode, where the first state is no fresh noise."""
    if kind == "huginn":
        return huginn()
    return looped("llama", injection="adapter", state="learned", norm_between=True)


def layers(net):
    if kind == "huginn":
        return [layer for part in ("prelude", "core_block", "coda") for layer in net.part(part)]
    return [*net.model.prelude_layers, *net.model.block, *net.model.coda_layers]


def loss(net, ids, turns=3):
    return net(ids, labels=ids, turns=turns, use_cache=False).loss


def mean(x):
    total = x.detach().clone()
    dist.all_reduce(total)
    return total / 2


ids = torch.randint(3, 320, (4, 9), generator=torch.Generator().manual_seed(0))
mine = ids[2 * rank : 2 * rank + 2]
for turns in (1, 3):
    single = load()
    expected = loss(single, ids, turns)
    expected.backward()
    parallel = DistributedDataParallel(load(), find_unused_parameters=False)
    for _ in range(2):  # a second step finds what the first left unreduced
        parallel.zero_grad(set_to_none=True)
        found = loss(parallel, mine, turns)
        found.backward()
    torch.testing.assert_close(mean(found), expected.detach(), rtol=1e-12, atol=0)
    compare(gradients(parallel), gradients(single), f"{turns} turns, DDP")

single, sharded = load(), load()
expected = loss(single, ids)
expected.backward()
for layer in layers(sharded):
    fully_shard(layer, mesh=mesh)
fully_shard(sharded, mesh=mesh)
found = loss(sharded, mine)
found.backward()
torch.testing.assert_close(mean(found), expected.detach(), rtol=1e-12, atol=0)
compare(gradients(sharded), gradients(single), "FSDP2, loss")

h, v, e = (torch.randn(2, 9, single.config.hidden_size, dtype=torch.float64,
                       generator=torch.Generator().manual_seed(i)) for i in (1, 2, 3))  # fmt: skip
single, sharded = load(), load()
for layer in layers(sharded):
    fully_shard(layer, mesh=mesh)
values = []
for net in (single, sharded):
    value = fused_jsrr(looped_block(net, inputs=e), h, v=v)
    value.backward()
    values.append(value.detach())
torch.testing.assert_close(*values, rtol=1e-12, atol=0)
compare(gradients(sharded), gradients(single), "FSDP2, dual turn")

print("equal", flush=True)
dist.barrier()
settle()
dist.destroy_process_group()
