import copy
import math
from dataclasses import replace

import pytest
from studies_tiny import TINY

from stars_fast.base.errors import ConfigError
from stars_fast.training.config import load_config
from studies.__main__ import listing
from studies.definition import (
    SCALES,
    parse_study,
    read_study,
    study_names,
    study_runs,
)

RUNS = {
    "norms": 12,
    "prelude-coda": 8,
    "depth-laws": 28,
    "l2": 8,
    "lambda": 6,
    "methods": 4,
    "ouro": 4,
    "ouro-ablation": 6,
    "rivals": 94,
    "rivals-text": 11,
    "parity": 9,
    "four-digits": 6,
}
QUICK_ALONE = {"rivals-text", "parity", "four-digits"}
COMPARED = {
    "rivals": ({"decay_steps": 0}, {"backprop_turns": None}),
    "rivals-text": ({}, {"backprop_turns": None}),
    "parity": ({}, {"backprop_turns": None}),
    "four-digits": ({}, {"backprop_turns": None}),
}
"""Fields of `optim` and `train` that are among what a study compares."""


def runs_of(name, scale="paper", **options):
    return study_runs(read_study(name), scale, "runs/study", **options)


def test_the_studies_of_the_paper_are_there():
    assert study_names() == sorted(RUNS)


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        (name, scale)
        for name in RUNS
        for scale in SCALES
        if scale == "quick" or name not in QUICK_ALONE
    ],
)
def test_every_run_is_a_configuration_of_its_own(name, scale):
    runs = runs_of(name, scale, seeds=[0, 1])
    assert len(runs) == 2 * RUNS[name]
    assert len({run.folder for run in runs}) == len(runs)
    assert [run.config.seed for run in runs] == [0] * RUNS[name] + [1] * RUNS[name]
    assert all(run.config.eval.turns for run in runs)


@pytest.mark.parametrize("name", RUNS)
def test_the_runs_of_a_study_differ_in_what_it_compares_only(name):
    """Same steps, learning rate and data for all at either scale, but for `COMPARED`."""
    of_optim, of_train = COMPARED.get(name, ({}, {}))
    for scale in read_study(name).scales:
        runs = runs_of(name, scale)
        optims = [replace(run.config.optim, **of_optim) for run in runs]
        trains = [replace(run.config.train, **of_train) for run in runs]
        assert all(optim == optims[0] for optim in optims)
        assert all(train == trains[0] for train in trains)
        assert all(run.config.data == runs[0].config.data for run in runs)


@pytest.mark.parametrize("name", sorted(QUICK_ALONE))
def test_a_study_may_have_one_scale(name):
    with pytest.raises(ConfigError, match=f"study {name}: scale: expected one of quick, got paper"):
        runs_of(name, "paper")
    assert "not at scale paper" in listing([name], "paper")


def test_the_recipe_of_the_readme_is_a_run_of_the_rivals():
    recipe = load_config("addition-quick")
    (run,) = (
        run
        for run in runs_of("rivals", "quick")
        if run.label == "one-step, last, noise start, decay"
    )
    for name in ("method", "model", "data", "depth", "optim", "loop"):
        assert getattr(run.config, name) == getattr(recipe, name)
    for name in ("steps", "batch_size", "backprop_turns"):
        assert getattr(run.config.train, name) == getattr(recipe.train, name)


def law(config):
    depth = config.depth
    numbers = {
        "lognormal": (depth.mu, depth.sigma),
        "poisson": (depth.rate,),
        "uniform": (),
        "fixed": (depth.value,),
    }[depth.law]
    return (depth.law, *numbers) + (() if depth.law == "fixed" else (depth.low, depth.high))


def test_the_depth_laws_are_those_of_the_papers_tables():
    found = {}
    for run in runs_of("depth-laws"):
        found.setdefault(run.config.model.placement, set()).add(law(run.config))
    shared = {
        ("fixed", 4),
        ("lognormal", 2.62, 0.6, 1, 40),
        ("poisson", 5.0, 1, 30),
        ("poisson", 10.0, 1, 30),
        ("uniform", 1, 10),
    }
    sandwich = shared | {("lognormal", 2.0, 0.7, 1, 100), ("uniform", 1, 40)}
    plain = shared | {("lognormal", 3.2, 0.45, 1, 80), ("uniform", 1, 30)}
    assert found == {
        "pre-sandwich": sandwich,
        "post-sandwich": sandwich,
        "pre": plain,
        "post": plain,
    }


def test_the_quick_depth_laws_are_the_papers_at_half_their_turns():
    quick = {law(run.config) for run in runs_of("depth-laws", "quick")} - {("fixed", 4)}
    halves = set()
    for run in runs_of("depth-laws"):
        kind, *numbers = law(run.config)
        if kind == "fixed":
            continue
        *numbers, low, high = numbers
        if kind == "lognormal":
            numbers[0] = round(numbers[0] - math.log(2), 2)
        if kind == "poisson":
            numbers[0] /= 2
        halves.add((kind, *numbers, low, high // 2))
    assert quick == halves


def test_the_norm_study_is_every_placement_with_every_operator():
    runs = runs_of("norms")
    models = [run.config.model for run in runs]
    assert {(model.placement, model.norm) for model in models} == {
        (placement, norm)
        for placement in ("pre", "post", "pre-sandwich", "post-sandwich")
        for norm in ("layernorm", "rmsnorm", "simplenorm")
    }
    assert {(m.d_model, m.n_heads, m.d_ff, m.n_layers) for m in models} == {(512, 8, 1024, 1)}
    assert {(run.config.method, law(run.config)) for run in runs} == {("sft", ("fixed", 4))}
    data = runs[0].config.data
    assert (data.digits, data.train_samples) == (4, 100_000)
    assert runs[0].config.optim.lr == 1e-4


def test_prelude_and_coda_on_both_sandwiches():
    models = [run.config.model for run in runs_of("prelude-coda")]
    assert {(m.placement, m.n_prelude, m.n_coda) for m in models} == {
        (placement, prelude, coda)
        for placement in ("pre-sandwich", "post-sandwich")
        for prelude in (0, 1)
        for coda in (0, 1)
    }
    assert {model.norm for model in models} == {"layernorm"}


def test_lambdas_and_methods_are_the_papers():
    weights = [run.config.penalty.weight for run in runs_of("lambda")]
    assert {0.1, 0.15, 0.2} < set(weights)
    for study, turns in (("methods", (2.0, 0.7, 1, 100)), ("ouro", (1.7, 0.4, 1, 16))):
        runs = runs_of(study)
        assert [run.config.method for run in runs] == ["sft", "random-loop", "jsrr", "stars"]
        assert {run.config.penalty.weight for run in runs} == {0.1}
        assert [law(run.config) for run in runs] == [
            ("fixed", 4), ("lognormal", *turns), ("fixed", 4), ("lognormal", *turns),
        ]  # fmt: skip
    ouro = runs[0].config
    assert (ouro.model.path, ouro.data.source) == ("ByteDance/Ouro-1.4B", "AI-MO/NuminaMath-1.5")
    assert (ouro.data.samples, ouro.optim.lr, ouro.train.epochs) == (400_000, 1e-6, 1)
    assert ouro.optim.schedule == "cosine"


def test_l2_without_is_the_same_run_without_a_penalty():
    runs = runs_of("l2")
    assert [run.config.penalised and run.config.method for run in runs] == [False, "l2"] * 4
    assert [run.config.depth.law for run in runs] == [
        "fixed",
        "fixed",
        "lognormal",
        "lognormal",
    ] * 2


def test_overrides_hold_for_all_runs():
    runs = study_runs(parse_study("tiny", TINY), "quick", "x", words=["--train.steps", "200"])
    assert {run.config.train.steps for run in runs} == {200}
    assert [run.label for run in runs] == [
        "pre, LayerNorm", "pre, RMSNorm", "post, LayerNorm", "post, RMSNorm",
    ]  # fmt: skip
    assert runs[1].overrides == {"model.placement": "pre", "model.norm": "rmsnorm"}
    assert str(runs[1].folder) == "x/pre-rmsnorm-0"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--placement", "pre"], "model.placement is what the runs of the study tiny differ in"),
        (["--seed", "3"], "--seed is set by the study; see --seeds"),
        (["--stpes", "3"], "did you mean steps"),
        (
            ["--depth.low", "3"],
            r"tiny, pre, LayerNorm: depth: value: expected from low",
        ),
    ],
)
def test_overrides_that_cannot_be(words, message):
    with pytest.raises(ConfigError, match=message):
        study_runs(parse_study("tiny", TINY), "quick", "x", words=words)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("asks"), "asks is missing"),
        (lambda m: m.update(pannels="norm"), "unknown field pannels; did you mean panels"),
        (lambda m: m.update(panels="law"), "panels: expected a factor of all runs, got law"),
        (lambda m: m.update(findings=["finding 9"]), "findings: expected names of"),
        (lambda m: m.pop("runs"), "runs is missing at scale quick"),
        (lambda m: m["scales"].update(huge={}), "scales: expected names of"),
        (
            lambda m: m.update(reference="post"),
            "reference: expected the label of a run, got 'post'",
        ),
        (lambda m: m.update(judged={"deep": 3}), "unknown field deep; did you mean deepest"),
        (lambda m: m["runs"].append(m["runs"][0]), "two runs have one label"),
    ],
)
def test_definitions_that_cannot_be(change, message):
    mapping = copy.deepcopy(TINY)
    change(mapping)
    with pytest.raises(ConfigError, match=message):
        parse_study("tiny", mapping)
