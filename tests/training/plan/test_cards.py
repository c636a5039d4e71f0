"""GPUs by the words of a user, and by the names that CUDA gives."""

import pytest

from stars_fast.base.errors import ConfigError
from stars_fast.training.plan.cards import card_of_device, cards, parse_gpus


@pytest.mark.parametrize(
    ("text", "number", "name"),
    [
        ("4xA800-80GB", 4, "A800-80GB"),
        ("8 x h100", 8, "H100"),
        ("H200", 1, "H200"),
        ("2*l40s", 2, "L40S"),
        ("rtx 4090", 1, "RTX-4090"),
        ("4090", 1, "RTX-4090"),
    ],
)
def test_gpus_in_words(text, number, name):
    found = parse_gpus(text)
    assert (found.number, found.card.name) == (number, name)


@pytest.mark.parametrize(
    ("text", "known"),
    [("4xA100", "A100-40GB, A100-80GB"), ("TPU", "A100-40GB"), ("0xH200", "H200"), ("", "H200")],
)
def test_gpus_that_are_not_known(text, known):
    with pytest.raises(ConfigError, match=f"--gpus: expected a number and one of .*{known}"):
        parse_gpus(text)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A800-SXM4-80GB", "A800-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 3090", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_cards_by_the_names_of_devices(device, name):
    found = card_of_device(device)
    assert (None if found is None else found.name) == name


def test_figures_are_in_si_units():
    for card in cards().values():
        assert 1e14 < card.bf16 < 1e16
        assert 1e13 < card.fp32 < card.bf16
        assert 5e11 < card.bandwidth < 1e13
        assert 2e10 < card.memory < 3e11
        assert 2e10 < card.link < 2e12
