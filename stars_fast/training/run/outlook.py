"""The outlook of a run before it starts: size, cost, and, where the machine is known, time."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from stars_fast.base.errors import ConfigError
from stars_fast.base.run_folder import RunFolder
from stars_fast.data.kinds import kind_named
from stars_fast.models.families import family_named, hub_not_asked
from stars_fast.models.shape import Shape
from stars_fast.training.config import RunConfig
from stars_fast.training.plan import memory
from stars_fast.training.plan.cards import Gpus, card_of_device
from stars_fast.training.plan.plan import plan
from stars_fast.training.plan.rows import DOCUMENT, rows_of
from stars_fast.training.plan.trained import trained_of
from stars_fast.training.run.folder import nothing_to_resume, reason_to_refuse
from stars_fast.training.run.progress import depth_words, duration, penalty_words, size_words
from stars_fast.training.scale.memory import gib
from stars_fast.training.step.cost import relative_cost


def outlook(config: RunConfig, resume: bool = False) -> str:
    """The run for people, without a model or data, and without a question to the hub.

    Raises:
        ConfigError: its folder, or so many processes, can't be used.
    """
    folder = RunFolder(str(config.out))
    if refusal := reason_to_refuse(folder, config, resume):
        raise ConfigError(refusal)
    try:
        train = config.train.on(_processes())
    except ValueError as error:
        raise ConfigError(f"train: {error}") from error
    family, kind = family_named(config.model.family), kind_named(config.data.kind)
    rows = rows_of(config.data, DOCUMENT)
    if train.steps is None and rows.units is not None:
        train = train.over(int(rows.units))
    config = replace(config, train=train)
    steps = f"those of {train.epochs:g} epochs" if train.steps is None else f"{train.steps:,}"
    continues = resume and nothing_to_resume(folder) is None
    lines = [
        f"{config.name}: {config.method}, {family.describe(config.model)} on {kind.name}",
        f"folder   {folder.path}: {'continues' if continues else 'new'}",
        f"steps    {steps} of {train.batch_size:,} {'packed rows' if rows.packed else 'samples'}, "
        f"{depth_words(config)}, {config.precision}",
        f"penalty  {penalty_words(config) or 'none'}",
    ]
    try:
        with hub_not_asked():
            lines += _by_shape(config, family.shape(config.model), rows.supervised)
    except ConfigError as error:
        lines.append(f"size     not known: {error}")
    lines.append("nothing was made or loaded")
    return "\n".join(lines)


def _processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _by_shape(config: RunConfig, shape: Shape, supervised: float) -> list[str]:
    """Lines that follow from the sizes of the model."""
    lines = [f"size     {size_words(shape.parameters)} parameters, {_trained(config, shape)}"]
    if config.train.steps is not None:
        cost = relative_cost(config, shape.outside_block(supervised))
        lines.append(f"cost     {cost:.2f} x SFT at {config.train.reference_turns} turns")
    has_gpu = torch.cuda.is_available() and config.train.device != "cpu"
    gpus = gpus_of(torch.device("cuda"), _processes()) if has_gpu else None
    if gpus is not None:
        return lines + [f"time     {line}" for line in foreseen(config, gpus, DOCUMENT)]
    held = memory.held(shape, config, 1)
    return [
        *lines,
        f"memory   {_bytes(held)} of weights, gradients and averages; what the turns keep is "
        "measured at the start",
        "time     not foreseen here: a run shows what is left of it from its first steps on. For a "
        "GPU: stars-fast plan",
    ]


def _bytes(size: int) -> str:
    return gib(size) if size >= 2**28 else f"{size / 2**20:.1f} MiB"


def _trained(config: RunConfig, shape: Shape) -> str:
    number = trained_of(config).parameters(shape)
    return "all trained" if number == shape.parameters else f"{size_words(number)} trained"


def gpus_of(device: torch.device, processes: int) -> Gpus | None:
    """The GPUs of a run on so many processes; None on a CPU, and for a card that is not known."""
    card = card_of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if card is None:
        return None
    size = torch.cuda.get_device_properties(device).total_memory
    return Gpus(processes, card._replace(memory=size))


def foreseen(config: RunConfig, gpus: Gpus, document: int) -> list[str]:
    """A line on the time and memory that a run will take by the cost model, and another where it
    does not fit; none where the model's sizes can't be told.

    Args:
        config: of the run.
        gpus: that it runs on.
        document: mean tokens of its documents.
    """
    try:
        found = plan(config, gpus, document)
    except ConfigError:
        return []
    hours = found.ours.hours
    whole = "" if hours is None else f", {duration(3600 * hours)} in all"
    taken = round(found.memory.held + found.memory.activations)
    lines = [
        f"foreseen on {found.gpus}, by rates measured on one H200: {found.ours.seconds:.3g} s a "
        f"step{whole}, limit {found.ours.limit}; {gib(taken)} of {gib(round(found.memory.total))}"
    ]
    if not found.memory.fits:
        would = "; ".join(found.fitting) or "none of fewer rows, FSDP, offload and LoRA"
        lines.append(f"warning: by the cost model it does not fit; would: {would}")
    return lines
