"""Random programs through the dual pass: 60 seconds of them, or STARS_FAST_FUZZ=10000 programs.

The seeds are fixed, so that a failure names a program that `python tests/dual/fuzz/run.py SEED
SEED+1` finds again and makes small.
"""

import dataclasses
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fuzz import check as judge
from fuzz.check import check
from fuzz.ops import OPS
from fuzz.programs import Line, Program, write
from fuzz.run import shrink

from stars_fast import Dual
from stars_fast.dual.registry import RULES

pytestmark = pytest.mark.filterwarnings("ignore")  # of ops in beta

SHARDS = 4
SECONDS = 60 / SHARDS
FEWEST = 150  # programs of a shard, however slow the machine
PROGRAMS = int(os.environ.get("STARS_FAST_FUZZ", 0)) // SHARDS


def program(*lines, mode="all", layout="contiguous"):
    body = tuple(Line("", text) for text in lines)
    return Program(0, mode, (3, 4), layout, body, ("x.reshape(-1)",))


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_programs_agree_with_torch_or_are_refused(shard):
    counts, failures = Counter(), []
    end = time.perf_counter() + SECONDS
    while len(failures) < 5:
        done = sum(counts.values())
        if done >= PROGRAMS and (PROGRAMS or (done >= FEWEST and time.perf_counter() > end)):
            break
        drawn = write(done * SHARDS + shard)
        outcome = check(drawn)
        counts[outcome.kind] += 1
        if outcome.fails:
            small = shrink(drawn, outcome)
            failures.append(f"{small.title()}: {check(small)}\n{small.source()}")
    assert not failures, "\n\n".join([str(dict(counts)), *failures])
    # Programs that are refused, or that nothing judges, show nothing.
    total = sum(counts.values())
    assert counts["refused"] < 0.05 * total, counts
    assert counts["rough"] + counts["torch"] + counts["illegal"] < 0.03 * total, counts


@pytest.mark.slow
def test_programs_from_several_threads():
    programs = [drawn for drawn in map(write, range(200)) if "lstm" not in drawn.ops()]
    with ThreadPoolExecutor(4) as pool:  # the seed of the LSTM's weights is everybody's
        outcomes = list(pool.map(check, programs))
    failing = [p.title() for p, outcome in zip(programs, outcomes, strict=True) if outcome.fails]
    assert not failing


@pytest.mark.slow
def test_every_op_is_drawn():
    drawn = {op for seed in range(1500) for op in write(seed).ops()}
    assert {op.name for op in OPS} - drawn == set()


def test_a_seed_gives_one_program():
    assert write(7) == write(7)
    assert write(7) != write(8)


# -- the judge sees what is wrong


@pytest.mark.parametrize(
    ("wrong", "detail"),
    [
        (lambda y, y_dot: (y * (1 + 1e-6), y_dot), "value"),
        (lambda y, y_dot: (y, y_dot * (1 + 1e-3)), "tangent"),
        (lambda y, y_dot: (y, y_dot.detach()), "gradient"),
        (lambda y, y_dot: (y.detach() + 0 * y_dot, y_dot), "gradient"),
        (lambda y, y_dot: (y[None], y_dot), "shape"),
    ],
    ids=["value", "tangent", "cut tangent", "cut value", "shape"],
)
def test_a_wrong_number_is_seen(monkeypatch, wrong, detail):
    right = judge.fused_jvp
    monkeypatch.setattr(judge, "fused_jvp", lambda *a, **kw: wrong(*right(*a, **kw)))
    outcome = check(program("x = (h @ W[:4, :4]).sin() * h"))
    assert outcome.kind == "silent"
    assert outcome.detail.startswith(detail)


def test_a_right_program_agrees():
    assert check(program("x = (h @ W[:4, :4]).sin() * h")).kind == "agree"


def test_errors_are_told_apart(monkeypatch):
    def failing(*args, **kwargs):
        raise error

    monkeypatch.setattr(judge, "fused_jvp", failing)
    error = RuntimeError("stars_fast: no rule for x; use y")
    assert check(program("x = h * 1.0")).kind == "refused"
    error = RuntimeError("a view of a view")
    assert check(program("x = h * 1.0")).kind == "crash"
    assert check(program("x = h.view(5, 5)")).kind == "illegal"


def test_a_kink_is_no_fault_and_no_excuse():
    def relu(step):
        return torch.tensor([step, 1 + step], dtype=torch.float64).relu()

    def slope(*numbers):
        return judge.compare("slope", relu, torch.tensor(numbers, dtype=torch.float64))

    assert slope(0.5, 1.0) is None
    assert slope(0.0, 1.0).kind == slope(1.0, 1.0).kind == "rough"
    assert slope(3.0, 1.0).kind == "silent"
    assert slope(0.0, 1.1).kind == "silent"
    assert slope(float("nan"), 1.0).kind == "silent"


def test_a_value_that_jumps_is_no_fault_and_no_excuse(monkeypatch):
    right = judge.fused_jvp

    def with_value(change):
        def changed(*args, **kwargs):
            y, y_dot = right(*args, **kwargs)
            return change(y), y_dot

        monkeypatch.setattr(judge, "fused_jvp", changed)

    # Equal but for rounding, by which their order changes: each place comes before the other.
    ties = "x0 = torch.cat((h[0, :1], h[0, :1] * 3.0 / 3.0))", "x = x0.argsort(0) + 0 * x0"
    with_value(lambda y: 1 - y)
    assert check(program(*ties)).kind == "rough"
    assert check(program(ties[0], "x = h[:2, 0].argsort(0) + 0 * x0")).kind == "silent"
    with_value(lambda y: y * (1 + 1e-6))
    assert check(program(*ties)).kind == "silent"


def test_a_failing_program_is_made_small(monkeypatch):
    def wrong(x, *args):
        return Dual.join(x.primal.sin(), x.tangent)

    sin = RULES[torch.Tensor.sin]
    monkeypatch.setitem(RULES, torch.Tensor.sin, dataclasses.replace(sin, handler=wrong))
    lines = "x0 = h * 2", "x1 = x0.tanh()", "x2 = x1.sin()", "x0.mul_(2)", "x = x2 * x0"
    big = program(*lines)
    small = shrink(big, check(big))
    assert [line.text for line in small.lines] == [
        "x0 = h * 1.0",
        "x1 = h * 1.0",
        "x2 = x1.sin()",
        "x = x2 * x0",
    ]


def test_differences_hold_what_a_program_detaches():
    assert check(program("x = h * held(h.detach())")).kind == "agree"


def test_programs_write_into_no_input():
    for seed in range(100):
        drawn = write(seed)
        inputs = drawn.inputs()
        h = inputs["h"].detach()
        with drawn.around():
            drawn.block()(inputs["h"], inputs["W"], inputs["b"], inputs["c"])
        assert torch.equal(h, drawn.inputs()["h"])
