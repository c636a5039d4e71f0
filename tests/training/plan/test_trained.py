"""Plans of runs that leave parts of the model as they are: counted by the names and sizes of the
weights, as the run itself freezes them."""

import pytest
import torch

from stars_fast.base.errors import ConfigError
from stars_fast.models.families import family_named
from stars_fast.models.freeze import freeze
from stars_fast.training.config import load_config
from stars_fast.training.plan import memory, passes
from stars_fast.training.plan.cards import cards, parse_gpus
from stars_fast.training.plan.passes import Machine
from stars_fast.training.plan.plan import plan
from stars_fast.training.plan.rates import rates
from stars_fast.training.plan.trained import Trained, trained_of

COUNTS = ["--model.prelude", "1", "--model.coda", "1"]
FROZEN = {
    "addition-quick": ["block.0.mlp", "block.0.attention,tokens", "tokens"],
    "ouro-tiny": ["embed_tokens,lm_head", "layers.0", "mlp"],
    "huginn-tiny": ["core_block.0", "prelude,coda", "adapter"],
    "looped-tiny": ["mlp", "lm_head", "embed_tokens"],
}


@pytest.mark.parametrize(("recipe", "parts"), [(r, each) for r in FROZEN for each in FROZEN[r]])
def test_what_is_trained_is_what_a_run_trains(recipe, parts):
    if recipe != "addition-quick":
        pytest.importorskip("transformers")
    config = load_config(recipe, ["--train.freeze", parts])
    family = family_named(config.model.family)
    model, _ = family.start(config.model, torch.float32, 0)
    shape = family.shape(config.model)
    freeze(model, config.train.freeze)
    wanted = sum(p.numel() for p in model.parameters() if p.dim() >= 2 and p.requires_grad)
    counted = trained_of(config).parameters(shape)
    # Positions that are learned, an exit gate: of a tiny model they are a few per cent.
    assert counted == pytest.approx(wanted, rel=0.04)
    assert counted < 0.99 * shape.parameters
    held, whole = (
        memory.held(shape, load_config(recipe, words), 1)
        for words in (["--train.freeze", parts], [])
    )
    # Of a frozen weight neither gradient nor averages
    gone = 12 * (shape.parameters - counted)
    assert gone <= whole - held <= gone + 4 * shape.head_weights


def test_nothing_frozen_is_all_trained():
    assert trained_of(load_config("ouro-numina")) == Trained()
    shape = family_named("ouro").shape(load_config("ouro-numina").model)
    assert Trained().parameters(shape) == shape.parameters
    assert trained_of(load_config("ouro-numina", ["--lora.rank", "8"])) == Trained(0, 0, 0, 0, 8)


def test_a_part_that_the_model_has_not_is_named():
    config = load_config("addition-quick", ["--train.freeze", "lm_head"])
    with pytest.raises(ConfigError, match=r"train.freeze: expected parts of the model .*lm_head"):
        trained_of(config)


def test_frozen_weights_cost_no_gradient_and_no_update():
    pytest.importorskip("transformers")
    found = {}
    for parts in ("", "embed_tokens,lm_head", "mlp", "layers"):
        words = ["--precision", "mixed", *(["--train.freeze", parts] if parts else [])]
        found[parts] = plan(load_config("ouro-tiny", words), parse_gpus("1xH200"))
    whole, tables, mlp, layers = found.values()
    assert whole.trained == whole.parameters
    for less in (tables, mlp, layers):
        assert less.trained < whole.trained
        assert less.memory.held < whole.memory.held
        assert less.ours.parts["products"] < whole.ours.parts["products"]
        assert less.ours.parts["traffic"] < whole.ours.parts["traffic"]
        assert less.published is None
    assert layers.ours.parts["products"] < mlp.ours.parts["products"]


def test_products_of_a_backward_are_those_of_the_weights_that_are_trained():
    shape = family_named("ouro").shape(load_config("ouro-numina").model)
    machine = Machine(cards()["H200"], rates())

    def of(trained, **how):
        return passes.turn(shape, [600.0], machine, backward=True, trained=trained, **how)

    forward = passes.turn(shape, [600.0], machine, backward=False).products
    for part in (0.0, 0.25, 1.0):
        assert of(Trained(block=part)).products == pytest.approx((1 + part) * forward)
        both = of(Trained(block=part), dual=True).products
        assert both == pytest.approx(2 * (1 + part) * forward)
    # Only the head is left: the loss ends there
    assert of(Trained(0, 0, 1, 0)) == passes.Seconds()
    flops = [passes.turn_flops(shape, [1e-6], trained=Trained(block=part)) for part in (0, 1)]
    assert flops[0] / flops[1] == pytest.approx(2 / 3)


def test_a_looped_decoder_whose_counts_do_not_add_up_is_one_error(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(num_hidden_layers=6).save_pretrained(tmp_path)
    words = [f"--model.path={tmp_path}", "--train.freeze=[lm_head]", "--model.block"]
    assert 0 < trained_of(load_config("looped-smollm2", [*words, "null", *COUNTS])).block <= 1
    with pytest.raises(ConfigError, match=r"model: .*make up the 6 layers"):
        trained_of(load_config("looped-smollm2", [*words, "9", *COUNTS]))


@pytest.mark.parametrize("words", [["--lora.rank", "8"], []])
def test_a_host_that_was_not_measured_is_said_so(words, capsys):
    from stars_fast.commands.plan import main

    assert main(["ouro-numina-fast", "--gpus", "1xH200", *words]) == 0
    said = "host    of adapters by their count of ops, which no GPU has timed"
    assert (said in capsys.readouterr().out) == bool(words)
