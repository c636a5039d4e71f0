"""What the tests of the portable modelling files share."""

import json
from contextlib import contextmanager

import fresh
import pytest
import torch
from ouro_models import tokens
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

EXACT = {"rtol": 1e-9, "atol": 1e-9}  # fp64: another order of sums
SINGLE = 1e-6  # of the whole, in the L2 norm
B, S = 3, 9


def rows_of(*rows):
    return torch.tensor([[int(c) for c in row] for row in rows])


MASKS = {
    "none": None,
    "left": rows_of("111111111", "000111111", "000000011"),
    "right": rows_of("111111111", "111111000", "110000000"),
    "holes": rows_of("111111111", "110011011", "011101110"),
}


def assert_same_states(native, other, ids, real=None, exact=EXACT, **options):
    """Of the real tokens."""
    options["attention_mask"] = real
    mine = native(ids, output_hidden_states=True, **options)
    theirs = other(ids, output_hidden_states=True, **options)
    seen = torch.ones_like(ids).bool() if real is None else real[:, -ids.shape[1] :].bool()
    torch.testing.assert_close(theirs.logits[seen], mine.logits[seen], **exact)
    assert len(theirs.hidden_states) == len(mine.hidden_states)
    for a, b in zip(theirs.hidden_states, mine.hidden_states, strict=True):
        torch.testing.assert_close(a[seen], b[seen], **exact)
    assert torch.equal(theirs.turns, mine.turns)
    return mine, theirs


def check_cache_keeps_its_turns(net, code, cache):
    """A cache of `net`, of the modelling code `code`, goes on with the turns it began with."""
    held = net(tokens(1, 4), turns=2)[code.CACHE]
    with pytest.raises(ValueError, match="turns: this cache holds 4 tokens at 2 turns and can't"):
        net(tokens(1, 1), turns=4, past_key_values=held)
    held.reset()
    assert net(tokens(1, 1), turns=4, past_key_values=held).logits.shape[1] == 1
    with pytest.raises(TypeError, match=f"past_key_values: expected an? {cache}"):
        net(tokens(1, 1), past_key_values=DynamicCache())


def small_llama():
    """One of the tests' vocabulary, that drafts."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=320, **sizes)).eval()


@contextmanager
def turns_of_passes(net):
    """A list of the turns that the passes of `net` take."""
    taken = []
    hook = net.register_forward_hook(lambda *given: taken.append(int(given[-1].turns.max())))
    try:
        yield taken
    finally:
        hook.remove()


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "stars_fast":
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Blocked())
"""


def alone(script, *words):
    """What a script says in a fresh process, which finds no stars_fast, at last."""
    return json.loads(fresh.said(BLOCKED + script, *words).splitlines()[-1])
