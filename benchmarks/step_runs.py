"""The steps of each case, on a model, documents and depths that all cases share."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from benchmarks import published
from benchmarks.floors import Document, Sizes, step_flops
from benchmarks.report import Row, reason
from benchmarks.step_cases import STEP_CASES, StepCase, passes
from benchmarks.timing import cuda_growth, summary
from benchmarks.workload import (
    FIXED_TURNS,
    LAW,
    MICROS,
    MODEL_SIZES,
    balanced_depths,
    one_by_one,
    packed_batches,
    random_model,
)
from stars_fast.data.batches import MicroBatch
from stars_fast.models.depth import DepthLaw
from stars_fast.models.families.ouro import OuroLoop
from stars_fast.training.config import RunConfig, config_from
from stars_fast.training.graphs.set_up import set_up_graphs
from stars_fast.training.scale.distributed import World
from stars_fast.training.scale.fit_memory import fit_memory
from stars_fast.training.step.optim import make_optimizer
from stars_fast.training.step.penalties.jacobian import jacobian_penalty
from stars_fast.training.step.train_step import StepLoss, plan_step, train_step


class Bench:
    """Shared by all cases: the model, the optimiser with its averages, documents and depths.

    Step 0 warms up and has the depths of step 1.
    """

    def __init__(
        self,
        shape: str,
        device: str,
        precision: str,
        tokens: int | None,
        repeats: int,
        layers: int | None,
    ) -> None:
        fields, longest = MODEL_SIZES[shape]
        self.fields = fields | ({} if layers is None else {"num_hidden_layers": layers})
        self.device, self.precision = torch.device(device), precision
        self.tokens, self.repeats = tokens or longest, repeats
        self.model = random_model(self.fields, self.device, precision)
        config = self.model.config
        self.sizes = Sizes(
            config.hidden_size,
            config.intermediate_size,
            config.num_hidden_layers,
            config.vocab_size,
        )
        self.batches = packed_batches(self.tokens, config.vocab_size, self.device)
        self.windows = [self.batches.window(step) for step in range(repeats + 1)]
        self.law = DepthLaw(**LAW)
        depths = balanced_depths(self.law, repeats, MICROS)
        self.depths = [depths[0], *depths]
        self.optimizer = make_optimizer(self.config(STEP_CASES["sft"]).optim, self.model)
        self.make_gradients()
        self.optimizer.step()  # and the averages
        self._documents = {
            random: [
                one_by_one(window, self._turns(random, step))
                for step, window in enumerate(self.windows)
            ]
            for random in (False, True)
        }

    def make_gradients(self) -> None:
        """Zeros: what a step adds to memory does not depend on what ran before it."""
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)

    def config(self, case: StepCase, graphs: bool = False) -> Any:
        """The configuration of the trainer's run of a case."""
        return config_from(
            {
                "task": "ouro",
                "precision": self.precision,
                "data": {"source": "random", "max_length": self.tokens},
                "optim": {"lr": 1e-6},
                "train": {
                    "steps": 1000,
                    "batch_size": MICROS,
                    "accumulation": MICROS,
                    "graphs": "on" if graphs else "off",
                },
                "method": case.method,
                "depth": LAW if case.random_depth else {"law": "fixed", "value": FIXED_TURNS},
                "penalty": case.penalty,
            }
        )

    def turns(self, case: StepCase, step: int) -> list[int]:
        """Turns of each micro-batch."""
        return self._turns(case.random_depth, step)

    def _turns(self, random: bool, step: int) -> list[int]:
        return self.depths[step] if random else [FIXED_TURNS] * MICROS

    def documents(self, case: StepCase, step: int) -> list[published.MicroBatch]:
        """Documents of a step, one by one."""
        return self._documents[case.random_depth][step]

    def mean_turns(self, case: StepCase) -> float:
        return self.law.mean() if case.random_depth else float(FIXED_TURNS)

    def real_tokens(self, step: int) -> int:
        return sum(batch.real_tokens for batch in self.windows[step])

    def flops(self, case: StepCase, step: int, turns: Sequence[float], recomputed: bool) -> float:
        """FLOPs of a step by formula, at these turns of its micro-batches; what the published way
        computes again counts or not."""
        config = self.config(case)
        documents, positions = [], 0
        for batch, depth in zip(self.windows[step], turns, strict=True):
            lengths = batch.samples.lengths
            chosen = _penalised(case, batch, config, step)
            documents += [Document(n, depth, i in chosen) for i, n in enumerate(lengths)]
            positions += batch.real_tokens if case.published else len(batch.labels)
        return step_flops(self.sizes, documents, positions, passes(case, recomputed))


def _penalised(case: StepCase, batch: MicroBatch, config: RunConfig, step: int) -> set[int]:
    """Which documents of a micro-batch have the penalty in a step."""
    penalty = jacobian_penalty(config)
    if not case.penalised or penalty.factor(batch, step) == 0:
        return set()
    part = None if case.published else penalty.drawn(batch, step)
    return set(range(batch.samples.count)) if part is None else set(part.chosen)


class Steps:
    """The steps of one case, perhaps with CUDA graphs, which the first one captures; a call is the
    next one. `failed` says why there are no more; `at_mean`
    are the seconds of each at the mean of the depth law, once `row` was asked for."""

    def __init__(self, bench: Bench, case: StepCase, graphs: bool = False) -> None:
        self.bench = bench
        self.case = case
        self.next = 0
        self.failed: str | None = None
        self.mib: float | None = None
        self.at_mean: list[float] = []
        self.notes: list[str] = []
        self.config = bench.config(case, graphs)
        self.windows = bench.windows
        self.world = World(0, 1, bench.device)
        self.loss = StepLoss(OuroLoop(bench.model), self.config)
        self.published = published.Published(bench.model, bench.precision, case.checkpointed)

    def prepare(self) -> None:
        """The first step, alone: it fits in memory, and its loss is finite."""
        self._guarded(self._first)

    def _first(self) -> None:
        bench = self.bench
        if not self.case.published:  # as the trainer does before its first step
            batches = copy(bench.batches)  # graphs want rows of one length
            made = set_up_graphs(self.loss, batches, self.config, self.world, True, print)
            self.windows = [batches.window(step) for step in range(len(bench.windows))]
            self.notes = made.notes + fit_memory(
                self.loss,
                self.loss,
                bench.optimizer,
                batches,
                self.config,
                self.world,
                made.beside,
            )
        bench.make_gradients()
        losses: list[Tensor] = []
        if bench.device.type == "cuda":
            self.mib = round(cuda_growth(lambda: losses.append(self.step(0))), 1)
        else:
            losses.append(self.step(0))
        if not losses[0].isfinite():
            self.failed = f"loss {losses[0].item()} in the first step"

    def __call__(self) -> None:
        if self.failed is None:
            self._guarded(lambda: self.step(self.next))
            self.next += 1

    def _guarded(self, run: Callable[[], Any]) -> None:
        """One case that fails must not end the run of the others."""
        try:
            run()
        except Exception as error:
            self.failed = reason(error)
        if self.failed is not None:
            self.bench.optimizer.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()

    def step(self, step: int) -> Tensor:
        """One optimiser step; its loss, a scalar on the device."""
        bench, config = self.bench, self.config
        plan = plan_step(config, step)._replace(turns=bench.turns(self.case, step))
        if not self.case.published:
            window = self.windows[step]
            return train_step(self.loss, bench.optimizer, config, window, plan, self.world).loss
        return published.published_step(
            self.published,
            bench.optimizer,
            bench.documents(self.case, step),
            plan.weight,
            config.optim.clip,
        )

    def row(self, seconds: list[float], peak: float | None) -> Row:
        """The figures of the steps from the first on, apart from ratios to other cases."""
        bench, case = self.bench, self.case
        steps = range(1, len(seconds) + 1)
        ran = [bench.flops(case, s, bench.turns(case, s), recomputed=True) for s in steps]
        mean = [bench.mean_turns(case)] * MICROS
        even = [bench.flops(case, s, mean, recomputed=True) for s in steps]
        self.at_mean = [t * e / r for t, e, r in zip(seconds, even, ran, strict=True)]
        turns = [turn for s in steps for turn in bench.turns(case, s)]
        rates = [bench.real_tokens(s) / t for s, t in zip(steps, seconds, strict=True)]
        found = summary(seconds)
        row: Row = {
            "seconds": round(found["ms"] / 1e3, 6),
            "spread": found["spread"],
            "turns": round(statistics.fmean(turns), 3),
            "seconds_at_mean": round(statistics.median(self.at_mean), 6),
            "tokens_per_second": round(statistics.median(rates)),
            "gflop": round(sum(even) / len(even) / 1e9, 6),
        }
        if peak is not None:
            needed = [bench.flops(case, s, bench.turns(case, s), recomputed=False) for s in steps]
            shares = [n / t / peak for n, t in zip(needed, seconds, strict=True)]
            row["mfu"] = round(statistics.median(shares), 4)
        optional = {"mib": self.mib, "paper": case.paper, "notes": self.notes or None}
        return row | {key: value for key, value in optional.items() if value is not None}
