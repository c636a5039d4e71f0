"""Graphs for a run, where it can have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from stars_fast.base.errors import ConfigError
from stars_fast.data.batches import Batches
from stars_fast.data.fixed_shape import fixed_shape
from stars_fast.training.config import RunConfig
from stars_fast.training.graphs.graphs import Graphs
from stars_fast.training.graphs.kinds import chances, worth_capturing
from stars_fast.training.graphs.reasons import reason_against, reason_on
from stars_fast.training.graphs.recorder import recorder_for
from stars_fast.training.scale.distributed import World
from stars_fast.training.scale.flat_gradients import FlatGradients, share_state
from stars_fast.training.step.cost import turns_in_graph
from stars_fast.training.step.train_step import StepLoss

MOST_PADS = 0.2
"""Part of the places that may be pads for a fixed shape alone, for `auto` to take it."""


class SetUp(NamedTuple):
    """Attributes:
    beside: micro-batches that run op by op beside graphs, and their memory: by plain turns in the
        graph of autograd, and whether a dual turn follows.
    notes: lines for people.
    """

    beside: frozenset[tuple[int, bool]]
    notes: list[str]


def refused(config: RunConfig, world: World) -> str | None:
    """Why the run has no graphs, of what is known before it has data; None if it may have them.

    Raises:
        ConfigError: it asks for them.
    """
    asked = config.train.graphs
    if asked == "off":
        return "train.graphs is off"
    why = reason_on(world.device) or reason_against(config)
    if why is not None and asked == "on":
        raise ConfigError(f"train.graphs: expected auto or off, got on: {why}")
    return why


def set_up_graphs(
    loss: StepLoss,
    batches: Batches,
    config: RunConfig,
    world: World,
    packed: bool,
    say: Callable[[str], None],
) -> SetUp:
    """Put graphs into the place of `loss.between`, keep its gradients in one place, and fill up the
    `batches` to one shape, where the run can have them. Every process calls it, once its weights
    are loaded.

    Raises:
        ConfigError: the run asks for graphs and can't have them.
    """
    asked = config.train.graphs
    why = refused(config, world)
    if why is not None:
        on_gpu = world.device.type == "cuda" and asked == "auto"
        return SetUp(frozenset(), [f"graphs: none, as {why}"] if on_gpu else [])
    shape = fixed_shape(batches.source, batches.rows, packed)
    window = batches.host_window(0)
    places, most = world.total(
        [sum(batch.tokens.numel() for batch in window), shape.rows * shape.length * len(window)]
    )
    if asked == "auto" and places < (1 - MOST_PADS) * most:
        why = (
            f"of rows of one length {1 - places / most:.0%} would be pads; data.packing true fills "
            "them"
        )
        return SetUp(frozenset(), [f"graphs: none, as {why}"])
    if asked == "auto" and not worth_capturing(config):
        return SetUp(frozenset(), ["graphs: none, as no number of turns comes often enough"])
    recorder = recorder_for(world.device)
    assert recorder is not None
    loss.gradients = FlatGradients(loss)
    share_state(loss, world)
    graphs = Graphs(loss, config, shape, recorder, world, asked == "on", say)
    batches.fill = shape.fill
    tried = [batches.window(step)[0] for step in (0, 1)]
    why = graphs.try_out(tried, loss.gradients)
    if why is not None:
        batches.fill = None
        if asked == "on":
            raise ConfigError(f"train.graphs: expected auto or off, got on: {why}")
        return SetUp(frozenset(), [f"graphs: none, as {why}"])
    loss.between = graphs.between
    found = chances(config)
    dual = loss.penalty.needs_dual
    captured, others = (
        {(turns_in_graph(config, *key), key.penalised and dual) for key in keys}
        for keys in (graphs.keys, found.keys() - graphs.keys)
    )
    part = sum(found[key] for key in graphs.keys)
    turns = sorted({key.turns for key in graphs.keys})
    note = (
        f"graphs: micro-batches of {turns[0]} to {turns[-1]} turns, {part:.1%} of all, in at most "
        f"{len(graphs.keys)} pairs"
    )
    return SetUp(frozenset(others - captured), [note])
