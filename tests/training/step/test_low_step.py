"""The step on bf16 copies of weights: against autocast's casts, through DDP, with frozen parts and
with adapters; and the runs that have none."""

import copy
import shutil

import pytest
import torch
import torch.distributed as dist
from ouro_runs import ouro_run
from torch.nn.parallel import DistributedDataParallel

from stars_fast.base.checkpoints import checkpoints, saved_tensors
from stars_fast.data.batches import Batches
from stars_fast.models.freeze import freeze
from stars_fast.models.lora import LoraConfig, adapt
from stars_fast.training.run.task import Task
from stars_fast.training.run.trainer import train
from stars_fast.training.scale.distributed import World, join, processes
from stars_fast.training.step.optim import make_optimizer
from stars_fast.training.step.train_step import StepLoss, plan_step, train_step

pytest.importorskip("transformers")
pytest.importorskip("stars_fast.models.ouro.causal_lm")  # takes seconds, once
ALONE = World(0, 1, torch.device("cpu"))
WINDOW = {"batch_size": 4, "micro_batch_size": 2}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """run_of(**changes): a configuration, its loop and the micro-batches of its first step."""
    folder = tmp_path_factory.mktemp("run")

    def make(**changes):
        changes = {"precision": "mixed", "train": WINDOW, "optim": {"clip": None}, **changes}
        config = ouro_run(folder / "run", folder, **changes)
        task = Task(config, ALONE)
        source = task.data.source
        train = config.train.on(1)
        config.train.accumulation = train.accumulation
        window = Batches(source, 0, train.batch_size, train.accumulation).window(0)
        return config, task.loop, window

    return make


def gradients(config, loop, window, wrap=lambda loss: loss, low=True):
    """Gradients of a step by name, its statistics, and the module."""
    loop = copy.deepcopy(loop)
    loss = StepLoss(loop, config)
    if not low:
        loss.low = type(loss.low)(loop.model, [])
    module = wrap(loss)
    optimizer = make_optimizer(config.optim, loop.model)
    stats = train_step(module, optimizer, config, window, plan_step(config, 0), ALONE)
    named = loop.model.named_parameters()
    return {name: p.grad for name, p in named if p.grad is not None}, stats, loss


@pytest.mark.slow
def test_ddp_s_buckets_get_all_of_the_gradients(run_of):
    """A group of one process: two micro-batches, of which the second is reduced."""
    config, loop, window = run_of()
    assert len(window) == 2
    expected, _, loss = gradients(config, loop, window)
    assert loss.low.nbytes > 0
    with processes("cpu"):
        join("cpu", alone=True)
        found, _, _ = gradients(
            config, loop, window,
            lambda loss: DistributedDataParallel(loss, gradient_as_bucket_view=True),
        )  # fmt: skip
        assert dist.is_initialized()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], g) for name, g in expected.items())
    memory = {g.untyped_storage().data_ptr() for g in found.values()}
    assert len(memory) < len(found) / 4  # buckets, not matrices


def test_a_step_is_autocast_s_but_for_rounding(run_of):
    config, loop, window = run_of()
    mine, stats, loss = gradients(config, loop, window)
    theirs, other, _ = gradients(config, loop, window, low=False)
    assert stats.loss.item() == other.loss.item()
    assert stats.penalty.item() == other.penalty.item()
    assert mine.keys() == theirs.keys()
    for name, g in theirs.items():
        # Sums of some ten products, each rounded to bf16 before or after
        assert (mine[name] - g).norm() < 2**-6 * g.norm(), name
    # What a run saves knows nothing of copies
    assert not [key for key in loss.state_dict() if "low" in key]
    assert {p.dtype for p in loss.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "float32"},
        {"precision": "bfloat16"},
        {"parallel": {"kind": "fsdp"}},
        {"train": {**WINDOW, "compile": True}},
    ],
    ids=["float32", "bfloat16", "fsdp", "compile"],
)
def test_runs_without_copies(run_of, changes):
    config, loop, _ = run_of(**changes)
    assert StepLoss(loop, config).low.nbytes == 0


def test_parts_that_are_frozen_stay(run_of):
    config, loop, window = run_of()
    loop = copy.deepcopy(loop)
    freeze(loop.model, ("q_proj", "down_proj"))
    found, _, loss = gradients(config, loop, window)
    whole, _, _ = gradients(*run_of()[:2], window)
    frozen = {name for name in whole if "q_proj" in name or "down_proj" in name}
    assert found.keys() == whole.keys() - frozen
    assert loss.low.nbytes == StepLoss(run_of()[1], config).low.nbytes
    for name, g in found.items():
        # Keys and values without queries are two nodes, whose cotangents round before they add up
        assert (g - whole[name]).norm() < 2**-6 * whole[name].norm(), name


def test_adapters_have_copies_and_what_they_adapt_has_none(run_of):
    pytest.importorskip("peft")
    config, loop, window = run_of()
    loop = copy.deepcopy(loop)
    loop.model.to(torch.bfloat16)
    adapt(loop, LoraConfig(rank=2), torch.float32, 0)
    mine, _, loss = gradients(config, loop, window)
    theirs, _, _ = gradients(config, loop, window, low=False)
    trained = sum(p.numel() for p in loop.model.parameters() if p.requires_grad)
    assert loss.low.nbytes == 2 * trained
    assert mine.keys() == theirs.keys()
    assert all("lora_" in name for name in mine)
    for name, g in theirs.items():
        assert (mine[name] - g).norm() <= 2**-6 * g.norm(), name


@pytest.mark.slow
def test_a_run_goes_on_from_fp32_weights_alone(tmp_path):
    """Two steps and two more, after what the second two had left is taken away."""
    steps = {**WINDOW, "steps": 4, "save_every": 2}
    config = ouro_run(tmp_path / "run", tmp_path, precision="mixed", train=steps)
    folder = train(config).folder / "checkpoints"
    straight = saved_tensors(checkpoints(folder)[4])
    assert {x.dtype for name, x in straight.items() if name.startswith("model.")} == {torch.float32}
    shutil.rmtree(checkpoints(folder)[4])
    train(config, resume=True)
    resumed = saved_tensors(checkpoints(folder)[4])
    assert resumed.keys() == straight.keys()
    assert all(torch.equal(resumed[name], x) for name, x in straight.items())
