"""Bytes by count against bytes that were measured, and sizes against models that were made."""

import numpy as np
import pytest
import torch

from stars_fast.data.batches import Batches
from stars_fast.data.documents import PaddedChats
from stars_fast.models.families import family_named
from stars_fast.models.families.ouro import FAMILY, OuroLoop
from stars_fast.models.ouro import layers
from stars_fast.training.config import load_config
from stars_fast.training.plan import memory
from stars_fast.training.plan.cards import cards, parse_gpus
from stars_fast.training.plan.passes import Machine
from stars_fast.training.plan.plan import plan
from stars_fast.training.plan.rates import rates
from stars_fast.training.scale import budget
from stars_fast.training.scale.budget import activation_budget
from stars_fast.training.scale.fit_memory import measure
from stars_fast.training.step.optim import make_optimizer, step_if
from stars_fast.training.step.precision import autocast, low_layers, parameter_dtype

CPU = torch.device("cpu")


class Alike:
    """Documents of one length."""

    lengths = np.full(8, 64)

    def __len__(self):
        return 8

    def document(self, index):
        tokens = np.random.default_rng(index).integers(3, 300, 64).astype(np.int32)
        return tokens, np.arange(64) > 16


@pytest.fixture(scope="module")
def loop():
    pytest.importorskip("transformers")
    config = load_config("ouro-tiny", ["--model.width", "64", "--model.layers", "3"])
    return OuroLoop(FAMILY.start(config.model, torch.float32, 0)[0].train())


@pytest.mark.parametrize("precision", ["mixed", "float32"])
def test_what_a_micro_batch_keeps_is_what_was_counted(loop, precision, monkeypatch):
    monkeypatch.setattr(layers, "CHAINED_ON", {"cpu"})  # as a GPU has it
    words = ["--model.width", "64", "--model.layers", "3", "--precision", precision]
    config = load_config("ouro-tiny", [*words, "--train.accumulation", "2"])
    (batch,) = Batches(PaddedChats(Alike(), 0), 0, 8).window(0)
    copies = low_layers(loop, config)
    with copies.used(), autocast(precision, CPU, False):
        found = measure(loop, batch, config, True)
    shape = FAMILY.shape(config.model)
    tokens = batch.tokens.numel()
    counted = memory.activations(shape, tokens, len(batch.labels), config)
    for name in ("state", "turn", "turn_selective", "turn_by_layer", "dual_by_layer"):
        assert getattr(counted, name) == pytest.approx(getattr(found, name), rel=0.05), name
    assert counted.rest == pytest.approx(found.rest, rel=0.15)
    # Tables of rotary positions and documents are left out, as are norms.
    assert found.shared - counted.shared < 0.1 * found.turn
    if precision == "mixed":
        assert counted.weights == 0
        assert found.weights < 0.02 * copies.nbytes  # norms
        assert copies.nbytes == 2 * shape.block_weights
        assert memory.held(shape, config, 1) > 16 * shape.parameters + copies.nbytes
    else:
        assert counted.weights == pytest.approx(found.weights, rel=0.1)
    # On the CPU blocked attention keeps some of its inputs in another order too.
    for name in ("dual", "dual_selective", "dual_layer"):
        assert 0.95 < getattr(found, name) / getattr(counted, name) < 1.3, name


@pytest.mark.parametrize("recipe", ["addition-quick", "ouro-tiny", "huginn-tiny", "looped-tiny"])
def test_parameters_are_those_of_the_model(recipe):
    if recipe != "addition-quick":
        pytest.importorskip("transformers")
    config = load_config(recipe)
    family = family_named(config.model.family)
    model, _ = family.start(config.model, torch.float32, 0)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() >= 2)
    counted = family.shape(config.model)
    # Positions that are learned, an exit gate: of a tiny model they are a few per cent.
    assert counted.parameters == pytest.approx(matrices, rel=0.04)
    loop = family.loop(model)
    named = [each for layer in loop.layers for each in layer.named_parameters()]
    weights = sum(p.numel() for name, p in named if p.dim() >= 2 and "bias" not in name)
    assert counted.block_weights - counted.injection == weights


def test_the_published_ouro_by_its_name_alone():
    pytest.importorskip("transformers")
    from stars_fast.models.ouro import OuroConfig, OuroForCausalLM

    shape = FAMILY.shape(load_config("ouro-numina").model)
    with torch.device("meta"):
        model = OuroForCausalLM(OuroConfig())
    true = sum(p.numel() for p in model.parameters())
    assert shape.parameters == pytest.approx(true, rel=1e-3)


@pytest.mark.parametrize("precision", ["mixed", "float32", "bfloat16"])
def test_the_budget_is_the_one_that_a_run_finds(loop, precision, monkeypatch):
    words = ["--model.width", "64", "--model.layers", "3", "--precision", precision]
    config, card = load_config("ouro-tiny", words), cards()["RTX-4090"]
    shape = FAMILY.shape(config.model)
    model = FAMILY.start(config.model, torch.float32, 0)[0]
    model = model.to(torch.bfloat16 if precision == "bfloat16" else torch.float32)
    # Little memory, so that what is counted is what matters
    small = card._replace(memory=memory.CONTEXT + memory.LOGITS + 10 * 2**20)
    there = sum(p.numel() * p.element_size() for p in model.parameters())
    there += low_layers(OuroLoop(model), config).nbytes
    monkeypatch.setattr(budget, "free_memory", lambda device: 10 * 2**20 - there)
    found = activation_budget(config.memory, model, make_optimizer(config.optim, model))
    assert memory.budget(shape, config, 1, small) == pytest.approx(found, rel=0.02)
    assert found < 0.85 * 10 * 2**20


ROUNDING = [(p, False) for p in ("mixed", "float32", "bfloat16")] + [("bfloat16", True)]


@pytest.mark.parametrize(("precision", "rounding"), ROUNDING)
def test_averages_are_those_of_the_optimiser(precision, rounding):
    if rounding:
        pytest.importorskip("torchao.optim")
    words = ["--precision", precision, "--stochastic_rounding", str(rounding).lower()]
    config = load_config("addition-quick", words)
    family = family_named(config.model.family)
    model, _ = family.start(config.model, parameter_dtype(precision), 0)
    optimizer = make_optimizer(config.optim, model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    if not optimizer.state:  # torchao's has its averages from the start, and compiles its step
        step_if(optimizer, torch.tensor(True), 0.0)
    params = list(model.parameters())
    averages = [
        each
        for p in params
        for name, each in optimizer.state[p].items()
        if name in ("exp_avg", "exp_avg_sq")
    ]
    assert len(averages) == 2 * len(params)
    found = sum(each.nbytes for each in averages)
    assert found == 2 * memory.average_bytes(config) * sum(p.numel() for p in params)
    # Beside them weights, gradients, bf16 copies, and one gradient more
    shape = family.shape(config.model)
    copies = 2 * shape.block_weights if memory.has_copies(config) else 0
    there = found + sum(2 * p.nbytes for p in params) + copies
    there += params[0].itemsize * shape.head_weights
    assert memory.held(shape, config, 1) == pytest.approx(there, rel=0.05)  # norms, positions


def test_averages_in_fp32_are_more_to_read_and_write():
    def traffic(*words):
        config = load_config("ouro-numina", ["--precision", "bfloat16", *words])
        return plan(config, parse_gpus("1xH200")).ours.parts["traffic"]

    number = FAMILY.shape(load_config("ouro-numina").model).parameters
    more = Machine(cards()["H200"], rates()).moved(8 * number)
    rounding = traffic("--stochastic_rounding", "true")
    assert rounding - traffic() == pytest.approx(more)


def test_fsdp_and_adapters_hold_less():
    config = load_config("ouro-numina-fast")
    shape = FAMILY.shape(config.model)

    def held(gpus, *words):
        return memory.held(shape, load_config("ouro-numina-fast", words), gpus)

    whole = held(4)
    assert whole == held(1)
    static = 16 * shape.parameters + 4 * shape.head_weights
    assert whole == pytest.approx(static + 2 * shape.block_weights)
    assert held(4, "--train.compile", "true") == pytest.approx(static)  # autocast casts then
    shared = held(4, "--parallel.kind", "fsdp")
    assert held(8, "--parallel.kind", "fsdp") < shared < whole
    assert held(8, "--parallel.kind", "hsdp", "--parallel.shard", "4") == shared
    assert held(4, "--parallel.kind", "fsdp", "--parallel.reshard", "true") < shared
    assert held(1, "--lora.rank", "16") < 0.2 * whole
    assert config.memory.budget is None
    given = load_config("ouro-numina-fast", ["--memory.budget", "3"])
    assert memory.budget(shape, given, 1, cards()["H200"]) == 3 * 2**30
