"""Portable Ouro and Huginn as their own drafts, as assistants and with one, and what they ask of
transformers."""

import pytest
import test_huginn_portable
import test_ouro_portable
import torch
from ouro_models import greedy, tokens
from portable_files import EXACT, small_llama, turns_of_passes
from transformers.modeling_utils import AttentionInterface


@pytest.fixture(params=["ouro", "huginn"])
def portable(request):
    if request.param == "ouro":
        return test_ouro_portable.pair("published")[1]
    return test_huginn_portable.pair("huginn")[1]


@pytest.mark.parametrize("way", [{"assistant_early_exit": 1}, {"prompt_lookup_num_tokens": 2}])
def test_drafts_change_no_token(portable, way):
    ids, how = tokens(1, 7), {"turns": 6, "new": 10, "eos_token_id": 2}
    with turns_of_passes(portable) as taken:
        drafted = greedy(portable, ids, **how, **way)
    assert torch.equal(drafted, greedy(portable, ids, **how))
    assert set(taken) == ({1, 6} if "assistant_early_exit" in way else {6})


def test_an_assistant_thinks_as_deep_as_it_says(portable):
    ids, llama = tokens(1, 7), small_llama()
    alone = greedy(portable, ids, turns=6)
    assert torch.equal(greedy(portable, ids, turns=6, assistant_model=llama), alone)
    with turns_of_passes(portable) as taken:
        drafted = greedy(llama, ids, assistant_model=portable)
    assert torch.equal(drafted, greedy(llama, ids))
    assert set(taken) == {4}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_attention_is_found_where_transformers_has_no_call_for_it(portable, attention, monkeypatch):
    """As in 5.0."""
    ids = tokens(1, 7)
    expected = portable(ids).logits
    monkeypatch.delattr(AttentionInterface, "get_interface")
    portable.set_attn_implementation(attention)
    torch.testing.assert_close(portable(ids).logits, expected, **EXACT)
    portable.set_attn_implementation("sdpa")
