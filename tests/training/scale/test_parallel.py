"""What `scripts/parallel.py` found on two processes, and what needs one."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from looped_loss import LoopedLoss, micro_batch

from stars_fast.base.errors import ConfigError
from stars_fast.base.tree import build
from stars_fast.training.scale.distributed import World, processes
from stars_fast.training.scale.parallel import ParallelConfig, gradient_sync, parallelise
from stars_fast.training.step.optim import OptimConfig, gradient_norm, make_optimizer, step_if

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts" / "parallel.py"
LAYERS = 2
ALONE = World(0, 1, torch.device("cpu"))
KINDS = [
    "ddp", "fsdp", "hsdp-2x1", "hsdp-1x2", "ddp-recompute", "fsdp-offload-recompute-turn",
    "fsdp-reshard-recompute-layer", "fsdp-reshard-recompute-turn",
]  # fmt: skip


@pytest.fixture(scope="module")
def found(launch, tmp_path_factory):
    """What each of two processes found, by rank."""
    folder = tmp_path_factory.mktemp("parallel")
    assert launch([str(SCRIPT), str(folder)], 2, timeout=300) == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.fixture(params=KINDS)
def kind(request, found):
    return request.param, [each[request.param] for each in found]


def test_gradients_of_a_window_are_those_of_one_process(kind):
    for found in kind[1]:
        trained, same = found["parameters"]
        assert trained == same > 16
        assert found["gradients"] < 1e-6


def test_norm_and_clipping_are_those_of_whole_gradients(kind):
    for found in kind[1]:
        norm, expected = found["norms"]
        assert norm == pytest.approx(expected, rel=1e-6)
        assert norm > 1.0
        assert found["plain"]  # no DTensor
        assert found["norm after"] == pytest.approx(0.5, rel=1e-5)
        assert found["clipped"] < 1e-6


def test_steps_are_those_of_one_process_and_a_step_not_finite_is_none(kind):
    for found in kind[1]:
        # Adam divides a gradient by its size: a rounding error of a small one is an error of the
        # step that large, 1e-7 of the norm over 1e-2 of it.
        assert max(found["steps"]) < 1e-5
        assert found["skipped"]
        assert found["moved"] > 1e-3


def test_gradients_are_reduced_with_the_last_micro_batch_alone(kind):
    name, ranks = kind
    last = {"ddp": 1, "fsdp": 2 * LAYERS + 1, "hsdp": 2 * LAYERS + 1}[name.partition("-")[0]]
    if name == "hsdp-1x2":
        last *= 2  # among the shards, then among the (one) copies
    for found in ranks:
        assert [reduced for reduced, _ in found["comm"]] == [0, 0, last]


def test_weights_are_gathered_once_a_window(kind):
    name, ranks = kind
    for found in ranks:
        gathered = [gathered for _, gathered in found["comm"]]
        if "reshard" in name:  # once a turn and pass, dual turn included, and the rest once
            turns, graph = (3, 4, 2), (3, 2, 2)
            both = zip(turns, graph, strict=True)
            assert gathered == [LAYERS * (t + 1 + g + 1) + 1 for t, g in both]
        elif name.startswith("ddp") or name == "hsdp-2x1":
            assert gathered == [0, 0, 0]
        else:
            assert gathered == [LAYERS + 1, 0, 0]


@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_stochastic_rounding_keeps_copies_equal(found, kind):
    """Weights in bf16, steps of lr 1e-5; whole on each process, and as shards."""
    for rank, each in enumerate(found):
        rounded = each[f"rounding {kind}"]
        assert rounded["agree"]
        assert 0.02 < rounded["moved"] < 0.9
        assert rounded["steps"] == {2.0}  # one of three was not finite
        torch.manual_seed(rank)
        assert rounded["draw"] == float(torch.rand(()))  # the run's own draws are undisturbed


def test_ranks_of_a_machine(found):
    assert [each["world"] for each in found] == [(0, 2, True), (1, 2, False)]
    assert ALONE.local_first
    assert (ALONE.local_rank, ALONE.local_size) == (0, 1)


def test_a_shard_that_does_not_divide_the_processes(found):
    for each in found:
        assert each["error"] == "parallel.shard must divide the number of processes, 2, got 3"


@pytest.mark.parametrize("kind", ["auto", "ddp"])
def test_one_process_alone_is_the_module_itself(kind):
    loss = LoopedLoss()
    assert parallelise(loss, loss.layers, ParallelConfig(kind=kind), "float32", ALONE) is loss
    assert type(loss) is LoopedLoss
    with gradient_sync(loss, False):
        loss(micro_batch(0, 1)).backward()
    assert not dist.is_initialized()


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_one_process_can_hold_all_shards(kind):
    """A group of one: the same hooks, casts and DTensors, and the same step."""
    plain, split = LoopedLoss(), LoopedLoss()
    config = OptimConfig(clip=0.5)
    with processes("cpu") as world:
        module = parallelise(split, split.layers, ParallelConfig(kind=kind), "float32", world)
        assert module is split
        for loss in (plain, split):
            optimizer = make_optimizer(config, loss)
            for micro in range(2):
                with gradient_sync(loss, micro == 1):
                    loss(micro_batch(micro, 2)).backward()
            assert gradient_norm(loss, config.clip) > 1.0
            step_if(optimizer, torch.tensor(True), 0.01)
        for mine, other in zip(split.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), other)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "fsdp2"}, "parallel.kind: expected one of"),
        ({"kind": "hsdp", "shard": 0}, "parallel: shard: expected at least 1"),
        ({"kind": "fsdp", "shard": 2}, "parallel: shard goes with kind hsdp"),
        ({"kind": "ddp", "reshard": True}, "parallel: reshard goes with kind fsdp or hsdp"),
        ({"offload": True}, "parallel: offload goes with kind fsdp or hsdp, got kind auto"),
    ],
)
def test_settings_that_do_not_fit(wrong, message):
    with pytest.raises(ConfigError, match=message):
        build(ParallelConfig, wrong, "parallel")


def test_more_processes_than_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="number of CUDA devices, 2, got 4"), processes():
        pass


def test_settings_are_explained():
    assert not ParallelConfig().sharded
    assert ParallelConfig(kind="fsdp", reshard=True).sharded
    for name in ParallelConfig.__dataclass_fields__:
        assert f"{name}: " in (ParallelConfig.__doc__ or "")
