"""The logits of Ouro, against `ouro_reference`, for each way of reading a checkpoint."""

import json
import math

import ouro_reference
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stars_fast.models.ouro import OuroForCausalLM
from stars_fast.models.ouro.tiny import write_tiny_ouro

B, S, LAYERS, WINDOW = 3, 11, 3, 4
FULL, SLIDING = "full_attention", "sliding_attention"
HEADS = {"mha": {}, "gqa": {"num_key_value_heads": 2}}
WINDOWS = {
    "full": {"layer_types": [FULL] * LAYERS},
    "sliding": {"layer_types": [SLIDING] * LAYERS, "sliding_window": WINDOW},
    "mixed": {"layer_types": [FULL, SLIDING, FULL], "sliding_window": WINDOW},
}
PADDINGS = ("none", "left", "right")
# fp64 throughout: rounding gives 1e-15 a turn, and a random block hardly amplifies it.
FP64_TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(heads, window) -> folder of a checkpoint, its model in fp64, its weights and its config."""
    known = {}

    def get(heads="mha", window="full"):
        if (heads, window) not in known:
            folder = tmp_path_factory.mktemp(f"{heads}-{window}")
            config = {"num_hidden_layers": LAYERS, **HEADS[heads], **WINDOWS[window]}
            write_tiny_ouro(folder, **config)
            known[heads, window] = folder, load(folder), *read(folder)
        return known[heads, window]

    return get


def load(folder, dtype=torch.float64):
    return OuroForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def read(folder):
    weights = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    return weights, json.loads((folder / "config.json").read_text())


def batch(padding, vocab_size=320):
    """Token ids and mask [B, S]: rows of S, S - 3 and 2 real tokens; no mask without pads."""
    ids = torch.randint(vocab_size, (B, S), generator=torch.Generator().manual_seed(1))
    if padding == "none":
        return ids, None
    real = torch.arange(S) < torch.tensor([[S], [S - 3], [2]])
    real = real.flip(1) if padding == "left" else real
    return ids.masked_fill(~real, 0), real.long()


@torch.no_grad()
def answer(model, ids, mask, turns):
    return model(input_ids=ids, attention_mask=mask, turns=turns).logits


def largest(x):
    return x.abs().max()


def error(got, expected, mask, size=largest):
    """Size of the difference on real tokens, relative to that of the logits."""
    assert got.shape == expected.shape
    real = torch.ones(B, S, dtype=torch.bool) if mask is None else mask.bool()
    got, expected = got[real].double(), expected[real]
    return (size(got - expected) / size(expected)).item()


@pytest.mark.parametrize("turns", [1, 2, 4, 8], ids=lambda turns: f"T{turns}")
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", HEADS)
def test_logits_are_those_of_the_reference(made, heads, window, padding, turns):
    _, model, weights, config = made(heads, window)
    ids, mask = batch(padding)
    expected = ouro_reference.logits(weights, config, ids, mask, turns)
    got = answer(model, ids, mask, turns)
    assert got.dtype == torch.float64
    assert error(got, expected, mask) < FP64_TOLERANCE


@pytest.mark.parametrize("fields", [{}, {"total_ut_steps": 3}], ids=["published", "3"])
def test_without_turns_the_configuration_has_them(tmp_path, fields):
    model = load(write_tiny_ouro(tmp_path, **fields))
    ids, mask = batch("none")
    expected = answer(model, ids, mask, fields.get("total_ut_steps", 4))
    assert torch.equal(answer(model, ids, mask, None), expected)
    assert torch.equal(model(input_ids=ids).logits, expected)
    assert not torch.allclose(expected, answer(model, ids, mask, 2), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 10_000.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
        {"rms_norm_eps": 0.1},
        {"head_dim": 12, "num_key_value_heads": 1},
    ],
    ids=["theta", "new-theta", "eps", "head-dim"],
)
def test_settings_of_the_checkpoint_count(tmp_path, fields):
    folder = write_tiny_ouro(tmp_path, **fields)
    ids, mask = batch("left")
    expected = ouro_reference.logits(*read(folder), ids, mask, 2)
    assert error(answer(load(folder), ids, mask, 2), expected, mask) < FP64_TOLERANCE


def test_a_mask_of_ones_is_no_mask(made):
    _, model, *_ = made("gqa", "mixed")
    ids, _ = batch("none")
    torch.testing.assert_close(
        answer(model, ids, torch.ones_like(ids), 4), answer(model, ids, None, 4), rtol=0, atol=0
    )


@pytest.mark.parametrize("padding", ["left", "right"])
def test_what_stands_at_pads_does_not_count(made, padding):
    _, model, *_ = made("gqa", "mixed")
    ids, mask = batch(padding)
    other = torch.where(mask.bool(), ids, 7)
    first, second = (answer(model, each, mask, 4)[mask.bool()] for each in (ids, other))
    assert torch.equal(first, second)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_mask_may_have_holes_and_rows_of_pads(made, window):
    _, model, weights, config = made("mha", window)
    ids, _ = batch("none")
    mask = torch.ones_like(ids)
    mask[0, 3:5] = mask[1, 0] = mask[1, 6] = mask[2] = 0
    got = answer(model, ids, mask, 4)
    assert got.isfinite().all()
    expected = ouro_reference.logits(weights, config, ids, mask, 4)
    assert error(got, expected, mask) < FP64_TOLERANCE


@pytest.mark.parametrize("shards", [2, 5], ids=lambda n: f"{n}-shards")
def test_shards_make_no_difference(made, tmp_path, shards):
    folder, model, *_ = made()
    write_tiny_ouro(tmp_path, num_hidden_layers=LAYERS, shards=shards)
    assert not (tmp_path / "model.safetensors").exists()
    ids, mask = batch("left")
    sharded = load(tmp_path)
    assert torch.equal(answer(sharded, ids, mask, 4), answer(model, ids, mask, 4))
    assert sharded.state_dict().keys() == model.state_dict().keys() == read(folder)[0].keys()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_checkpoint_says_its_dtype(tmp_path, stored):
    folder = write_tiny_ouro(tmp_path, dtype=stored)
    model = OuroForCausalLM.from_pretrained(folder, dtype="auto")
    assert {parameter.dtype for parameter in model.parameters()} == {stored}
    # Widened to fp64, the weights of a bf16 checkpoint are exact: no rounding of ours.
    ids, mask = batch("right")
    expected = ouro_reference.logits(*read(folder), ids, mask, 2)
    assert error(answer(load(folder), ids, mask, 2), expected, mask) < FP64_TOLERANCE


# A sublayer rounds about 8 times on its way (norm, projection, scores, softmax, mean of values,
# projection, norm, sum), independently; the errors of turns add up at worst. Twice that.
@pytest.mark.parametrize("turns", [1, 4], ids=lambda turns: f"T{turns}")
@pytest.mark.parametrize(
    ("dtype", "unit"),
    [(torch.float32, 2**-24), (torch.bfloat16, 2**-9)],
    ids=["fp32", "bf16"],
)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("window", WINDOWS)
def test_rounding_stays_small(made, window, padding, dtype, unit, turns):
    folder, _, weights, config = made("gqa", window)
    ids, mask = batch(padding)
    rounded = {key: weight.to(dtype) for key, weight in weights.items()}
    expected = ouro_reference.logits(rounded, config, ids, mask, turns)
    got = answer(load(folder, dtype), ids, mask, turns)
    assert got.dtype == dtype
    bound = 2 * turns * math.sqrt(8 * 2 * LAYERS) * unit
    assert error(got, expected, mask, torch.linalg.vector_norm) < bound


@pytest.mark.parametrize("trust", [None, False, True])
@pytest.mark.parametrize("reader", [OuroForCausalLM, AutoModelForCausalLM])
def test_code_of_the_checkpoint_is_never_run(made, reader, trust):
    folder, model, *_ = made()
    assert "raise" in (folder / "modeling_ouro.py").read_text()
    read_again = reader.from_pretrained(folder, dtype=torch.float64, trust_remote_code=trust)
    assert type(read_again) is OuroForCausalLM
    ids, _ = batch("none")
    assert torch.equal(answer(read_again, ids, None, 2), answer(model, ids, None, 2))
