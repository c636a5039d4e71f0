from dataclasses import replace

import pytest

from stars_fast.base import tree
from stars_fast.base.errors import ConfigError
from stars_fast.data.addition import AdditionData
from stars_fast.data.kinds import kinds
from stars_fast.models.families import families
from stars_fast.training.config import (
    config_class,
    config_from,
    load_config,
    parse_overrides,
    resolve,
    save_config,
)
from stars_fast.training.recipes import recipe_names

RECIPE = """\
description: a recipe
method: stars
model: {d_model: 32, n_heads: 2}
data: {digits: 2, train_samples: 50, test_samples: 10}
optim: {lr: 1e-4}
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    return path


def test_a_recipe_with_overrides(recipe):
    words = ["--steps", "7", "--penalty.weight=0.05", "--batch-size", "8", "--depth.mu", "-1"]
    config = load_config(str(recipe), words)
    assert (config.train.steps, config.penalty.weight, config.train.batch_size) == (7, 0.05, 8)
    assert config.depth.mu == -1.0
    assert config.optim.lr == 1e-4
    assert config.name == "mine"
    assert config.out == "runs/mine"


def test_vocabulary_and_length_follow_from_the_data(recipe):
    config = load_config(str(recipe))
    assert (config.model.vocab_size, config.model.max_length) == (14, 9)
    assert AdditionData(config.data).max_length == 9
    assert load_config(str(recipe), ["--model.max_length", "20"]).model.max_length == 20
    with pytest.raises(ConfigError, match=r"max_length: expected at least 9 for the data, got 8"):
        load_config(str(recipe), ["--model.max_length", "8"])


def test_the_saved_configuration_is_a_recipe(recipe, tmp_path):
    config = load_config(str(recipe), ["--seed", "5", "--backprop_turns", "3"])
    save_config(config, tmp_path / "config.yaml")
    assert load_config(str(tmp_path / "config.yaml")) == config
    assert load_config(str(tmp_path)) == replace(config, out=str(tmp_path))


def test_a_base_is_inherited_and_named_beside_the_file(recipe, tmp_path, monkeypatch):
    child = tmp_path / "child.yaml"
    child.write_text("base: mine.yaml\nmethod: random-loop\noptim: {clip: none}\n")
    monkeypatch.chdir("/")
    config = load_config(str(child))
    assert (config.method, config.optim.lr, config.optim.clip) == ("random-loop", 1e-4, None)
    assert config.name == "child"


@pytest.mark.parametrize("word", ["off", "on", "auto"])
def test_a_recipe_may_say_on_off_and_null(recipe, tmp_path, word):
    text = recipe.read_text() + f"train: {{graphs: {word}, report_to: null}}\n"
    recipe.write_text(text + "eval: {turns: null}\n")
    config = load_config(str(recipe))
    assert (config.train.graphs, config.train.report_to, config.eval.turns) == (word, (), ())
    save_config(config, tmp_path / "config.yaml")
    assert load_config(str(tmp_path / "config.yaml")) == config


def test_a_circle_of_bases_is_an_error(tmp_path):
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(ConfigError, match="its own base"):
        load_config(str(tmp_path / "a.yaml"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--penalty.wieght", "1"], r"unknown field penalty\.wieght; did you mean penalty\.weight"),
        (["--stpes", "1"], r"unknown field stpes; did you mean steps"),
        (["--steps"], r"--steps needs a value"),
        (["--steps", "--lr", "1"], r"--steps needs a value"),
        (["steps", "3"], r"expected --field value, got 'steps'"),
        (["--steps", "many"], r"train\.steps: expected int, got 'many'"),
        (["--steps", "0"], r"train: steps: expected at least 1 or none, got 0"),
        (["--method", "sgd"], r"method: expected one of sft, .* got 'sgd'"),
        (["--method", "sft"], r"method sft trains at a fixed number of turns but depth\.law is"),
        (["--depth.law", "fixed"], r"method stars draws the number of turns"),
        (["--penalty.weight", "1.5"], r"penalty: weight: expected >= 0, and <= 1"),
        (["--n_heads", "5"], r"model: n_heads must divide d_model"),
    ],
)
def test_mistakes_name_the_field(recipe, words, message):
    with pytest.raises(ConfigError, match=message):
        load_config(str(recipe), words)


@pytest.mark.parametrize(
    ("recipe", "words", "expected"),
    [
        ("train: {steps: 30}", "--train.epochs 2", (None, 2.0)),
        ("train: {epochs: 2}", "--train.steps 30", (30, None)),
        ("train: {steps: 30}", "--train.epochs none", (30, None)),
        ("train: {steps: 30}", "--train.epochs None", (30, None)),
        ("train: {epochs: 2}", "--train.steps NULL --epochs 3", (None, 3.0)),
        ("train: {epochs: 2}", "--epochs 3 --steps none", (None, 3.0)),
        ("train: {steps: 30, epochs: null}", "--seed 1", (30, None)),
        ("base: base.yaml", "", (None, 4.0)),
        ("base: base.yaml\ntrain: {steps: 5}", "", (5, None)),
        ("base: base.yaml\ntrain: {steps: 5}", "--epochs 1", (None, 1.0)),
    ],
)
def test_the_last_word_on_steps_and_epochs_holds(tmp_path, recipe, words, expected):
    (tmp_path / "base.yaml").write_text("method: stars\ntrain: {epochs: 4}\n")
    path = tmp_path / "mine.yaml"
    path.write_text(recipe if "base" in recipe else f"method: stars\n{recipe}\n")
    train = load_config(str(path), words.split()).train
    assert (train.steps, train.epochs) == expected


def test_the_last_word_on_other_pairs_holds(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("method: stars\ntrain: {batch_size: 8, micro_batch_size: 2}\n")
    train = load_config(str(path), ["--accumulation", "1"]).train
    assert (train.micro_batch_size, train.on(1).accumulation) == (None, 1)
    assert load_config(str(path)).train.on(1).accumulation == 4
    path.write_text("method: stars\ntrain: {batch_size: 8, accumulation: 2}\n")
    assert load_config(str(path), ["--micro_batch_size", "2"]).train.on(1).accumulation == 4

    chats = "task: ouro\nmethod: stars\ndata: {source: tiny-chat, %s}\n"
    path.write_text(chats % "prompt: q, answer: a")
    data = load_config(str(path), ["--data.messages", "talk"]).data
    assert (data.messages, data.prompt, data.answer) == ("talk", None, None)
    path.write_text(chats % "messages: talk")
    data = load_config(str(path), ["--data.prompt", "q", "--data.answer", "a"]).data
    assert (data.messages, data.prompt, data.answer) == (None, "q", "a")
    with pytest.raises(ConfigError, match="prompt and answer must come together"):
        load_config(str(path), ["--data.prompt", "q"])


def test_a_task_on_the_command_line_is_not_the_recipes(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("method: stars\nmodel: {family: huginn, path: tiny}\ndata: {kind: sums}\n")
    config = load_config(str(path), ["--task", "ouro", "--data.source", "tiny-chat"])
    assert (config.model.family, config.data.kind) == ("ouro", "chats")
    words = ["--task", "ouro", "--family", "huginn", "--data.kind", "sums"]
    with pytest.raises(
        ConfigError, match=r"task: expected none beside model\.family and data\.kind"
    ):
        load_config(str(path), words)
    path.write_text("task: ouro\nmethod: stars\nmodel: {family: huginn}\ndata: {kind: sums}\n")
    with pytest.raises(ConfigError, match=r"task: expected none beside"):
        load_config(str(path))


def test_large_integers_of_a_recipe_are_exact(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: addition\nseed: 9007199254740993\n")
    assert load_config(str(tmp_path / "mine.yaml")).seed == 9007199254740993


def test_a_home_folder_is_no_folder_called_tilde(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config("addition", ["--out=~/run"]).out == str(tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--steps 3 --steps 3", r"train\.steps is given twice: --steps 3 and --steps 3"),
        ("--steps=3 --train.steps 4", r"given twice: --steps 3 and --train\.steps 4"),
        ("--reg-weight 0 --penalty.weight 1", r"penalty\.weight is given twice"),
        ("--family ouro --model.family huginn", r"model\.family is given twice"),
        ("--steps 3 --epochs 3", r"train: epochs: expected none beside steps, 3, got 3"),
    ],
)
def test_a_field_is_given_once(recipe, words, message):
    with pytest.raises(ConfigError, match=message):
        load_config(str(recipe), words.split())


def test_a_recipe_with_a_key_twice(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("method: stars\ntrain: {steps: 5}\nname: x\ntrain: {batch_size: 4}\n")
    with pytest.raises(ConfigError, match="train is there twice, in line 2 and in line 4"):
        load_config(str(path))
    config = tmp_path / "run" / "config.yaml"
    config.parent.mkdir()
    config.write_text("optim:\n  lr: 1\n  lr: 2\n")
    with pytest.raises(ConfigError, match=r"optim\.lr is there twice, in line 2 and in line 3"):
        load_config(str(config.parent))


def test_the_root_wins_and_an_ambiguous_name_lists_its_meanings():
    assert parse_overrides(["--seed", "1", "--data.seed", "2"], {}) == {
        "seed": "1",
        "data": {"seed": "2"},
    }
    with pytest.raises(ConfigError, match=r"--x is ambiguous: --a\.x or --b\.x"):
        resolve("x", ["a.x", "b.x", "b.y"])


def test_names_of_the_published_code_are_understood():
    words = ["--reg_weight", "0.2", "--random_loop_mu", "2"]
    assert parse_overrides(words, {}) == {
        "penalty": {"weight": "0.2"},
        "depth": {"mu": "2"},
    }


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "just words"])
def test_a_file_that_is_no_recipe(tmp_path, text):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        load_config(str(tmp_path / "bad.yaml"))


def test_a_recipe_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="no recipe, YAML file or run folder named 'nothing'"):
        load_config("nothing")
    with pytest.raises(ConfigError, match="cannot read the recipe"):
        load_config(str(tmp_path / "no.yaml"))


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("family", families())
def test_every_field_says_what_it_means(family, kind):
    fields = tree.leaves(config_class(family, kind))
    assert [path for path, leaf in fields.items() if not leaf.help] == []


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_of_the_package_is_valid(name):
    config = load_config(name)
    assert config.description
    assert config_from(tree.to_dict(config)) == config
