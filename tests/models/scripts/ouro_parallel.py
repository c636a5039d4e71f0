"""Gradients of Ouro on two processes against one: torchrun ouro_parallel.py CHECKPOINT."""

import sys

import torch
import torch.distributed as dist
from shared_gradients import compare, gradients
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from stars_fast import fused_jsrr
from stars_fast.models.looped_block import looped_block
from stars_fast.models.ouro import OuroForCausalLM
from stars_fast.training.scale.distributed import settle

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]


def load(gate):
    return OuroForCausalLM.from_pretrained(folder, dtype=torch.float64, gate=gate).train()


ids = torch.randint(3, 320, (4, 9), generator=torch.Generator().manual_seed(0))
mine = ids[2 * rank : 2 * rank + 2]
for gate in ("frozen", "ignored"):
    for turns in (1, 3):
        single = load(gate)
        single(ids, labels=ids, turns=turns).loss.backward()
        parallel = DistributedDataParallel(load(gate), find_unused_parameters=False)
        for _ in range(2):  # a second step finds what the first left unreduced
            parallel.zero_grad(set_to_none=True)
            parallel(mine, labels=mine, turns=turns).loss.backward()
        compare(gradients(parallel), gradients(single), f"{gate}, {turns} turns, DDP")

h, v = (torch.randn(2, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        for i in (1, 2))  # fmt: skip
single, sharded = load("frozen"), load("frozen")
fused_jsrr(looped_block(single), h, v=v).backward()
mesh = init_device_mesh("cpu", (2,))
for layer in sharded.model.layers:
    fully_shard(layer, mesh=mesh)
fused_jsrr(looped_block(sharded), h, v=v).backward()
compare(gradients(sharded), gradients(single), "FSDP2, dual turn")

single, sharded = load("frozen"), load("frozen")
single(ids, labels=ids, turns=3).loss.backward()
for layer in sharded.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(sharded, mesh=mesh)
sharded(mine, labels=mine, turns=3).loss.backward()
compare(gradients(sharded), gradients(single), "FSDP2, loss")

print("equal", flush=True)
dist.barrier()
settle()
dist.destroy_process_group()
