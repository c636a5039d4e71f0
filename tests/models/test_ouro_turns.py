"""Turns of Ouro: what is asked is what runs, in a call, by configuration, in generation; the cache;
exits by gate and by convergence."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from ouro_models import checkpoint, greedy, model, tokens
from transformers import AutoModelForCausalLM, DynamicCache

from stars_fast.models.ouro import OuroCache, OuroConfig, OuroForCausalLM, count_turns
from stars_fast.models.ouro.exits import exit_turns, gate_logits
from stars_fast.models.ouro.turn_count import TurnCount

GQA = {"num_key_value_heads": 2}


def count_layers(net):
    """Calls of the first layer, each a turn."""
    calls = Counter()
    net.model.layers[0].register_forward_hook(lambda *_: calls.update(turns=1))
    return calls


# -- what is asked is what runs


def test_every_way_of_setting_the_turns_executes_that_many():
    ids = tokens(2, 6)
    by_call = model()
    by_config = model()
    by_config.config.total_ut_steps = 7
    by_alias = model()
    by_alias.config.turns = 7
    by_load = OuroForCausalLM.from_pretrained(checkpoint(), dtype=torch.float64, turns=7)
    by_auto = AutoModelForCausalLM.from_pretrained(
        checkpoint(), dtype=torch.float64, total_ut_steps=7
    )
    by_exit = model()
    expected = None
    for net, options in (
        (by_call, {"turns": 7}),
        (by_config, {}),
        (by_alias, {}),
        (by_load, {}),
        (by_auto, {}),
        (by_exit, {"turns": 9, "exit_at_step": 6}),
    ):
        calls = count_layers(net)
        out = net(ids, **options)
        assert calls["turns"] == 7
        assert out.turns.tolist() == [[7] * 6] * 2
        expected = out.logits if expected is None else expected
        torch.testing.assert_close(out.logits, expected, rtol=1e-12, atol=1e-12)


def test_lm_evals_arguments_reach_the_turns():
    """As lm-eval's `hf` model calls it for model_args pretrained=...,turns=6,tol=1e-9."""
    net = AutoModelForCausalLM.from_pretrained(
        checkpoint(), revision="main", dtype="auto", trust_remote_code=False, gguf_file=None,
        quantization_config=None, subfolder="", turns=6, tol=1e-9, exit_threshold=0.5,
    )  # fmt: skip
    assert type(net) is OuroForCausalLM
    config = net.config
    assert (config.total_ut_steps, config.convergence_tol, config.early_exit_threshold) == (
        6, 1e-9, 0.5,
    )  # fmt: skip
    calls = count_layers(net)
    net(tokens(1, 4))
    assert calls["turns"] == 6


@pytest.mark.parametrize("turns", [1, 4, 9])
def test_generate_executes_the_turns_for_every_token(turns):
    net = model(**GQA)
    with count_turns(net) as count:
        greedy(net, tokens(2, 5), turns=turns)
    assert [tuple(c.shape) for c in count.calls] == [(2, 5)] + [(2, 1)] * 7
    assert count.per_token == turns
    assert all((c == turns).all() for c in count.calls)


def test_counting_needs_one_model():
    message = "expected a module that holds one Ouro, Huginn or looped decoder, got Linear"
    with pytest.raises(TypeError, match=message), count_turns(torch.nn.Linear(2, 2)):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"turns": 0}, "turns: expected"),
        ({"turns": 2.5}, "turns: expected"),
        ({"exit_at_step": 4}, "exit_at_step: expected less than turns=4, got 4"),
        ({"exit_threshold": 0.0}, r"exit_threshold: expected a number in \(0, 1\], got 0.0"),
        ({"exit_threshold": 1.5}, r"exit_threshold: expected a number in \(0, 1\], got 1.5"),
        ({"tol": -1.0}, r"tol: expected a number in \[0, inf\), got -1.0"),
        ({"exit_threshold": "0.5"}, "exit_threshold: expected a number"),
        ({"exit_at_step": 1, "exit_threshold": 0.5}, "exit_threshold: expected None when exit_at"),
        ({"tol": "1e-3"}, "tol: expected a number"),
        ({"input_ids": tokens(1, 6)[0]}, r"input_ids: expected integers \[B, S\], got"),
        ({"input_ids": torch.zeros(2, 6)}, r"input_ids: expected integers \[B, S\], got"),
        ({"input_ids": tokens(2, 6)[:, :0]}, "input_ids: expected a token at least"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(1, 6, 7)}, "inputs_embeds: expected"),
        ({"labels": tokens(1, 6)[0]}, r"labels: expected shape \[2, 6\], got \[6\]"),
        ({"cu_seqlens": torch.tensor(6), "input_ids": tokens(1, 6)}, "cu_seqlens: expected shape"),
        (
            {"cu_seqlens": torch.tensor([0, 2, 6]), "use_cache": True, "input_ids": tokens(1, 6)},
            "use_cache: expected False for packed documents",
        ),
        (
            {
                "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]] * 2),
                "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1], [1] * 6]),
            },
            "position_ids: expected positions that rise",
        ),
        ({"past_key_values": OuroCache(1)}, "expected a cache for 2 layers, got 1"),
        ({"past_key_values": OuroCache(2, turns=3)}, "holds 0 tokens at 3 turns"),
        ({"turn": 3}, r"unknown arguments \['turn'\]"),
        ({"past_key_values": DynamicCache()}, "expected an OuroCache.*got DynamicCache"),
        ({"attention_mask": torch.ones(2, 3)}, r"attention_mask: expected shape .*\[2, 6\]"),
        ({"position_ids": torch.ones(2, 3).long()}, "position_ids: expected shape"),
        (
            {"cu_seqlens": torch.tensor([0, 6])},
            r"h: expected shape \[1, total, D\] with cu_seqlens, got \[2,",
        ),
        ({"output_attentions": True}, "output_attentions: expected False"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        model()(**({"input_ids": tokens(2, 6)} | options))


def test_generate_refuses_unknown_arguments_and_caches():
    net = model()
    with pytest.raises(ValueError, match="turnz"):
        greedy(net, tokens(1, 3), turnz=3)
    with pytest.raises(ValueError, match="cache_implementation: expected None or 'dynamic'"):
        greedy(net, tokens(1, 3), cache_implementation="static")


def test_a_call_comes_before_the_configuration():
    net, ids = model(early_exit_step=1, convergence_tol=0.9, early_exit_threshold=0.4), tokens(2, 4)
    plain = model()
    for options, like in (
        ({}, {"turns": 2, "tol": 0.9}),
        ({"tol": 0}, {"turns": 2}),
        ({"turns": 6, "tol": 0, "exit_threshold": 1.0}, {"turns": 6}),
        ({"turns": 6, "tol": 0}, {"turns": 6, "exit_threshold": 0.4}),
        ({"exit_threshold": 0.3, "tol": 0}, {"exit_threshold": 0.3}),
        ({"exit_at_step": 2, "tol": 0}, {"turns": 3}),
    ):
        mine, expected = net(ids, **options), plain(ids, **like)
        torch.testing.assert_close(mine.logits, expected.logits, rtol=1e-12, atol=1e-12)
        assert torch.equal(mine.turns, expected.turns), options


def test_outputs_as_transformers_has_them():
    net, ids = model(), tokens(2, 4)
    out = net(ids, return_dict=False)
    assert isinstance(out, tuple)
    assert torch.equal(out[0], net(ids).logits)
    assert isinstance(net.model(ids, return_dict=False), tuple)
    net.config.output_hidden_states = True
    assert len(net(ids).hidden_states) == 5
    assert net(ids, output_hidden_states=False).hidden_states is None


# -- the cache


@pytest.mark.parametrize("turns", [1, 4, 9])
@pytest.mark.parametrize("window", [None, 4])
def test_cached_decoding_gives_the_tokens_of_prefilling_again(turns, window):
    fields = dict(GQA)
    if window:
        fields |= {
            "sliding_window": window, "use_sliding_window": True,
            "layer_types": ("sliding_attention", "full_attention"),
        }  # fmt: skip
    net, ids = model(**fields), tokens(3, 7)
    cached = greedy(net, ids, turns=turns, use_cache=True)
    assert torch.equal(cached, greedy(net, ids, turns=turns, use_cache=False))
    full = net(torch.cat((ids, cached), 1), turns=turns).logits
    assert torch.equal(full[:, 6:-1].argmax(-1), cached)


def test_the_cache_has_a_slot_for_each_layer_of_each_turn():
    net = model()
    out = net(tokens(2, 5), turns=3, use_cache=True)
    cache = out.get("cache", out.get("past_key_values"))
    assert isinstance(cache, OuroCache)
    assert (len(cache.layers), cache.turns, cache.get_seq_length()) == (3 * 2, 3, 5)
    slots = [slot.keys for slot in cache.layers]
    assert all(not torch.equal(a, b) for a in slots for b in slots if a is not b)


def test_chunks_through_the_cache_are_one_call():
    net, ids = model(**GQA), tokens(2, 9)
    cache = OuroCache(2)
    parts = [net(ids[:, a:b], past_key_values=cache, turns=3).logits for a, b in ((0, 4), (4, 9))]
    expected = net(ids, turns=3).logits
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-10, atol=1e-10)


def test_a_cache_has_its_batch():
    net, cache = model(), OuroCache(2)
    net(tokens(2, 4), past_key_values=cache)
    with pytest.raises(ValueError, match="expected a cache of 3 rows, got 2"):
        net(tokens(3, 1), past_key_values=cache)


def test_generation_takes_a_cache_by_either_name():
    net, ids = model(), tokens(1, 4)
    for name in ("cache", "past_key_values"):
        cache = OuroCache(2)
        assert torch.equal(greedy(net, ids, turns=3, **{name: cache}), greedy(net, ids, turns=3))
        assert (cache.turns, cache.get_seq_length()) == (3, 11)


def test_turns_can_not_change_in_a_cache():
    net, cache = model(), OuroCache(2)
    net(tokens(1, 4), past_key_values=cache, turns=3)
    with pytest.raises(ValueError, match="holds 4 tokens at 3 turns and can't go on with 5"):
        net(tokens(1, 1), past_key_values=cache, turns=5)
    cache.reset()
    net(tokens(1, 4), past_key_values=cache, turns=5)


def test_a_cropped_cache_goes_on_as_if_it_had_never_been_longer():
    net, ids = model(**GQA), tokens(2, 8)
    cache = OuroCache(2)
    net(ids, past_key_values=cache, turns=4)
    cache.crop(-3)
    assert cache.get_seq_length() == 5
    again = net(ids[:, 5:], past_key_values=cache, turns=4).logits
    torch.testing.assert_close(again, net(ids, turns=4).logits[:, 5:], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("turns", [1, 4])
def test_beam_search_with_a_cache_is_that_without(turns):
    net, ids = model(**GQA), tokens(2, 5)
    with torch.no_grad():
        net.lm_head.weight.mul_(0.1)  # so that the greedy path is not the best
    options = {"turns": turns, "num_beams": 4, "new": 8}
    beams = [greedy(net, ids, use_cache=cached, **options) for cached in (True, False)]
    assert torch.equal(*beams)
    assert not torch.equal(beams[0], greedy(net, ids, turns=turns))


@pytest.mark.parametrize("turns", [1, 4, 9])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_left_padded_batches_are_single_prompts(turns, attention):
    net = model(**GQA)
    net.set_attn_implementation(attention)
    prompts = [tokens(1, n, seed=n) for n in (3, 7, 5)]
    batch = torch.zeros(3, 7, dtype=torch.int64)
    mask = torch.zeros_like(batch)
    for row, prompt in enumerate(prompts):
        batch[row, 7 - prompt.shape[1] :] = prompt[0]
        mask[row, 7 - prompt.shape[1] :] = 1
    together = greedy(net, batch, attention_mask=mask, turns=turns)
    for row, prompt in enumerate(prompts):
        assert torch.equal(together[row : row + 1], greedy(net, prompt, turns=turns))


def test_padding_with_holes_in_it():
    net, ids = model(**GQA), tokens(1, 7)
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1]])
    logits = net(ids, attention_mask=mask, turns=3).logits[mask.bool()]
    alone = net(ids[mask.bool()][None], turns=3).logits[0]
    torch.testing.assert_close(logits, alone, rtol=1e-10, atol=1e-10)


# -- packed documents


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("how", ["cu_seqlens", "position_ids", "flattening collator"])
def test_packed_documents_are_documents_by_themselves(window, attention, how):
    fields = dict(GQA)
    if window:
        fields |= {"sliding_window": window, "layer_types": ("sliding_attention", "full_attention")}
    net = model(**fields)
    net.set_attn_implementation(attention)
    lengths = [4, 1, 6]
    documents = [tokens(1, n, seed=n) for n in lengths]
    bounds = torch.tensor([0, 4, 5, 11])
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    options = {
        "cu_seqlens": {"cu_seqlens": bounds},
        "position_ids": {"position_ids": positions},
        "flattening collator": {
            "position_ids": positions, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds,
            "max_length_q": 6, "max_length_k": 6,
        },
    }[how]  # fmt: skip
    packed = net(torch.cat(documents, 1), turns=3, **options).logits
    alone = torch.cat([net(each, turns=3).logits for each in documents], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-10, atol=1e-10)


# -- exits


def test_exit_turns_by_hand():
    gates = torch.tensor([[-50.0, 0.0, 50.0], [0.0, 0.0, 0.0], [9.0, -9.0, 9.0]])
    # Probability of having left after each turn: (0, 0.5, ..), (0.5, 0.75, ..), (1, 1, ..).
    assert exit_turns(gates, 0.4).tolist() == [1, 0, 0]
    assert exit_turns(gates, 0.6).tolist() == [2, 1, 0]
    assert exit_turns(gates, 1.0).tolist() == [2, 2, 2]


def test_exits_do_not_saturate():
    """After two turns 2e-9 of the probability are left, in fp32 1 - 2e-9 is 1."""
    gates = torch.full((4, 1), 10.0)
    assert 1 - torch.cumprod(1 - torch.sigmoid(gates), 0)[1] == 1
    assert exit_turns(gates, 1 - 1e-8).tolist() == [1]
    assert exit_turns(gates, 1 - 1e-10).tolist() == [2]


def test_the_gate_is_computed_in_fp32_under_autocast():
    net, h = model(torch.float32), torch.randn(2, 3, 32)
    expected = gate_logits(net.model.early_exit_gate, h)
    angles = net.model.rotary(torch.arange(3)[None], torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gate_logits(net.model.early_exit_gate, h), expected)
        again = net.model.rotary(torch.arange(3)[None], torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(angles, again, strict=True))


def test_a_saturated_bf16_gate_does_not_exit_at_step_0():
    net = model(torch.bfloat16)
    with torch.no_grad():
        net.model.early_exit_gate.weight.zero_()
        net.model.early_exit_gate.bias.fill_(7.0)
    h = torch.randn(1, 3, 32, dtype=torch.bfloat16)
    gates = gate_logits(net.model.early_exit_gate, h)
    assert gates.dtype == torch.float32
    assert torch.sigmoid(net.model.early_exit_gate(h)).eq(1).all()  # what saturates
    # 1 - sigmoid(7) = 9e-4 are left after a turn, 8e-7 after two.
    ids = tokens(1, 3)
    picked = net(ids, exit_threshold=1 - 1e-4, output_hidden_states=True)
    assert torch.equal(picked.logits, net.lm_head(picked.hidden_states[2]))
    assert not torch.equal(picked.logits, net.lm_head(picked.hidden_states[1]))


def test_a_threshold_picks_each_tokens_turn_as_published():
    net, ids = model(), tokens(2, 9)
    out = net.model(ids, turns=5, output_hidden_states=True, output_gates=True)
    left = torch.cumprod(1 - torch.sigmoid(out.gates), 0)
    chosen = set()
    for threshold in (0.3, 0.6, 0.9):
        logits = net(ids, turns=5, exit_threshold=threshold).logits
        for b in range(2):
            for s in range(9):
                hits = [t for t in range(4) if 1 - left[t, b, s] >= threshold]
                turn = hits[0] if hits else 4
                chosen.add(turn)
                expected = net.lm_head(out.hidden_states[turn + 1][b, s])
                torch.testing.assert_close(logits[b, s], expected, rtol=1e-10, atol=1e-10)
    assert len(chosen) > 2
    assert torch.equal(net(ids, turns=5).logits, net(ids, turns=5, exit_threshold=1.0).logits)


def test_a_threshold_in_generation_runs_all_turns():
    net, ids = model(), tokens(2, 4)
    with count_turns(net) as count:
        cached = greedy(net, ids, turns=5, exit_threshold=0.5)
    assert count.per_token == 5
    assert torch.equal(cached, greedy(net, ids, turns=5, exit_threshold=0.5, use_cache=False))


def test_an_ignored_gate_has_no_exit():
    net = model()
    net.model.set_gate("ignored")
    net(tokens(1, 3))
    with pytest.raises(ValueError, match="exit_threshold: expected None with gate='ignored'"):
        net(tokens(1, 3), exit_threshold=0.5)


def test_convergence_stops_each_sequence_when_it_rests_and_saves_the_turns():
    net, ids, limit = model(**GQA), tokens(5, 1), 40
    states = net(ids, turns=limit, output_hidden_states=True).hidden_states
    changes = torch.stack([(b - a).norm(dim=-1) / b.norm(dim=-1) for a, b in pairwise(states)])[
        ..., 0
    ]
    tol = changes[8].median().item()
    expected = [
        next((t + 1 for t in range(limit) if changes[t, row] <= tol), limit) for row in range(5)
    ]
    assert len(set(expected)) > 1
    assert max(expected) < limit
    calls = count_layers(net)
    rows = []
    net.model.layers[0].register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    out = net(ids, turns=limit, tol=tol, use_cache=True)
    assert out.turns[:, 0].tolist() == expected
    assert calls["turns"] == max(expected)
    assert rows == [sum(e > t for e in expected) for t in range(max(expected))]
    for row, turn in enumerate(expected):
        torch.testing.assert_close(
            out.logits[row], net.lm_head(states[turn][row]), rtol=1e-9, atol=1e-9
        )
    cache = out.get("cache", out.get("past_key_values"))
    assert len(cache.layers) == limit * 2
    for row, turn in enumerate(expected):  # the turns left out have the keys of the last
        last = cache.layers[(turn - 1) * 2].keys[row]
        assert all(torch.equal(cache.layers[t * 2].keys[row], last) for t in range(turn, limit))


def test_convergence_of_a_row_does_not_depend_on_the_others():
    net, ids = model(**GQA), tokens(4, 3, seed=1)
    mask = torch.ones(4, 3, dtype=torch.int64)
    mask[0, :2] = 0
    together = greedy(net, ids, attention_mask=mask, turns=30, tol=1e-3, new=5)
    for row in range(4):
        start = 2 if row == 0 else 0
        alone = greedy(net, ids[row : row + 1, start:], turns=30, tol=1e-3, new=5)
        assert torch.equal(together[row : row + 1], alone)


def test_generation_with_a_tolerance_takes_fewer_turns_and_gives_the_same_tokens():
    net, ids = model(**GQA), tokens(2, 4)
    with count_turns(net) as count:
        stopped = greedy(net, ids, turns=60, tol=1e-6)
    assert 10 < count.per_token < 45
    assert torch.equal(stopped, greedy(net, ids, turns=60))


def test_turns_are_counted_over_real_tokens():
    count = TurnCount(
        [torch.tensor([[2, 2], [4, 4]])], [torch.tensor([[True, False], [True, True]])]
    )
    assert count.per_token == pytest.approx(10 / 3)


def test_a_token_that_rests_is_held_while_its_sequence_goes_on():
    net, ids, limit = model(**GQA), tokens(3, 6), 40
    options = {"turns": limit, "tol": 0.1, "tol_per": "token"}
    out = net(ids, output_hidden_states=True, **options)
    assert len(out.turns.unique()) > 2
    assert int(out.turns.max()) < limit
    states = out.hidden_states
    assert len(states) == int(out.turns.max()) + 1
    for turn, (before, after) in enumerate(pairwise(states), 1):
        change = (after - before).norm(dim=-1) / after.norm(dim=-1)
        assert torch.equal(out.turns > turn, change > 0.1)
        assert torch.equal(out.turns < turn, change == 0)
    for length in (1, 3):  # what comes later has no say in it
        shorter = net(ids[:, :length], **options)
        assert torch.equal(shorter.turns, out.turns[:, :length])
        expected = out.logits[:, :length]
        torch.testing.assert_close(shorter.logits, expected, rtol=1e-9, atol=1e-9)


def test_tolerance_per_token_in_generation():
    """With a cache the keys of a token's last turn stand in for those of its held state: they
    differ by about the tolerance."""
    net, ids = model(**GQA), tokens(2, 4)
    options = {"turns": 60, "tol": 1e-6, "tol_per": "token"}
    with count_turns(net) as count:
        cached = greedy(net, ids, **options)
    assert 10 < count.per_token < 45
    assert torch.equal(cached, greedy(net, ids, use_cache=False, **options))
    assert torch.equal(cached, greedy(net, ids, turns=60))


def test_a_tolerance_never_reached_changes_nothing():
    net, ids = model(), tokens(2, 4)
    assert torch.equal(net(ids, turns=5, tol=1e-14).logits, net(ids, turns=5).logits)


# -- configuration


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"total_ut_steps": 0}, "total_ut_steps: expected"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads"),
        ({"hidden_act": "tanh"}, "hidden_act: expected one of"),
        ({"attention_dropout": 0.1}, "attention_dropout: expected 0"),
        ({"gate": "open"}, "gate: expected 'frozen' or 'ignored', got 'open'"),
        ({"layer_types": ["full_attention"]}, "layer_types must name one of"),
        ({"layer_types": ["sliding_attention"] * 24}, "sliding_window"),
        ({"head_dim": 7}, "head_dim: expected an even"),
    ],
)
def test_configurations_out_of_range(fields, message):
    with pytest.raises((ValueError, TypeError), match=message):
        OuroConfig(**fields)


def test_settings_overridden_at_load_are_checked():
    for options in ({"turns": 0}, {"tol": -1}, {"exit_threshold": 9}, {"hidden_act": "tanh"}):
        with pytest.raises(ValueError, match=r"total_ut|converg|early_exit|hidden_act"):
            OuroForCausalLM.from_pretrained(checkpoint(), **options)
    with pytest.raises(ValueError, match="early_exit_step: expected less than total_ut_steps=4"):
        OuroConfig(exit_at_step=4)


def test_sliding_layers_follow_from_the_older_fields():
    config = OuroConfig(
        num_hidden_layers=3, use_sliding_window=True, sliding_window=8, max_window_layers=1
    )
    assert config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    assert set(OuroConfig(sliding_window=8).layer_types) == {"full_attention"}


def test_a_context_follows_its_layers_to_another_device():
    net, h = model(), torch.zeros(2, 5, 32)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    there = torch.device("meta")
    for context in (
        net.model.prepare(h, mask).take_rows(torch.tensor([1, 0])),
        net.model.prepare(h[:1], cu_seqlens=torch.tensor([0, 2, 5])),
    ):
        assert context.on(h.device) is context
        moved = context.on(there)
        assert moved is context.on(there)
        visible = moved.visible["full_attention"]
        for each in (moved.cos, moved.sin, visible.spans.queries, visible.mask):
            assert each.device == there
        assert moved.rows is None or moved.rows.device == there
        assert not visible.tokens.packed or visible.cu_seqlens.device == there
