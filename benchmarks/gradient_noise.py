"""How noisy the gradient of the penalty is, by the part of the samples and the number of probes.

    python -m benchmarks.gradient_noise RUN [RUN ...] [--turns 6] [--draws 32] [--json FILE]
    # RUN: a folder of stars-fast train, of the addition study or of Ouro

For one batch of the run's data at h^(turns), the expected gradient is the mean over many directions
of all samples. Each setting is drawn anew many times; beside it stands

    cosine     mean cosine of a draw with the expected gradient
    variance   E|g - E g|^2 / |E g|^2
    cost       dual turns over one of all samples
    of step    the same noise times lambda over that of the token loss's gradient from batch to
               batch: how much noise the penalty adds to a step's gradient (variances)

and the cosines of its expected gradient with those of the exact penalty, detached and attached (its
gradient reaches the turns before): `last` is always attached, and is taken at another state. r4 is
(sum s^2)^2 / sum s^4 of the singular values of the Jacobian at the state, a sample at a time; one
direction errs by 2 / r4.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import table, write
from stars_fast import singular_moments
from stars_fast.base.checkpoints import load_weights
from stars_fast.base.machine import describe
from stars_fast.base.run_folder import RunFolder
from stars_fast.data.batches import Batches, MicroBatch
from stars_fast.data.samples import drawn_part
from stars_fast.training.config import load_config
from stars_fast.training.run.task import Task
from stars_fast.training.scale.distributed import World
from stars_fast.training.step.micro_step import MicroStep
from stars_fast.training.step.penalties.jacobian import jacobian_penalty
from stars_fast.training.step.penalty import PenaltyConfig
from stars_fast.training.step.turns import run_turns

NOISE_COLUMNS = {
    "cost": ("cost", ".3f"),
    "cosine": ("cosine", ".3f"),
    "variance": ("variance", ".3f"),
    "of_step": ("of step", ".4f"),
    "to_exact": ("to exact", ".3f"),
    "to_attached": ("to attached", ".3f"),
}
PARTS = (0.125, 0.25, 0.5, 1.0)
PROBES = (2, 4)
PENALTY_KINDS = ("exact", "attached", "last")


class Trained:
    """A trained model, a batch of its data, and the gradients at it."""

    def __init__(self, run: str, turns: int) -> None:
        self.config = load_config(run, ["--precision", "float32"])
        task = Task(self.config, World(0, 1, torch.device("cpu")))
        load_weights(RunFolder(run).checkpoint(), task.loop.model)
        self.loop, self.turns = task.loop, turns
        self.loop.model.eval()
        self.source = task.data.source
        self.parameters = [p for p in self.loop.model.parameters() if p.requires_grad]
        self.batch = self.batch_at(0)

    def batch_at(self, step: int) -> MicroBatch:
        size = self.config.train.batch_size
        return Batches(self.source, self.config.seed, size).window(step)[0]

    def states(self, batch: MicroBatch, turns: int) -> tuple[Any, list[Tensor]]:
        micro = MicroStep(self.loop, batch, self.config, 0)
        return micro.turn, run_turns(micro.turn, micro.first, turns)

    def token(self, step: int) -> Tensor:
        """The gradient of the token loss of one batch."""
        batch = self.batch_at(step)
        h = self.states(batch, self.turns)[1][-1]
        return self._gradient(self.loop.token_loss(h, batch, len(batch.labels)))

    def penalty(self, draw: int, fraction: float, probes: int, kind: str) -> Tensor:
        """The gradient of the penalty by the trainer's own estimate, the mean of some probes."""
        at = "last" if kind == "last" else "next"
        changed = PenaltyConfig(fraction=fraction, at=at, detach=kind == "exact")
        config = replace(self.config, penalty=changed)
        penalty = jacobian_penalty(config)
        _, states = self.states(self.batch, self.turns - penalty.last_turns)
        losses = []
        for probe in range(probes):
            micro = MicroStep(self.loop, self.batch, config, draw * probes + probe)
            losses.append(penalty.compute(micro, states)[1])
        return self._gradient(torch.stack(losses).mean())

    def r4(self) -> list[float]:
        """r4 of the first samples, each by itself."""
        _, states = self.states(self.batch, self.turns)
        found = []
        for i in range(min(8, self.batch.samples.count)):
            part = self.batch.samples.subset([i])
            h = part.cut(states[-1].detach())
            turn, mask = self.loop.turn(h, part.tokens), part.tokens.real
            generator = torch.Generator().manual_seed(i)
            moments = singular_moments(turn, h, mask=mask, probes=128, generator=generator)
            found.append(float(moments.r4))
        return found

    def _gradient(self, loss: Tensor) -> Tensor:
        grads = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        pairs = zip(grads, self.parameters, strict=True)
        return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def variance(draws: list[Tensor]) -> float:
    """E|g - E g|^2 of independent draws."""
    stacked = torch.stack(draws)
    return float((stacked - stacked.mean(0)).square().sum() / (len(draws) - 1))


def settings() -> Iterator[tuple[str, float, int, str]]:
    """Name, fraction, probes and kind."""
    for kind in PENALTY_KINDS:
        for fraction in PARTS if kind == "exact" else (0.25, 1.0):
            yield f"{kind}, {fraction:g} of the samples", fraction, 1, kind
    for probes in PROBES:
        yield f"exact, {probes} probes", 1.0, probes, "exact"


def study(run: str, turns: int, draws: int) -> dict[str, Any]:
    """The table of a run."""
    trained = Trained(run, turns)
    weight = trained.config.penalty.weight or 0.1
    token = variance([trained.token(step) for step in range(draws)])
    # Numbers beyond those of the draws: the expectation must not know them.
    expected = {
        kind: torch.stack([trained.penalty(1000 + k, 1.0, 4, kind) for k in range(16)]).mean(0)
        for kind in PENALTY_KINDS
    }
    rows, samples = {}, trained.batch.samples.count
    for name, fraction, probes, kind in settings():
        found = [trained.penalty(k, fraction, probes, kind) for k in range(draws)]
        noise = variance(found)
        rows[name] = {
            "cost": probes * drawn_part(fraction, samples),
            "cosine": statistics.fmean(cosine(g, expected[kind]) for g in found),
            "variance": noise / float(expected[kind].square().sum()),
            "of_step": weight**2 * noise / ((1 - weight) ** 2 * token),
            "to_exact": cosine(expected[kind], expected["exact"]),
            "to_attached": cosine(expected[kind], expected["attached"]),
        }
    r4 = trained.r4()
    print(f"{run}: {trained.batch.samples.count} samples, h^({turns}), lambda {weight:g}")
    print(table(rows, NOISE_COLUMNS))
    print(f"r4 of {len(r4)} samples: {min(r4):.1f} to {max(r4):.1f}")
    return {"samples": trained.batch.samples.count, "turns": turns, "rows": rows, "r4": r4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--draws", type=int, default=32)
    parser.add_argument("--json", help="write the result here")
    options = parser.parse_args()
    found = {run: study(run, options.turns, options.draws) for run in options.runs}
    write(options.json, describe("cpu") | {"runs": found})


if __name__ == "__main__":
    main()
