"""The portable models over two devices, as `device_map="auto"` lays them: the numbers of one."""

import pytest
import torch
from ouro_models import checkpoint, greedy, tokens
from portable_files import EXACT
from test_huginn_portable import folder_of
from test_looped_decoder_portable import folder
from two_devices import DEVICES, TwoDevices, device_of, put, spread

from stars_fast.models.portable import (
    modeling_huginn_portable,
    modeling_looped_decoder_portable,
    modeling_ouro_portable,
)

MODELS = {
    "ouro": (modeling_ouro_portable.OuroForCausalLM, checkpoint),
    "huginn": (modeling_huginn_portable.HuginnForCausalLM, lambda: folder_of("huginn")),
    "recurrent": (modeling_huginn_portable.HuginnForCausalLM, lambda: folder_of("llama")),
    "looped": (modeling_looped_decoder_portable.LoopedDecoderForCausalLM, folder),
    "adapter": (
        modeling_looped_decoder_portable.LoopedDecoderForCausalLM,
        lambda: folder("llama", 2),
    ),
}
CALLS = {
    "tol": {"turns": 8, "tol": 0.5},
    "tol-token": {"turns": 8, "tol": 0.5, "tol_per": "token"},
    "exit": {"exit_threshold": 0.6},
}
CASES = [
    (name, call)
    for name in MODELS
    for call in CALLS
    if call != ("tol-token" if name == "ouro" else "exit")
]


def loaded(name):
    kind, where = MODELS[name]
    return kind.from_pretrained(where(), dtype=torch.float64).eval()


def padded():
    ids = tokens(2, 7)
    real = torch.ones_like(ids)
    real[0, :3] = 0
    return ids, real


@pytest.mark.parametrize(("name", "call"), CASES)
@torch.no_grad()
def test_a_pass_and_its_loss_are_those_of_one_device(name, call):
    net, (ids, real), options = loaded(name), padded(), CALLS[call]
    expected = net(ids, attention_mask=real, labels=ids, **options)
    counted = net(ids, labels=ids, num_items_in_batch=7).loss
    spread(net)
    with TwoDevices():
        given, mask, count = put((ids, real, torch.tensor(7)), DEVICES[0])
        out = net(given, attention_mask=mask, labels=given, **options)
        loss = net(given, labels=given, num_items_in_batch=count).loss
    assert device_of(out.loss) == device_of(out.logits)
    torch.testing.assert_close(out.logits, expected.logits, **EXACT)
    torch.testing.assert_close((out.loss, loss), (expected.loss, counted), **EXACT)
    assert torch.equal(out.turns, expected.turns)


@pytest.mark.parametrize("name", MODELS)
def test_generation_is_that_of_one_device(name):
    net, (ids, real) = loaded(name), padded()
    expected = greedy(net, ids, new=4, attention_mask=real, **CALLS["tol"])
    spread(net)
    with TwoDevices():
        given, mask = put((ids, real), DEVICES[0])
        made = greedy(net, given, new=4, attention_mask=mask, **CALLS["tol"])
    assert torch.equal(made, expected)
