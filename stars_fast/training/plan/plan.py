"""The plan of a run on given GPUs: time, memory, and what limits it, before anything is made.

recipe -> shape, rows -> passes.py: work, on a card at its rates -> seconds ---+
                      -> memory.py: bytes -> choose() -> what is recomputed ---+-> Plan
"""

from __future__ import annotations

from copy import copy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from stars_fast.base.errors import ConfigError
from stars_fast.models.families import family_named
from stars_fast.training.plan import memory
from stars_fast.training.plan.cards import Gpus
from stars_fast.training.plan.launches import captured_part, row_for_the_gpu, why_no_graphs
from stars_fast.training.plan.otherwise import Changes, otherwise
from stars_fast.training.plan.passes import Machine
from stars_fast.training.plan.rates import rates
from stars_fast.training.plan.rows import DOCUMENT, rows_of
from stars_fast.training.plan.steps import (
    Run,
    Way,
    choice_of,
    has_published,
    published_way,
    way,
)
from stars_fast.training.plan.trained import trained_of
from stars_fast.training.scale.distributed import World
from stars_fast.training.step.loop_config import LoopChange
from stars_fast.training.step.methods import penalty_of


@dataclass(frozen=True)
class Fit:
    """Memory of a GPU in bytes.

    total: what PyTorch sees. held: weights, gradients, averages, what is gathered, and CUDA's own.
    activations: at the peak of the deepest step. budget: for them. usual, deepest: what is
    recomputed at the usual and at the largest number of turns. fits: whether it does.
    """

    total: float
    held: float
    activations: float
    budget: float
    usual: str
    deepest: str
    fits: bool


@dataclass(frozen=True)
class Plan:
    """A run before it runs.

    run, gpus, model, method: their names. parameters, trained: of the model, and those that the
    optimiser moves. turns, most_turns: mean and largest number. rows, accumulation: of a step, and
    micro-batches of it on a GPU. tokens_a_row, documents_a_row: without pads. steps, tokens: of the
    run; None where the recipe does not say. ours, sft, published: the ways to run it: as the recipe
    says, SFT at `train.reference_turns`, and the published way, where there is one. fitting:
    options by each of which it would fit, where it does not. captured: part of the micro-batches
    that are CUDA graphs. no_graphs: why none is. row_length: of packed rows, from which on the GPU
    would not wait for the host, where it does; None where there is none. adapted: whether the
    host's time is that of layers with adapters, which is by their count of ops alone.
    """

    run: str
    gpus: str
    model: str
    parameters: int
    trained: int
    method: str
    turns: float
    most_turns: int
    rows: int
    accumulation: int
    tokens_a_row: float
    documents_a_row: float
    steps: int | None
    tokens: float | None
    ours: Way
    sft: Way
    published: Way | None
    memory: Fit
    fitting: list[str]
    captured: float
    no_graphs: str | None
    row_length: int | None
    adapted: bool

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


def plan(config: Any, gpus: Gpus, document: int = DOCUMENT) -> Plan:
    """The plan of a run of `config` on `gpus`, documents of `document` tokens where the recipe does
    not say how long they are.

    Raises:
        ConfigError: the model's sizes can't be told, or the batch can't be divided so.
    """
    run = _read(config, gpus, document)
    steps = _steps(run)
    config = run.config
    run = run._replace(captured=captured_part(config, steps))
    chances = config.depth.chances(config.train.steps or 10**9)
    most = max(turns for turns, _ in chances)
    reference = config.train.reference_turns
    # One number of turns, captured if any
    alike = run._replace(config=_as_sft(config), captured=float(run.captured > 0))
    sft = way(alike, [(reference, 1.0)], steps, penalised=False)
    ours = way(run, chances, steps, config.penalised)
    published = published_way(run, chances, steps, config.penalised) if has_published(run) else None
    if config.penalised and steps is not None and config.penalty.start_step:
        before = min(config.penalty.start_step / steps, 1.0)  # the part of the run without it
        ours = _shorter(ours, way(run, chances, steps, False), before)
        if published is not None:
            published = _shorter(published, published_way(run, chances, steps, False), before)
    fit = _fit(run, chances)
    shape = run.shape
    rows = config.train.batch_size
    return Plan(
        run=config.name,
        gpus=f"{gpus.number}x{gpus.card.name}",
        model=family_named(config.model.family).describe(config.model),
        parameters=shape.parameters,
        trained=trained_of(config).parameters(shape),
        method=config.method,
        turns=sum(turns * chance for turns, chance in chances),
        most_turns=most,
        rows=rows,
        accumulation=config.train.accumulation,
        tokens_a_row=run.rows.tokens,
        documents_a_row=len(run.rows.lengths),
        steps=steps,
        tokens=None if steps is None else steps * rows * run.rows.tokens,
        ours=ours,
        sft=sft,
        published=published,
        memory=fit,
        fitting=[] if fit.fits else _what_fits(config, gpus, document, chances),
        captured=run.captured,
        no_graphs=why_no_graphs(config),
        row_length=_longer_rows(config, gpus, document) if ours.limit == "host" else None,
        adapted=config.lora.wanted,
    )


def _as_sft(config: Any) -> Any:
    """The run with the turns of SFT: the gradient through all of them, and nothing after them."""
    found = copy(config)  # `replace` would have one-step take its gradient of one turn
    found.train = replace(config.train, backprop_turns=None)
    found.loop = LoopChange()
    return found


def _longer_rows(config: Any, gpus: Gpus, document: int) -> int | None:
    """The length of packed rows from which on the run does not wait for the host."""

    def waits(changed: Any) -> bool:
        run = _read(changed, gpus, document)
        run = run._replace(captured=captured_part(changed, None))
        chances = changed.depth.chances(changed.train.steps or 10**9)
        return way(run, chances, None, changed.penalised).parts["host"] > 0

    return row_for_the_gpu(config, waits)


def _shorter(whole: Way, without: Way, before: float) -> Way:
    """A way whose run begins, for a part `before` of it, `without` the penalty."""
    assert whole.hours is not None
    assert without.hours is not None
    return replace(whole, hours=before * without.hours + (1 - before) * whole.hours)


def _read(config: Any, gpus: Gpus, document: int) -> Run:
    """The run as the trainer would read it, with the same refusals."""
    try:
        train = config.train.on(gpus.number)
    except ValueError as error:
        raise ConfigError(f"train: {error}") from error
    try:
        config.penalty.micro_batches(train.accumulation)
    except ValueError as error:
        raise ConfigError(f"penalty: {error}") from error
    if config.parallel.kind == "hsdp":
        local = min(gpus.number, memory.MACHINE)
        config.parallel.copies(World(0, gpus.number, torch.device("cpu"), local_size=local))
    config = replace(config, train=train)
    shape = family_named(config.model.family).shape(config.model)
    machine = Machine(gpus.card, rates(), config.precision != "float32")
    rows = rows_of(config.data, document)
    micro = train.batch_size // (gpus.number * train.accumulation)
    drawn = penalty_of(config).as_drawn(len(rows.lengths) * micro)
    return Run(replace(config, penalty=drawn), shape, rows, gpus, machine, micro)


def _steps(run: Run) -> int | None:
    train = run.config.train
    if train.steps is None and run.rows.units is None:
        return None
    return train.over(run.rows.units).total_steps


def _fit(run: Run, chances: list[tuple[int, float]]) -> Fit:
    config, penalised = run.config, run.config.penalised
    usual = round(sum(turns * chance for turns, chance in chances))
    most = max(turns for turns, _ in chances)
    deepest = choice_of(run, most, penalised)
    assert deepest.budget is not None
    held = memory.held(run.shape, config, run.gpus.number) + memory.CONTEXT + memory.LOGITS
    return Fit(
        total=run.gpus.card.memory,
        held=held,
        activations=deepest.peak,
        budget=deepest.budget,
        usual=choice_of(run, usual, penalised).recompute.describe(),
        deepest=deepest.recompute.describe(),
        fits=deepest.fits and held < run.gpus.card.memory,
    )


def _what_fits(
    config: Any, gpus: Gpus, document: int, chances: list[tuple[int, float]]
) -> list[str]:
    """Changes by which it fits, each by itself, the mildest first."""
    tries: list[tuple[str, Changes]] = []
    micro = config.train.batch_size // (gpus.number * config.train.accumulation)
    while micro > 1:
        micro = micro // 2 if micro % 2 == 0 else 1  # what divides the batch too
        words = f"--train.micro_batch_size {micro}"
        tries.append((words, {"train": {"micro_batch_size": micro, "accumulation": 1}}))
    if not config.lora.wanted:
        if family_named(config.model.family).shards:
            parallel: dict[str, Any] = {}
            words = ""
            for name, value in (("kind", "fsdp"), ("reshard", True), ("offload", True)):
                parallel = {**parallel, name: value}
                words += f" --parallel.{name} {str(value).lower()}"
                tries.append((words.strip(), {"parallel": parallel}))
        tries.append(("--lora.rank 16", {"lora": {"rank": 16}}))
    found = []
    for words, changes in tries:
        changed = otherwise(config, changes)
        if changed is not None and _fit(_read(changed, gpus, document), chances).fits:
            found.append(words)
    return found
