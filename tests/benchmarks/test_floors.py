"""The formulas against what the design states, and against what real blocks compute."""

import pytest
import torch

from benchmarks.counting import count
from benchmarks.floors import (
    PASSES,
    Document,
    Passes,
    Sizes,
    block_floor,
    layer_flops,
    step_flops,
)
from benchmarks.published import Published
from benchmarks.workload import LAW, random_model
from stars_fast import fused_jsrr
from stars_fast.models.depth import DepthLaw
from stars_fast.models.families.ouro import OuroLoop
from stars_fast.tokens import Tokens

OURO = Sizes(width=2048, d_ff=5632, layers=24, vocabulary=49152)
LENGTH = 2048
MEAN = DepthLaw(**LAW).mean()


PLAIN = Passes()


def cost(passes=PLAIN, turns=4.0, penalised=4):
    """Of four documents, `penalised` of them with the penalty, over SFT at four turns."""
    documents = [Document(LENGTH, turns, i < penalised) for i in range(4)]
    sft = [Document(LENGTH, 4) for _ in range(4)]
    return step_flops(OURO, documents, 4 * LENGTH, passes) / step_flops(
        OURO, sft, 4 * LENGTH, PLAIN
    )


@pytest.mark.parametrize(
    ("found", "stated"),  # as written there: to its last decimal
    [
        pytest.param(lambda: cost(Passes(penalty="dual")), "1.512", id="exact"),
        pytest.param(lambda: cost(Passes(penalty="dual", shared=True)), "1.267", id="last"),
        pytest.param(lambda: cost(Passes(penalty="dual"), penalised=1), "1.128", id="quarter"),
        pytest.param(
            lambda: cost(Passes(penalty="dual", shared=True), penalised=1),
            "1.067",
            id="last-quarter",
        ),
        pytest.param(
            lambda: cost(Passes(penalty="double_backward")), "1.503", id="double-backward"
        ),
        pytest.param(lambda: cost(Passes(penalty="func_jvp")), "1.652", id="func-jvp"),
        pytest.param(lambda: cost(turns=MEAN), "1.472", id="random-depth"),
        pytest.param(lambda: cost(Passes(penalty="dual"), turns=MEAN), "1.984", id="stars"),
        pytest.param(lambda: block_floor("dual", 2048, 5632, LENGTH), "2.087", id="dual-block"),
        pytest.param(lambda: cost(Passes("recomputed")), "1.32", id="checkpointed"),
    ],
)
def test_the_stated_values(found, stated):
    decimals = len(stated.partition(".")[2])
    assert found() == pytest.approx(float(stated), abs=0.5 * 10**-decimals)


def test_block_floors():
    plain, last = (block_floor(way, 64, 96, 32) for way in ("plain", "last"))
    assert plain == 1
    assert last == block_floor("dual", 64, 96, 32)
    assert block_floor("finite_difference", 64, 96, 32) == 2
    assert block_floor("another", 64, 96, 32) is None


# -- against the passes themselves

FIELDS = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


LENGTH_HERE = 48
LINEAR = 2 * 2 * LENGTH_HERE * (4 * 64**2 + 3 * 64 * 96)
SQUARE = 2 * 2 * 2 * LENGTH_HERE**2 * 64  # two products with all keys


@pytest.fixture(scope="module")
def model():
    return random_model(FIELDS, torch.device("cpu"), "float32")


@pytest.fixture
def h():
    return torch.randn(1, LENGTH_HERE, 64, requires_grad=True)


def counted(run):
    run()  # what is asked once is not counted
    return count(run).flops


def causal(way):
    return PASSES[way].linear * LINEAR + PASSES[way].attention * SQUARE / 2


def whole_square(way):
    """With attention by plain products, which compute all of the square."""
    return PASSES[way].linear * LINEAR + PASSES[way].attention * SQUARE


def test_the_formula_of_a_layer():
    assert 2 * layer_flops("dual", 64, 96, LENGTH_HERE) == causal("dual")


def test_a_plain_turn_takes_what_the_formula_says(model, h):
    turn = OuroLoop(model).turn(h, Tokens(*h.shape[:2]))
    assert counted(lambda: turn(h).sum().backward()) == causal("plain")


def test_a_dual_turn_takes_what_the_formula_says(model, h):
    """On the CPU a short document's attention is one tile, the whole square."""
    turn = OuroLoop(model).turn(h, Tokens(*h.shape[:2]))
    assert counted(lambda: fused_jsrr(turn, h, detach=False).backward()) == whole_square("dual")


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
def test_a_published_turn_and_penalty_take_what_the_formulas_say(model, h, checkpointed):
    published = Published(model, "float32", checkpointed)
    turn, plain, penalty = published.turn(h), "plain", "double_backward"
    if checkpointed:
        plain, penalty = "recomputed", "double_backward, recomputed"
    assert counted(lambda: turn(h).sum().backward()) == causal(plain)
    assert counted(lambda: published.penalty(h).backward()) == whole_square(penalty)


def autograd_jvp(block, h):
    return torch.autograd.functional.jvp(block, h, torch.ones_like(h), create_graph=True)[1]


def func_jvp(block, h):
    return torch.func.jvp(block, (h,), (torch.ones_like(h),))[1]


@pytest.mark.parametrize("way", [autograd_jvp, func_jvp], ids=lambda way: way.__name__)
def test_other_tangents_take_what_the_formulas_say(model, h, way):
    block = Published(model, "float32", checkpointed=False).turn(h, products=True)
    found = counted(lambda: way(block, h).square().sum().backward())
    assert found == whole_square(way.__name__)
