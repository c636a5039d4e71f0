"""Plans of recipes: what they take, what limits them, what fits; and steps that were timed on a
CPU."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.step_cases import STEP_CASES
from benchmarks.workload import FIXED_TURNS, LAW, MICROS, MODEL_SIZES, packed_batches
from stars_fast.base.errors import ConfigError
from stars_fast.models.depth import DepthLaw
from stars_fast.models.shape import shape_of_config
from stars_fast.training.config import config_from, load_config
from stars_fast.training.plan.cards import Card, Gpus, cards, parse_gpus
from stars_fast.training.plan.passes import Machine, Seconds
from stars_fast.training.plan.plan import plan
from stars_fast.training.plan.rates import PRODUCTS, Rates, rates
from stars_fast.training.plan.rows import Rows
from stars_fast.training.plan.steps import Run, micro_batch
from stars_fast.training.plan.table import CARDS, memory_table

ROOT = Path(__file__).parents[3]
TIMED = json.loads(
    (ROOT / "benchmarks" / "results" / "2026-11-28-cpu-bench-step-small.json").read_text()
)["shapes"][0]["methods"]
OURS = [name for name, case in STEP_CASES.items() if not case.published]


def planned(recipe, gpus, *words):
    return plan(load_config(recipe, words), parse_gpus(gpus))


# -- against steps on a CPU


def cpu(speed):
    """A machine whose time is that of its products alone."""
    card = Card("CPU", speed, speed, 1e30, 1e12, 1e30, 1e30)
    ones = dict.fromkeys(rates().rows, 1.0)
    same, none = dict.fromkeys(PRODUCTS, 1.0), dict.fromkeys(PRODUCTS, 0.0)
    host = dict.fromkeys(rates().host, 0.0)
    return Machine(card, Rates(1, 1, 1, 1, ones, same, none, 0, host, 0), low=False)


def step_seconds(name, speed):
    """A step of a case of `benchmarks step --shape small`, at the mean of its depth law."""
    case, (fields, longest) = STEP_CASES[name], MODEL_SIZES["small"]
    config = config_from(
        {
            "task": "ouro",
            "precision": "float32",
            "data": {"source": "random", "max_length": longest},
            "train": {"steps": 1000, "batch_size": MICROS, "accumulation": MICROS},
            "method": case.method,
            "depth": LAW if case.random_depth else {"law": "fixed", "value": FIXED_TURNS},
            "penalty": case.penalty,
        }
    )
    shape = shape_of_config(fields, layers=fields["num_hidden_layers"], outside=0)
    batches = packed_batches(longest, fields["vocab_size"], torch.device("cpu"))
    law = DepthLaw(**LAW).chances(0) if case.random_depth else [(FIXED_TURNS, 1.0)]
    total, steps = Seconds(), 3
    for step in range(steps):
        for batch in batches.window(step):
            lengths = [float(n) for n in batch.samples.lengths]
            rows = Rows(lengths, None, len(batch.labels) / sum(lengths), True)
            machine = cpu(speed)
            run = Run(config, shape, rows, Gpus(1, machine.card), machine, 1)
            for turns, chance in law:
                total += micro_batch(run, turns, config.penalised)[0] * chance
    return total.gpu / steps


@pytest.fixture(scope="module")
def speed():
    """FLOP/s of the machine that ran them, by its SFT at 4 turns."""
    return step_seconds("sft", 1.0) / TIMED["sft"]["seconds"]


@pytest.mark.parametrize("name", [name for name in OURS if name != "sft"])
def test_steps_on_a_cpu_are_predicted(name, speed):
    """One row makes the machine's speed, the other thirteen are predicted."""
    assert step_seconds(name, speed) == pytest.approx(TIMED[name]["seconds_at_mean"], rel=0.08)


@pytest.mark.parametrize("words", ["--train.backprop_turns 1", "--loop.progressive 0.5"])
def test_sft_has_its_own_turns_whatever_the_run_does_with_them(words):
    usual = planned("ouro-numina-fast", "4xA800-80GB")
    changed = planned("ouro-numina-fast", "4xA800-80GB", *words.split())
    assert changed.ours.seconds != usual.ours.seconds
    assert changed.sft == usual.sft


# -- what limits a run


def test_short_micro_batches_wait_for_the_host():
    short = planned("ouro-numina", "4xH200").ours
    assert short.limit == "host"
    assert short.parts["host"] > 0.3 * short.seconds
    long = planned("ouro-numina-fast", "4xA100-80GB", "--data.row_length", "8192").ours
    assert long.limit == "tensor cores"
    assert long.parts["host"] == 0
    assert long.mfu > 2 * short.mfu


def test_slow_links_and_little_memory_limit_too():
    words = ["--data.max_length", "1024", "--parallel.kind", "fsdp", "--parallel.reshard", "true"]
    slow = planned("ouro-numina-fast", "8xRTX-4090", "--train.batch_size", "32", *words)
    assert slow.ours.parts["network"] > 0.1 * slow.ours.seconds
    assert planned("ouro-numina-fast", "1xH200").ours.parts["network"] == 0
    tight = planned("ouro-numina-fast", "4xA100-40GB", "--data.row_length", "4096")
    assert tight.memory.fits
    assert tight.ours.parts["recompute"] > 0.03 * tight.ours.seconds
    assert "recomputes" in tight.memory.usual


def test_what_does_not_fit_is_told_what_would():
    found = planned("ouro-numina-fast", "4xRTX-4090")
    assert not found.memory.fits
    assert "--lora.rank 16" in found.fitting
    assert "--parallel.kind fsdp --parallel.reshard true" in found.fitting
    for words in found.fitting:
        assert planned("ouro-numina-fast", "4xRTX-4090", *words.split()).memory.fits, words
    assert planned("ouro-numina-lora", "1xRTX-4090").memory.fits


FSDP, RESHARD = "--parallel.kind fsdp", "--parallel.reshard true"
OFFLOAD = f"{RESHARD} --parallel.offload true"


@pytest.mark.parametrize(
    ("gpus", "words", "fits"),
    [
        ("4x", "--train.freeze embed_tokens", [FSDP, f"{FSDP} {RESHARD}", f"{FSDP} {OFFLOAD}"]),
        ("4x", "--train.compile true", ["--lora.rank 16"]),
        ("2x", "--parallel.kind hsdp --parallel.shard 2", ["--lora.rank 16"]),
        ("4x", "--penalty.draw samples --batch_size 96 --micro_batch_size 3", ["--lora.rank 16"]),
        (
            "4x",
            "--lora.rank 16 --batch_size 96 --micro_batch_size 6",
            ["--train.micro_batch_size 3", "--train.micro_batch_size 1"],
        ),
    ],
)
def test_changes_that_the_recipe_excludes_are_not_tried(gpus, words, fits):
    found = planned("ouro-numina-fast", f"{gpus}RTX-4090", *words.split())
    assert not found.memory.fits
    assert found.fitting == fits


@pytest.mark.parametrize(
    ("gpus", "words", "message"),
    [
        ("4xH200", "--penalty.fraction 0.3", r"penalty: fraction: expected a whole number of"),
        ("4xH200", "--parallel.kind hsdp --parallel.shard 3", r"parallel.shard must divide"),
    ],
)
def test_what_the_trainer_refuses_is_not_planned(gpus, words, message):
    with pytest.raises(ConfigError, match=message):
        planned("ouro-numina-fast", gpus, *words.split())


def test_of_few_samples_one_is_drawn_at_least():
    """A micro-batch of `ouro-numina` is one document, so that a quarter of it is all of it."""
    whole, quarter = (
        planned("ouro-numina", "4xH200", "--penalty.fraction", each).ours for each in ("1", "0.25")
    )
    assert quarter == whole
    words = ["--micro_batch_size", "8", "--penalty.fraction"]
    whole, quarter = (planned("ouro-numina", "4xH200", *words, each).ours for each in ("1", "0.25"))
    assert quarter.parts["products"] < whole.parts["products"]
    assert quarter.parts["host"] > whole.parts["host"]  # it launches as much for less work


def test_more_costs_more():
    def hours(gpus, *words, recipe="ouro-numina-fast"):
        return planned(recipe, gpus, *words).ours.hours

    assert hours("4xH200") < hours("4xH100") < hours("4xA800-80GB") < hours("4xL40S")
    assert hours("8xA800-80GB") == pytest.approx(hours("4xA800-80GB") / 2, rel=0.1)
    exact = ["--penalty.fraction", "1", "--penalty.draw", "samples"]
    apart = ["--penalty.at", "next", "--penalty.detach", "true"]
    assert hours("4xH200") < hours("4xH200", *exact) < hours("4xH200", *exact, *apart)
    assert hours("4xH200", "--depth.mu", "2") > hours("4xH200")
    assert hours("4xH200", "--train.backprop_turns", "2") < hours("4xH200")
    assert hours("4xH200", "--precision", "float32") > 3 * hours("4xH200")


def test_ratios_are_near_those_by_count():
    """On long rows, where neither the host nor anything but the products matters much."""
    words = ["--data.row_length", "16384", "--train.batch_size", "4"]
    exact = ["--penalty.at", "next", "--penalty.detach", "true", "--penalty.fraction", "1"]
    words += [*exact, "--penalty.draw", "samples"]
    found = planned("ouro-numina-fast", "1xH200", *words)
    assert 1.7 < found.ours.seconds / found.sft.seconds < 2.3  # 1.98 by count
    assert found.published.seconds > 2 * found.ours.seconds


def test_length_of_the_run():
    packed = planned("ouro-numina-fast", "4xH200")
    apart = planned("ouro-numina", "4xH200")
    assert packed.tokens == pytest.approx(apart.tokens, rel=1e-3)
    assert packed.steps == pytest.approx(apart.steps * 128 * 600 / (32 * 1987), rel=1e-3)
    assert apart.steps == 400_000 / 128  # 512 more are held out
    assert planned("ouro-numina-fast", "4xH200", "--train.steps", "7").steps == 7
    unknown = planned("ouro-numina-fast", "4xH200", "--data.samples", "none")
    assert unknown.steps is None
    assert unknown.ours.hours is None
    assert planned("addition", "1xH200").tokens_a_row == 15
    assert planned("parity-quick", "1xH200").tokens_a_row == 11  # it is judged on longer ones
    epoch = ["--train.epochs", "1", "--data.train_samples", "1100", "--train.batch_size", "256"]
    assert planned("addition", "1xH200", *epoch).steps == 5  # as the trainer rounds


def test_a_penalty_that_begins_later_costs_less():
    always, half, never = (
        planned("addition", "1xH200", "--penalty.start_step", step).ours
        for step in ("0", "5000", "20000")
    )
    assert always.seconds == half.seconds
    assert half.hours == pytest.approx((always.hours + never.hours) / 2)
    assert never.hours < 0.95 * always.hours


def test_a_batch_that_does_not_divide():
    with pytest.raises(ConfigError, match="train: batch_size: expected a multiple of"):
        planned("ouro-numina-fast", "5xH200")


def test_parts_add_up():
    for recipe in ("ouro-numina-fast", "ouro-numina-sft", "addition-l2", "ouro-numina-lora"):
        found = planned(recipe, "1xH200", "--micro_batch_size", "2")
        assert sum(found.ours.parts.values()) == pytest.approx(found.ours.seconds)
        assert 0 < found.ours.mfu < 1


# -- the table of memory


def test_the_table_of_memory():
    rows = memory_table(load_config("ouro-numina-fast"))
    assert len(rows) == 3 * 3 * 4
    assert all(tuple(row.cards) == CARDS for row in rows)
    found = {(row.tokens, row.turns, row.run): row.cards for row in rows}
    assert found[2048, 4, "all weights"]["A800-80GB"].endswith("all kept")
    assert found[2048, 4, "all weights"]["RTX-4090"] == "no"
    assert found[2048, 4, "LoRA 16"]["RTX-4090"].endswith("all kept")
    for row in rows:
        for card, cell in row.cards.items():
            if cell != "no":
                assert float(cell.partition(":")[0]) * 2**30 < cards()[card].memory + 2**29


def test_the_table_is_of_any_recipe():
    plain = memory_table(load_config("ouro-numina-fast"))
    for words in (
        "--train.freeze embed_tokens",
        "--train.compile true",
        "--parallel.kind hsdp --parallel.shard 2",
        "--parallel.kind fsdp",
        "--lora.rank 4",
    ):
        assert memory_table(load_config("ouro-numina-fast", words.split())) == plain, words
    apart = memory_table(load_config("ouro-numina-fast", ["--penalty.draw", "samples"]))
    assert {row.run for row in apart} == {"all weights", "LoRA 16"}


def test_the_table_in_the_docs_is_the_one_that_is_printed():
    page = (ROOT / "docs" / "guides" / "plan.md").read_text()
    for row in memory_table(load_config("ouro-numina-fast")):
        assert "| " + " | ".join(row.cells()) + " |" in page


# -- graphs


def test_micro_batches_that_are_graphs_do_not_wait_for_the_host():
    off = planned("ouro-numina-fast", "4xH200")
    on = planned("ouro-numina-fast", "4xH200", "--train.graphs", "auto")
    assert (off.ours.limit, off.captured, off.no_graphs) == ("host", 0.0, "train.graphs is off")
    assert on.no_graphs is None
    assert 0.95 < on.captured < 1.0  # rare depths are not captured
    assert on.ours.limit == "tensor cores"
    assert on.ours.seconds < off.ours.seconds - 0.95 * off.ours.parts["host"]
    assert on.row_length is None


def test_where_there_are_no_graphs_longer_rows_make_the_gpu_the_limit():
    words = ["--parallel.kind", "fsdp", "--train.graphs", "auto"]
    found = planned("ouro-numina-fast", "4xH200", *words)
    assert found.no_graphs == "parallel.kind fsdp gathers weights anew"
    assert found.ours.limit == "host"
    rows = ["--data.row_length", str(found.row_length)]
    assert planned("ouro-numina-fast", "4xH200", *words, *rows).ours.parts["host"] == 0
    rows = ["--data.row_length", str(found.row_length - 1024)]
    assert planned("ouro-numina-fast", "4xH200", *words, *rows).ours.parts["host"] > 0
    ragged = planned("ouro-numina", "4xH200", "--train.graphs", "auto")
    assert ragged.no_graphs == "rows are of many lengths (data.packing true fills them)"
    assert ragged.row_length == 2049  # packed they are graphs
