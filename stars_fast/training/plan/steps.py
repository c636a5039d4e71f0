"""The seconds of a step: its micro-batches, what is done a second time, the update, the network."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from stars_fast.models.shape import Shape
from stars_fast.training.plan import memory, passes
from stars_fast.training.plan.cards import Gpus
from stars_fast.training.plan.passes import Machine, Seconds
from stars_fast.training.plan.published import (
    published_head,
    published_penalty,
    published_turn,
)
from stars_fast.training.plan.rows import Rows
from stars_fast.training.plan.trained import trained_of
from stars_fast.training.scale.memory import Choice, choose
from stars_fast.training.step.cost import turns_in_graph
from stars_fast.training.step.methods import penalty_of
from stars_fast.training.step.turns import Recompute


@dataclass(frozen=True)
class Way:
    """One way to run the steps.

    seconds: of a step. parts: seconds of the GPU's work by what it is, of the GPU's waiting for the
    host, and of the network that shows. limit: the largest of them in a word. tokens: a second and
    GPU. mfu: of the card's peak, what is recomputed not counted. hours: of the run; None where its
    length is not known.
    """

    seconds: float
    parts: dict[str, float]
    limit: str
    tokens: float
    mfu: float
    hours: float | None


LIMITS = {
    "products": "tensor cores", "attention": "tensor cores", "traffic": "memory bandwidth",
    "recompute": "memory", "host": "host", "network": "network",
}  # fmt: skip
"""The cause of each part of a step, as users know it."""


class Run(NamedTuple):
    """A recipe, read for a number of GPUs; `micro` are the rows of a micro-batch, `captured` the
    part of the micro-batches that are CUDA graphs, for which the host takes no time."""

    config: Any
    shape: Shape
    rows: Rows
    gpus: Gpus
    machine: Machine
    micro: int
    captured: float = 0.0

    @property
    def lengths(self) -> list[float]:
        """Documents of a micro-batch."""
        return self.rows.lengths * self.micro

    @property
    def tokens(self) -> float:
        return sum(self.lengths)

    @property
    def positions(self) -> float:
        return self.rows.supervised * self.tokens


def choice_of(run: Run, turns: int, penalised: bool) -> Choice:
    config = run.config
    kept = memory.activations(run.shape, run.tokens, run.positions, config)
    room = memory.budget(run.shape, config, run.gpus.number, run.gpus.card)
    dual = penalised and penalty_of(config).needs_dual
    in_graph = turns_in_graph(config, turns, penalised)
    return choose(config.memory, kept, room, in_graph, dual)


def way(run: Run, chances: list[tuple[int, float]], steps: int | None, penalised: bool) -> Way:
    """Our steps; `chances` are those of the numbers of turns."""
    total, needed, overlap = Seconds(), 0.0, 0.0
    for turns, chance in chances:
        found, flops, last = micro_batch(run, turns, penalised)
        total, needed = total + found * chance, needed + chance * flops
        overlap += chance * last
    window = run.config.train.accumulation
    total = replace(total, host=total.host * (1 - run.captured)) * window + _update(run)
    # Beside graphs gradients travel after the last backward
    overlap *= run.captured == 0
    return _told(run, total, needed * window, _network(run, chances, overlap), steps)


def micro_batch(run: Run, turns: int, penalised: bool) -> tuple[Seconds, float, float]:
    """A micro-batch at so many turns: its seconds, the FLOPs it needs, and the seconds of its last
    backward of a turn, beside which gradients travel."""
    config, shape, lengths, machine = run.config, run.shape, run.lengths, run.machine
    trained = trained_of(config)
    penalty = penalty_of(config)
    dual = penalised and penalty.needs_dual
    part = config.penalty.fraction if dual else 0.0
    # A pass over some of the samples is launched, and touches the weights, as one over all
    times = 1.0 if dual and config.penalty.draw == "samples" else part
    forward, backward = (
        passes.turn(shape, lengths, machine, backward=each, trained=trained)
        for each in (False, True)
    )
    in_graph = min(turns, config.train.backprop_turns or turns)
    plain = turns - (part if dual and penalty.last_turns else 0.0)
    # Turns beyond those of the step, without a gradient and with one
    free, more = config.loop.free_mean, config.loop.more_turns
    more += penalty.more_turns if penalised else 0
    total = forward * (plain + free + more) + backward * (plain - turns + in_graph + more)
    if dual:
        into, back = (
            passes.turn(shape, lengths, machine, backward=each, dual=True, trained=trained)
            for each in (False, True)
        )
        through = into * config.penalty.power_steps + back
        total += replace(through * part, host=through.host * times)
    elif penalised:
        total += Seconds(traffic=machine.moved(6 * machine.itemsize * shape.width * run.tokens))
    outside = shape.outside / shape.layers
    apart = passes.turn(
        shape, lengths, machine, backward=True, trained=trained._replace(block=trained.outside)
    )
    total += (forward + apart) * outside
    heads = 2 if config.loop.more_turns else 1
    total += passes.head(shape, run.positions, machine, trained) * heads
    total += _weights(run, in_graph + more + 2 * times)
    choice = choice_of(run, turns, penalised)
    total += _again(run, choice.recompute, in_graph + more, part, forward)
    needed = passes.turn_flops(shape, lengths, trained=trained) * (
        plain - (turns - in_graph) + more + outside
    )
    needed += passes.turn_flops(shape, lengths) / 3 * (turns - in_graph + free)  # no backward
    needed += part * passes.turn_flops(shape, lengths, dual=True, trained=trained)
    needed += (4 + 2 * trained.head) * shape.head_weights * run.positions * heads
    return total, needed, backward.gpu


def _again(run: Run, recompute: Recompute, turns: int, part: float, forward: Seconds) -> Seconds:
    """Work that a step does a second time."""
    again = min(recompute.turns, turns)
    found = (forward * again).again
    if recompute.dual:
        into = passes.turn(run.shape, run.lengths, run.machine, backward=False, dual=True)
        found += (into * part).again
    if recompute.selective and run.shape.native:
        kept = turns - again + (0 if recompute.dual else 2 * part)
        found += passes.norms_and_gates(run.shape, run.tokens, run.machine) * kept
    return found


def _weights(run: Run, turns: float) -> Seconds:
    """Traffic of weights and their gradients: each turn adds to the sums. Under autocast weights
    are cast once a micro-batch, and their gradients back; copies are made once a step, and products
    write and read fp32 sums (counted as if nothing of it hid behind the products). Frozen weights
    are copied alone."""
    if run.config.lora.wanted:
        return Seconds()
    size, window = run.machine.itemsize, run.config.train.accumulation
    weights = run.shape.block_weights * trained_of(run.config).block
    if memory.has_copies(run.config):
        moved = (6.0 * turns - 4 / window) * weights  # a step's first product does not read
        moved += 6 / window * run.shape.block_weights
        return Seconds(traffic=run.machine.moved(moved))
    moved = 3.0 * size * weights * max(turns - 1, 0)
    if run.config.precision == "mixed":
        moved += (6 + 6) * weights
    moved += 3 * (2 if run.config.precision == "bfloat16" else 4) * weights  # to the gradient
    return Seconds(traffic=run.machine.moved(moved))


def _update(run: Run) -> Seconds:
    """Norm of the gradients, clipping and AdamW: numbers that they read and write a parameter."""
    config, shape = run.config, run.shape
    number = float(trained_of(config).parameters(shape))
    if config.parallel.sharded:
        number /= run.gpus.number
    # Gradients four times and weights twice, in their dtype; two averages twice, in theirs
    full = 2 if config.precision == "bfloat16" else 4
    size = 6 * full + 4 * memory.average_bytes(config)
    return Seconds(traffic=run.machine.moved(size * number))


def _network(run: Run, chances: list[tuple[int, float]], overlap: float) -> float:
    """Seconds of a step in which the GPU waits for its neighbours."""
    count, config, shape = run.gpus.number, run.config, run.shape
    if count == 1:
        return 0.0
    number = trained_of(config).parameters(shape)
    share, link = (count - 1) / count, run.gpus.card.link
    full = 2 if config.precision == "bfloat16" else 4
    if not config.parallel.sharded:
        return max(2 * share * full * number / link - overlap, 0.0)
    turns = sum(n * chance for n, chance in chances)
    low = 4 if config.precision == "float32" else 2
    gathers = 2 * turns * config.train.accumulation if config.parallel.reshard else 1
    gather = share * low * shape.parameters / link
    hidden = min(gather, overlap / 2)  # behind the layer before
    reduce = max(share * 4 * number / link - overlap, 0.0)
    return gathers * (gather - hidden) + reduce


def has_published(run: Run) -> bool:
    """Whether there is a published way to run it: of Ouro, all weights trained."""
    config = run.config
    known = penalty_of(config).needs_dual or not config.penalised
    whole = not config.lora.wanted and not config.train.freeze
    return config.model.family == "ouro" and whole and known


def published_way(
    run: Run, chances: list[tuple[int, float]], steps: int | None, penalised: bool
) -> Way:
    """The same objective on all samples the published way, one document at a time."""
    shape, lengths, machine = run.shape, run.lengths, run.machine
    turns = sum(n * chance for n, chance in chances)
    total = published_turn(shape, lengths, machine) * turns
    total += published_head(shape, run.tokens, machine)
    needed = turns * passes.turn_flops(shape, lengths)
    if penalised:
        total += published_penalty(shape, lengths, machine)
        needed += 2 * passes.turn_flops(shape, lengths)
    window = run.config.train.accumulation
    total = total * window + _update(run)
    return _told(run, total, needed * window, _network(run, chances, 0.0), steps)


def _told(run: Run, total: Seconds, needed: float, network: float, steps: int | None) -> Way:
    waits = max(total.host - total.gpu, 0.0)
    parts = {
        "products": total.products,
        "attention": total.attention,
        "traffic": total.traffic,
        "recompute": total.recompute,
        "host": waits,
        "network": network,
    }
    seconds = sum(parts.values())
    blame: dict[str, float] = {}
    for name, each in parts.items():
        blame[LIMITS[name]] = blame.get(LIMITS[name], 0.0) + each
    if waits > 0:  # whatever the GPU does, it would wait
        blame = {"host": waits, "network": network}
    tokens = run.config.train.batch_size * run.rows.tokens / run.gpus.number
    return Way(
        seconds=seconds,
        parts=parts,
        limit=max(blame, key=lambda name: blame[name]),
        tokens=tokens / seconds,
        mfu=needed / seconds / run.machine.peak,
        hours=None if steps is None else steps * seconds / 3600,
    )
