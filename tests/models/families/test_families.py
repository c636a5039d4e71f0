"""What every family must be able to do; a new file in `models/families/` is tested by being there,
with a small section in `SMALL`."""

import pickle

import fresh
import pytest
import torch

from stars_fast.base import tree
from stars_fast.base.errors import ConfigError
from stars_fast.data.batches import micro_batch
from stars_fast.data.documents import PaddedChats, TokenDocuments
from stars_fast.models.export import export_run
from stars_fast.models.families import checkpoint_config, families, family_of
from stars_fast.models.lora import LoraConfig, adapt, adapted_layers, target_names
from stars_fast.models.merge import merge
from stars_fast.models.saved import find_model, load_model, load_tokenizer
from stars_fast.training.config import config_from
from stars_fast.training.run.trainer import train

pytest.importorskip("transformers")

SMALL = {
    "looped_lm": {"d_model": 32, "n_heads": 2, "d_ff": 64, "tokenizer": "tiny"},
    "looped_decoder": {"path": "tiny", "width": 32, "depth": 3, "injection": "adapter"},
    "huginn": {"path": "tiny", "width": 32, "layers": 2},
    "ouro": {"path": "tiny", "width": 32, "layers": 2},
}
"""Of each family a section for a model that a test can train."""

IN_A_FRESH_PROCESS = """
import pickle, sys, torch
from stars_fast.models.saved import find_model, load_model
source = find_model(sys.argv[1])
loop = source.family.loop(load_model(source, torch.float64))
tokens, logits = torch.load(sys.argv[2])
samples = pickle.loads(bytes.fromhex(sys.argv[3]))
h, inputs = loop.begin(tokens, samples)
turn = loop.turn(h, samples, inputs)
found = loop.logits(turn(turn(h)))
assert torch.allclose(found, logits, rtol=1e-9, atol=1e-9), (found - logits).abs().max()
"""


@pytest.fixture(scope="module", params=families())
def family(request):
    return families()[request.param]


@pytest.fixture(scope="module")
def run(family, tmp_path_factory):
    """The folder of a run of two steps on text."""
    folder = tmp_path_factory.mktemp(family.name)
    (folder / "text.txt").write_text("One and two are three, and three and four are seven. " * 20)
    config = {
        "method": "stars",
        "precision": "float32",
        "out": str(folder / "run"),
        "model": {"family": family.name, **SMALL[family.name]},
        "data": {"kind": "text", "source": str(folder / "text.txt"), "length": 16},
        "train": {"steps": 2, "batch_size": 2, "threads": 1, "report_to": []},
        "depth": {"high": 3},
        "eval": {"turns": []},
    }
    return train(config_from(config)).folder


@pytest.fixture
def parts(run):
    """The run's model in parts, in fp64, and some documents for it."""
    source = find_model(run)
    loop = source.family.loop(load_model(source, torch.float64))
    tokenizer = load_tokenizer(source)
    texts = ("one and two", "three")
    documents = [torch.tensor(tokenizer(each)["input_ids"]).numpy() for each in texts]
    made = TokenDocuments([(each, each >= 0) for each in documents])
    return loop, micro_batch(PaddedChats(made, 0), torch.arange(2).numpy())


def logits_of(loop, batch, turns):
    h, inputs = loop.begin(batch.tokens, batch.samples)
    turn = loop.turn(h, batch.samples, inputs)
    for _ in range(turns):
        h = turn(h)
    return loop.logits(h)


def test_a_section_has_defaults_and_says_what_it_means(family):
    fields = tree.leaves(family.section)
    assert fields["family"].default == family.name
    assert [name for name, field in fields.items() if not field.help] == []


def test_a_run_and_an_export_are_recognised(family, run, tmp_path):
    assert family_of(run) is family
    assert family_of(export_run(run, tmp_path / "out")) is family
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "other"}')
    with pytest.raises(ConfigError, match=r"is no looped model: .*got 'other'"):
        family_of(tmp_path / "other")


@torch.no_grad()
def test_its_turns_are_those_of_the_model(family, parts):
    loop, batch = parts
    length = int(batch.samples.lengths[1])
    alone = batch.tokens[1:, :length]  # the shorter one, without its pads
    own = loop.model(alone, turns=2)
    own = own if isinstance(own, torch.Tensor) else own.logits
    torch.testing.assert_close(logits_of(loop, batch, 2)[1:, :length], own)


def test_its_loss_is_that_of_its_logits(parts):
    loop, batch = parts
    h = loop.prelude(batch.tokens)
    rows = loop.logits(h).flatten(0, 1)[batch.positions]
    expected = torch.nn.functional.cross_entropy(rows, batch.labels, reduction="sum")
    torch.testing.assert_close(loop.token_loss(h, batch, 3) * 3, expected)
    assert loop.vocabulary == rows.shape[1]


def test_its_layers_hold_the_weights_of_a_turn(parts):
    loop, batch = parts
    h, inputs = loop.begin(batch.tokens, batch.samples)
    h, inputs = h.detach(), None if inputs is None else inputs.detach()
    loop.turn(h, batch.samples, inputs)(h).square().sum().backward()
    held = {id(p) for layer in loop.layers for p in layer.parameters()}
    moved = {id(p) for p in loop.model.parameters() if p.grad is not None}
    assert held & moved
    assert loop.outside_block(1.0) > 0
    assert loop.turn_flops([4, 2]) > 0


@torch.no_grad()
def test_its_block_takes_adapters_and_gives_them_up(parts):
    pytest.importorskip("peft")
    loop, batch = parts
    before = logits_of(loop, batch, 2)
    maps = target_names(loop, ["all-linear"])
    adapt(loop, LoraConfig(rank=2), torch.float64, 0)
    layers = adapted_layers(loop.model)
    assert sorted(layers) == sorted(maps) != []
    assert torch.equal(logits_of(loop, batch, 2), before)
    for layer in layers.values():
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    moved = logits_of(loop, batch, 2)
    assert (moved - before).norm() > 1e-2 * before.norm()
    merge(loop.model)
    torch.testing.assert_close(logits_of(loop, batch, 2), moved, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_an_export_is_the_same_model(run, parts, tmp_path):
    loop, batch = parts
    out = export_run(run, tmp_path / "out", turns=3)
    source = find_model(out)
    again = source.family.loop(load_model(source, torch.float64))
    assert torch.equal(logits_of(again, batch, 2), logits_of(loop, batch, 2))
    assert load_tokenizer(source).get_vocab() == load_tokenizer(find_model(run)).get_vocab()
    assert source.family.turns_of(checkpoint_config(out)) == 3


@pytest.mark.slow
@torch.no_grad()
def test_it_loads_in_a_fresh_process(run, parts, tmp_path):
    loop, batch = parts
    torch.save((batch.tokens, logits_of(loop, batch, 2)), tmp_path / "expected.pt")
    samples = pickle.dumps(batch.samples).hex()
    fresh.said(IN_A_FRESH_PROCESS, run, tmp_path / "expected.pt", samples)


@torch.no_grad()
def test_it_generates_what_its_turns_say(family, parts):
    loop, batch = parts
    prompt = batch.tokens[:1, :3]
    found = family.generate(loop.model, prompt, 2, 4)
    assert torch.equal(found[:, :3], prompt)
    for end in range(3, found.shape[1]):
        own = loop.model(found[:, :end], turns=2)
        own = own if isinstance(own, torch.Tensor) else own.logits
        assert int(found[0, end]) == int(own[0, -1].argmax())
