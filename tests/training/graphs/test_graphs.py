"""Graphs by their stand-in on the CPU: pads change nothing, a replay gives the bits of its ops, and
what is captured asks no tensor for its values.

Tolerances: in double precision pads change the order of sums over some hundred terms, through turns
and backward: 1e-11 of a loss, 1e-9 of a gradient.
"""

import weakref
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from ouro_runs import ouro_run
from torch.utils._python_dispatch import TorchDispatchMode

from stars_fast.base.errors import ConfigError
from stars_fast.base.tree import merge
from stars_fast.data.batches import Batches
from stars_fast.data.documents import PackedChats, TokenDocuments
from stars_fast.data.fixed_shape import fixed_shape
from stars_fast.models.families.ouro import FAMILY, OuroLoop
from stars_fast.training.graphs.graphs import Graphs
from stars_fast.training.graphs.kinds import Key, chances, worth_capturing
from stars_fast.training.graphs.recorder import Recorder, StandIn, recorder_for
from stars_fast.training.scale.distributed import World
from stars_fast.training.scale.fit_memory import fit_memory
from stars_fast.training.scale.flat_gradients import FlatGradients
from stars_fast.training.scale.memory import extra_turns
from stars_fast.training.step.micro_step import MicroStep
from stars_fast.training.step.optim import make_optimizer
from stars_fast.training.step.train_step import StepLoss, StepPlan, run_between, train_step
from stars_fast.training.step.turns import Recompute

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
ROW = 24
LAST = {"at": "last", "detach": False}


def chats():
    """Nine documents of random tokens; about half of the tokens are targets."""
    rng = np.random.default_rng(0)
    documents = []
    for n in (7, 12, 3, 9, 16, 5, 4, 11, 6):
        targets = rng.random(n) < 0.5
        targets[0], targets[1] = False, True
        documents.append((rng.integers(3, 300, n).astype(np.int32), targets))
    return PackedChats(TokenDocuments(documents), ROW, 0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(dtype, **changes): a StepLoss of a tiny Ouro."""
    folder = tmp_path_factory.mktemp("model")
    config = ouro_run(folder / "run", folder)
    model, _ = FAMILY.start(config.model, torch.float32, config.seed)

    def make(dtype=torch.float32, **changes):
        often = {"train": {"steps": 100, "batch_size": 2, "accumulation": 1}}
        config = ouro_run(folder / "run", folder, **merge(often, changes))
        return StepLoss(OuroLoop(model.to(dtype).train()), config)

    return make


def micro_batches(fill=True, steps=2):
    source = chats()
    shape = fixed_shape(source, 2, True)
    batches = Batches(source, 0, 2, fill=shape.fill if fill else None)
    return shape, [batches.window(step)[0] for step in range(steps)]


def step(loss, batch, turns=3, weight=0.1, number=0):
    """Loss, its parts and gradients of a micro-batch that is the whole window."""
    gradients = FlatGradients(loss)
    plan = StepPlan(number, [turns], weight, 0.0)
    total, parts = loss(batch, plan, turns, len(batch.labels))
    total.backward()
    return [total.detach(), parts, *gradients.flat]


def graphs_for(loss, shape, recorder=None, **options):
    graphs = Graphs(loss, loss.config, shape, recorder or StandIn(), ALONE, **options)
    loss.between = graphs.between
    return graphs


class Counted(StandIn):
    """Counts what is captured and replayed."""

    def __init__(self):
        self.captured = self.replayed = 0

    def record(self, run):
        self.captured += 1

        def replay():
            self.replayed += 1
            run()

        return replay


CASES = {
    "stars": {},
    "last": {"penalty": LAST},
    "step": {"penalty": {"direction": "step", "margin": 0.1, "fixed_point": 0.1}},
    "some turns": {"penalty": {"normalize": "batch"}, "train": {"backprop_turns": 2}},
    "l2": {"method": "l2"},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_pads_change_neither_loss_nor_gradient(trained, changes):
    loss = trained(torch.float64, **changes)
    _, (plain, _) = micro_batches(fill=False)
    _, (filled, _) = micro_batches()
    assert filled.tokens.shape == (1, 2 * ROW)
    assert filled.tokens.numel() > plain.tokens.numel()
    assert (filled.real_tokens, filled.share) == (plain.real_tokens, plain.share)
    for got, expected, near in zip(
        step(loss, filled), step(loss, plain), (1e-11, 1e-6, *[1e-9] * 9), strict=False
    ):
        assert (got - expected).norm() <= near * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
@pytest.mark.parametrize("precision", ["float32", "mixed"])
def test_a_replay_has_the_bits_of_its_ops(trained, changes, precision):
    loss = trained(precision=precision, **changes)
    shape, batches = micro_batches(steps=3)
    loss.recompute = lambda turns, dual: Recompute(turns=1, selective=True)
    expected = [step_under(loss, batch, number) for number, batch in enumerate(batches)]
    counted = Counted()
    graphs_for(loss, shape, counted)
    found = [step_under(loss, batch, number) for number, batch in enumerate(batches)]
    assert (counted.captured, counted.replayed) == (2, 6)
    for got, want in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not torch.equal(found[0][-1], found[1][-1])


def step_under(loss, batch, number):
    loss.low.refresh()
    casts = torch.autocast("cpu", torch.bfloat16, enabled=loss.config.precision == "mixed")
    with loss.low.used(), casts:
        return step(loss, batch, number=number)


class NoQuestions(TorchDispatchMode):
    """Refuses ops that wait for a device to know values or a shape."""

    NAMES = (
        "_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "_unique",
        "unique", "allclose", "bincount",
    )  # fmt: skip

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        asked = name.startswith(self.NAMES) or (
            (name == "repeat_interleave" and kwargs.get("output_size") is None and len(args) < 3)
            or (name == "segment_reduce" and not kwargs.get("unsafe"))
            or (
                name.startswith("index")
                and any(
                    isinstance(x, torch.Tensor) and x.dtype == torch.bool
                    for x in (args[1] if len(args) > 1 and isinstance(args[1], list) else ())
                )
            )
        )
        if asked:
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **kwargs)


@contextmanager
def no_questions():
    """Inside, tensors don't tell their values, in torch's ops or in Python."""

    def refuse(self, *args, **kwargs):
        raise AssertionError("the host asks for values")

    with pytest.MonkeyPatch.context() as patch, NoQuestions():
        for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__"):
            patch.setattr(torch.Tensor, name, refuse)
        yield


@pytest.mark.parametrize(
    "ask", [lambda x: x.tolist(), bool, torch.nonzero, lambda x: x[x > 0], torch.unique]
)
def test_questions_are_found(ask):
    with (
        pytest.raises(AssertionError, match=r"waits for the device|asks for values"),
        no_questions(),
    ):
        ask(torch.ones(1))


class Silent(StandIn):
    """Runs what is captured with no tensor telling its values."""

    def record(self, run):
        def replay():
            with no_questions():
                run()

        return replay


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_what_is_captured_asks_no_tensor_for_its_values(trained, changes):
    loss = trained(**changes)
    loss.recompute = lambda turns, dual: Recompute(turns=1, per="layer", selective=True)
    shape, (batch, _) = micro_batches()
    graphs = graphs_for(loss, shape)
    step(loss, batch)  # fills the noise from the batch, as loading does from then on
    for pair in graphs._pairs.values():
        pair.record(Silent())
    step(loss, batch)


# -- what is captured, and what is not


def test_turns_that_come_often_are_captured_the_most_frequent_first(trained, monkeypatch):
    config = trained(penalty={"start_step": 25}).config  # of 100 steps
    found = chances(config)
    assert sum(found.values()) == pytest.approx(1.0)
    assert sum(p for key, p in found.items() if key.penalised) == pytest.approx(0.75)
    keys = worth_capturing(config)
    assert keys == {key for key, p in found.items() if 100 * p >= 8}
    assert keys < found.keys()
    monkeypatch.setattr("stars_fast.training.graphs.kinds.MOST", 2)
    assert worth_capturing(config) == set(sorted(found, key=found.__getitem__)[-2:])


def test_rare_turns_run_op_by_op(trained):
    loss = trained()
    shape, (batch, _) = micro_batches()
    expected = step(loss, batch, turns=1)
    counted = Counted()
    graphs = graphs_for(loss, shape, counted)
    assert Key(1, True) not in graphs.keys
    assert all(map(torch.equal, step(loss, batch, turns=1), expected))
    assert counted.captured == 0


def test_hooks_of_all_modules_are_called_in_place_of_a_replay(trained):
    loss = trained()
    shape, (batch, _) = micro_batches()
    counted = Counted()
    graphs_for(loss, shape, counted)
    expected = step(loss, batch)
    assert (counted.captured, counted.replayed) == (2, 2)
    seen = []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
    try:
        found = step(loss, batch)
    finally:
        hook.remove()
    assert counted.replayed == 2
    assert all(seen.count(layer) == 3 + 1 for layer in loss.loop.layers)
    for got, want in zip(found, expected, strict=True):  # norms one by one: sums in another order
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


class Fails(Recorder):
    """Captures so many functions, and then no more."""

    def __init__(self, works=0):
        self.works = works

    def warm_up(self, run):
        run()

    def record(self, run):
        self.works -= 1
        if self.works < 0:
            raise RuntimeError("operation not permitted\nwhen a stream is capturing")
        return run


def test_a_capture_that_fails_is_told_once_and_the_run_goes_on(trained):
    loss = trained()
    shape, (batch, _) = micro_batches()
    expected = [step(loss, batch, turns) for turns in (2, 3, 4)]
    told = []
    graphs = graphs_for(loss, shape, Fails(works=3), say=told.append)
    found = [step(loss, batch, turns) for turns in (2, 3, 4)]
    for got, want in zip(found, expected, strict=True):
        assert all(map(torch.equal, got, want))
    assert graphs.keys == {Key(2, True)}
    (line,) = told
    assert "3 turns can't be captured: RuntimeError: operation not permitted;" in line
    graphs_for(loss, shape, Fails(), strict=True)
    with pytest.raises(ConfigError, match="expected auto or off, got on: a micro-batch of 3 turns"):
        step(loss, batch)


class Stale(StandIn):
    """Replays what it has seen at the capture: the start that was there then."""

    def record(self, run):
        run()
        return lambda: None


def test_what_is_tried_out_first_is_held_against_its_ops(trained):
    loss = trained(precision="mixed")
    shape, batches = micro_batches()
    gradients = FlatGradients(loss)
    assert graphs_for(loss, shape).try_out(batches, gradients) is None
    assert all(not flat.any() for flat in gradients.flat)
    for recorder, why in (
        (Stale(), "does not give what its ops give"),
        (Fails(), "can't be captured: RuntimeError: operation not permitted"),
    ):
        graphs = graphs_for(loss, shape, recorder)
        assert why in graphs.try_out(batches, gradients)
        assert all(not flat.any() for flat in gradients.flat)


@pytest.mark.parametrize("turns", [3, 2])
def test_a_backward_after_another_forward_is_an_error(trained, turns):
    """Pairs share buffers and, on a GPU, memory: another forward of any pair writes over it."""
    loss = trained()
    shape, batches = micro_batches()
    graphs = graphs_for(loss, shape)
    found = []
    for batch, number in zip(batches, (3, turns), strict=True):
        micro = MicroStep(loss.loop, batch, loss.config, 0)
        found.append(graphs.between(micro, number, loss.penalty)[1])
    with pytest.raises(RuntimeError, match="another micro-batch ran before the backward"):
        found[0].backward()
    found[1].backward()


def test_a_capture_that_fails_gives_the_stream_back(monkeypatch):
    """CUDA by its names alone: `torch.cuda.graph` does not leave its stream after an error."""
    now = ["main"]

    class Capture:
        def __init__(self, graph, pool=None, stream=None, capture_error_mode="global"):
            assert (pool, stream, capture_error_mode) == ("pool", "own", "thread_local")
            self.stream = stream

        def __enter__(self):
            self.before, now[0] = now[0], self.stream

        def __exit__(self, error, *_):
            if error is not None:
                raise RuntimeError("operation failed due to a previous error during capture")
            now[0] = self.before

    class Graph:
        def replay(self):
            assert now == ["main"]

    for name, value in {
        "graph_pool_handle": lambda: "pool", "Stream": lambda device: "own", "graph": Capture,
        "CUDAGraph": Graph, "current_stream": lambda: now[0],
        "set_stream": lambda stream: now.__setitem__(0, stream),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    recorder = recorder_for(torch.device("cuda"))
    ran = []
    recorder.record(lambda: ran.append(now[0]))()
    assert ran == ["own"]

    def fails():
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="during capture"):
        recorder.record(fails)
    assert now == ["main"]


class Marked(torch.autograd.Function):
    """Its argument; the node holds a mark."""

    @staticmethod
    def forward(ctx, x, mark):
        ctx.mark = mark
        return x.clone()

    @staticmethod
    def backward(ctx, x_bar):
        return x_bar, None


class Mark:
    pass


def test_nothing_is_left_of_a_micro_batch_s_graph_when_the_next_one_begins(trained):
    """Nodes of parameters belong to the stream that they were made on. One that outlives its
    micro-batch is taken again by a capture on another stream, which fails."""
    loss = trained()
    marks = []

    def between(micro, turns, penalty):
        assert [mark() for mark in marks] == [None] * len(marks)
        h, value = run_between(micro, turns, penalty)
        mark = Mark()
        marks.append(weakref.ref(mark))
        return Marked.apply(h, mark), value

    loss.between = between
    _, window = micro_batches()
    optimizer = make_optimizer(loss.config.optim, loss)
    train_step(loss, optimizer, loss.config, window, StepPlan(0, [2, 3], 0.1, 0.0), ALONE)
    assert len(marks) == 2


def test_what_runs_beside_graphs_has_its_own_part_of_the_memory(trained):
    loss = trained(memory={"budget": 1e-3})
    config = loss.config
    batches = Batches(chats(), 0, 2)
    optimizer = make_optimizer(config.optim, loss)
    lines = fit_memory(loss, loss, optimizer, batches, config, ALONE)
    whole = {turns: loss.recompute(turns, True) for turns in (2, 4)}
    fit_memory(loss, loss, optimizer, batches, config, ALONE, {(4, True)})
    assert "of 0.00 GiB" in lines[0]
    assert extra_turns(loss.recompute(4, True), 4, True) > extra_turns(whole[4], 4, True)
    assert extra_turns(loss.recompute(2, True), 2, True) >= extra_turns(whole[2], 2, True)
