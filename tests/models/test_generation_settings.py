"""How deep a looped model thinks in `generate`: who says it, and who is heard."""

import json
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("transformers")

import ouro_models
from families_of_transformers import FAMILIES, GREEDY, greedy, ids, make
from transformers import AutoModelForCausalLM, GenerationConfig

from stars_fast.models.ouro.generation import adopt_depth, settled_depth


@contextmanager
def turns_taken(model):
    """The largest number of turns that a token took in each call."""
    taken = []
    handle = model.register_forward_hook(lambda *call: taken.append(int(call[-1].turns.max())))
    yield taken
    handle.remove()


def turns_of(model, **options):
    """The one number of turns at which all tokens are generated."""
    with turns_taken(model) as taken:
        greedy(model, ids(), **options)
    (turns,) = set(taken)
    return turns


def in_config(model, turns):
    model.config.turns = turns


def own(model):
    return model.config.turns


# -- each level, alone and before the next


@pytest.mark.parametrize("name", FAMILIES)
def test_the_call_comes_before_the_generation_config_and_that_before_the_config(name):
    model = make(name)
    in_config(model, 2)
    assert turns_of(model) == 2
    model.generation_config.turns = 7
    assert turns_of(model) == 7
    given = GenerationConfig(turns=5, **GREEDY)
    assert turns_of(model, generation_config=given) == 5
    assert turns_of(model, generation_config=given, turns=3) == 3
    assert turns_of(model, turns=4) == 4
    assert turns_of(model) == 7  # nothing stays
    assert given.turns == 5
    assert turns_of(model, turns=None) == 7


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tolerance_acts_wherever_it_stands(name):
    model = make(name)
    in_config(model, 6)
    always = 1e9  # everything rests after one turn
    assert turns_of(model) == 6
    assert turns_of(model, tol=always) == 1
    assert turns_of(model, generation_config=GenerationConfig(tol=always, **GREEDY)) == 1
    model.generation_config.tol = always
    assert turns_of(model) == 1
    assert turns_of(model, tol=0.0) == 6
    assert turns_of(model, generation_config=GenerationConfig(tol=0.0, **GREEDY)) == 6


def test_an_exit_acts_wherever_it_stands():
    model = ouro_models.model()  # 4 turns
    assert turns_of(model, generation_config=GenerationConfig(exit_at_step=1, **GREEDY)) == 2
    model.generation_config.exit_at_step = 2
    assert turns_of(model) == 3
    assert turns_of(model, exit_at_step=0) == 1
    # What a call says of the turns or of the exit voids what stands below it.
    assert turns_of(model, turns=4) == 4
    assert turns_of(model, exit_threshold=1.0) == 4
    both = GenerationConfig(turns=6, exit_at_step=4, **GREEDY)
    assert turns_of(model, generation_config=both) == 5


def test_a_threshold_in_the_generation_config_is_that_of_a_call():
    model = ouro_models.model()
    prompt = ids(length=9)
    early = greedy(model, prompt, exit_threshold=1e-6)
    assert not torch.equal(early, greedy(model, prompt))
    model.generation_config.exit_threshold = 1e-6
    assert torch.equal(greedy(model, prompt), early)


def test_how_tolerances_are_taken_acts_too():
    model = make("ouro")
    model.generation_config.tol_per = "nonsense"
    with pytest.raises(ValueError, match=r"tol_per: expected one of .* got 'nonsense'"):
        greedy(model, ids())
    assert turns_of(model, tol_per="token") == 4


def test_huginns_other_name_for_turns():
    model = make("huginn")
    model.generation_config.num_steps = 5
    assert turns_of(model) == 5
    assert turns_of(model, turns=3) == 3
    model.generation_config.turns = 2
    with pytest.raises(ValueError, match="num_steps: expected None when turns is given"):
        greedy(model, ids())


def test_levels_are_settled_by_hand():
    names = ("turns", "exit_at_step", "exit_threshold", "tol")
    settle = lambda *levels: settled_depth(levels, names)  # noqa: E731
    assert settle({"turns": 3}, {"turns": 5, "tol": 0.1}) == {"turns": 3, "tol": 0.1}
    assert settle({"turns": 3}, {"exit_at_step": 1}) == {"turns": 3}
    assert settle({"exit_at_step": 1}, {"turns": 5, "exit_threshold": 0.5}) == {
        "turns": 5, "exit_at_step": 1,
    }  # fmt: skip
    assert settle({}, {"exit_threshold": 0.5}, {"exit_at_step": 1}) == {"exit_threshold": 0.5}
    assert settle({"tol": 0.0, "turns": None}, {"tol": 1.0}) == {"tol": 0.0}


# -- mistakes


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("where", ["given", "the model's"])
@pytest.mark.parametrize("setting", ["turn", "total_ut_steps", "nonsense"])
def test_settings_that_nobody_reads_are_refused(name, where, setting):
    model = make(name)
    config = GenerationConfig(**GREEDY)
    setattr(config if where == "given" else model.generation_config, setting, 7)
    with pytest.raises(ValueError, match=f"generation_config: expected .*turns, .*got {setting}$"):
        model.generate(ids(), generation_config=config)


@pytest.mark.parametrize("name", FAMILIES)
def test_values_out_of_range_are_refused(name):
    model = make(name)
    for settings, kind, message in (
        ({"turns": 0}, ValueError, "turns: expected an integer >= 1, got 0"),
        ({"turns": "7"}, ValueError, "turns: expected an integer >= 1, got '7'"),
        ({"tol": -1.0}, ValueError, "tol: expected .*got -1.0"),
    ):
        with pytest.raises(kind, match=message):
            greedy(model, ids(), generation_config=GenerationConfig(**settings, **GREEDY))
    with pytest.raises(ValueError, match=r"not used by the model: .*'turn'"):
        greedy(model, ids(), turn=7)


# -- files


@pytest.mark.parametrize("name", FAMILIES)
def test_a_saved_depth_is_read_again(name, tmp_path):
    model = make(name)
    model.generation_config.turns = 7
    model.generation_config.tol = 1e-30
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert (saved["turns"], saved["tol"]) == (7, 1e-30)
    again = type(model).from_pretrained(tmp_path)
    assert again.generation_config.turns == 7
    assert turns_of(again) == 7
    assert turns_of(AutoModelForCausalLM.from_pretrained(tmp_path)) == 7


@pytest.mark.parametrize("name", FAMILIES)
def test_a_depth_written_into_the_file_by_hand_is_read(name, tmp_path):
    make(name).save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps(written | {"turns": 6}))
    assert turns_of(type(make(name)).from_pretrained(tmp_path)) == 6
    file.write_text(json.dumps(written | {"turn": 6}))
    with pytest.raises(ValueError, match=r"generation_config: expected .* got turn$"):
        greedy(type(make(name)).from_pretrained(tmp_path), ids())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("setting", ["turns", "num_steps", "exit_at_step", "tol", "tol_per"])
def test_a_configuration_reads_a_depth_or_refuses_it(name, setting):
    config = make(name).config
    values = config.to_dict()
    if setting in type(config).attribute_map:
        assert getattr(type(config)(**values | {setting: 1}), setting) == 1
    else:
        with pytest.raises(ValueError, match=f"{setting}: expected none in the configuration"):
            type(config)(**values | {setting: "token"})


@pytest.mark.parametrize("name", FAMILIES)
def test_turns_given_at_a_load_come_before_those_of_the_file(name, tmp_path):
    model = make(name)
    model.generation_config.turns = 7
    model.save_pretrained(tmp_path)
    for cls in (type(model), AutoModelForCausalLM):
        loaded = cls.from_pretrained(tmp_path, turns=5)
        assert turns_of(loaded) == 5
        in_config(loaded, 6)  # and hold no later change up
        assert turns_of(loaded) == 6
    same = type(model).from_pretrained(tmp_path, turns=own(model))
    assert turns_of(same) == own(model)
    given = GenerationConfig(turns=3)
    assert turns_of(type(model).from_pretrained(tmp_path, generation_config=given)) == 3


def test_settings_of_the_model_do_not_become_those_of_generation():
    """transformers puts all arguments of a load into the generation configuration."""
    model = ouro_models.OuroForCausalLM.from_pretrained(
        ouro_models.checkpoint(), gate="ignored", turns=6
    )
    held = vars(model.generation_config)
    assert "gate" not in held
    assert "turns" not in held
    assert turns_of(model) == 6


# -- where the depth is to count outside of `generate` too


@pytest.mark.parametrize("name", FAMILIES)
def test_a_depth_is_adopted_by_the_configuration(name):
    model = make(name)
    model.generation_config.turns, model.generation_config.tol = 7, 0.25
    model.generation_config.tol_per = "token"
    adopt_depth(model)
    assert (model.config.turns, model.config.tol) == (7, 0.25)
    assert {"turns", "tol"}.isdisjoint(vars(model.generation_config))
    assert model.generation_config.tol_per == "token"  # which a configuration has not
    model.generation_config.turns = 5
    adopt_depth(model, turns=2)
    assert model.config.turns == 2
    model.generation_config.turns = 0
    with pytest.raises(ValueError, match="expected an integer >= 1, got 0"):
        adopt_depth(model)
    assert model.config.turns == 2


def test_an_adopted_exit_counts_as_in_generate():
    model = ouro_models.model()
    model.config.exit_at_step = 1
    model.generation_config.exit_threshold = 0.5
    adopt_depth(model)
    assert (model.config.exit_at_step, model.config.exit_threshold) == (None, 0.5)
    model.generation_config.exit_at_step = 0
    adopt_depth(model)
    assert (model.config.exit_at_step, model.config.turns) == (0, 4)
    model.generation_config.turns = 3
    adopt_depth(model)
    assert (model.config.exit_at_step, model.config.turns) == (None, 3)


# -- assistants


@pytest.mark.parametrize("name", FAMILIES)
def test_an_assistant_thinks_as_deep_as_it_says_itself(name):
    model, draft = make(name), make(name)
    draft.generation_config.turns = 1
    alone = greedy(model, ids(), turns=5)
    with turns_taken(model) as main, turns_taken(draft) as drafted:
        helped = greedy(model, ids(), turns=5, assistant_model=draft)
    assert torch.equal(helped, alone)
    assert (set(main), set(drafted)) == ({5}, {1})


@pytest.mark.parametrize("name", FAMILIES)
def test_an_early_exit_drafts_at_fewer_turns(name):
    model = make(name)
    alone = greedy(model, ids(), turns=4)
    with turns_taken(model) as taken:
        helped = greedy(model, ids(), turns=4, assistant_early_exit=1)
    assert torch.equal(helped, alone)
    assert set(taken) == {1, 4}
    assert turns_of(model) == own(model)
    with pytest.raises(ValueError, match="turns: expected an integer >= 1, got -1"):
        greedy(model, ids(), assistant_early_exit=-1)
