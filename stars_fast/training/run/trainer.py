"""The training loop: steps, metrics, checkpoints, resumption and the end of a run."""

import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stars_fast.base import tree
from stars_fast.base.checkpoints import latest
from stars_fast.base.claim import Claim
from stars_fast.base.errors import ConfigError
from stars_fast.base.files import cant_write
from stars_fast.base.run_folder import RunFolder
from stars_fast.data.batches import Batches, MicroBatch, Prefetch
from stars_fast.models.families import family_named
from stars_fast.training.config import RunConfig
from stars_fast.training.graphs.set_up import refused, set_up_graphs
from stars_fast.training.run.changed import changed_settings
from stars_fast.training.run.checkpoint import Checkpoints, SaveError
from stars_fast.training.run.collapse import CollapseMonitor
from stars_fast.training.run.deterministic import deterministic
from stars_fast.training.run.folder import (
    open_run,
    owned,
    reason_to_refuse,
    write_results,
)
from stars_fast.training.run.interrupt import Interrupts
from stars_fast.training.run.metrics import Meter, MetricsLog, peak_flops, read_metrics
from stars_fast.training.run.outlook import foreseen, gpus_of
from stars_fast.training.run.progress import Progress, Speaker, banner, duration
from stars_fast.training.run.resumed import Sources, check_model, goes_on_otherwise
from stars_fast.training.run.task import Results, Task
from stars_fast.training.run.trackers import check_trackers, open_trackers
from stars_fast.training.scale.distributed import World, processes
from stars_fast.training.scale.fit_memory import fit_memory
from stars_fast.training.scale.parallel import parallelise
from stars_fast.training.scale.threads import settle_threads
from stars_fast.training.step.cost import step_cost
from stars_fast.training.step.optim import make_optimizer
from stars_fast.training.step.precision import rounding_warning
from stars_fast.training.step.schedule import beyond_the_end
from stars_fast.training.step.train_step import StepLoss, StepPlan, plan_step, train_step

_LOST = int(signal.NSIG)
"""Beside the numbers of signals: another process has taken the folder."""


class TrainingFailure(RuntimeError):
    """A run that cannot recover; its state is saved and the message says why it stopped."""


class Outcome(NamedTuple):
    """How a run ended: steps done, the folder, the signal that stopped it (0 for none)."""

    step: int
    folder: Path
    signal: int


def train(config: RunConfig, resume: bool = False) -> Outcome:
    """Train as `config` says, in this process or as one of those that torchrun started.

    With `resume` the run in the folder continues from its newest checkpoint, bit for bit on the CPU
    and with `train.deterministic` on a GPU; a folder that is not there yet begins.

    Raises:
        ConfigError: a configuration or folder that cannot be used, TrainingFailure for a run that
            cannot recover.
    """
    with deterministic(config.train.deterministic), processes(config.train.device) as world:
        weights = _block_weights(config) if world.device.type == "cpu" else None
        notes = settle_threads(config.train.threads, weights, world.device)
        folder = RunFolder(str(config.out))
        world.together(lambda: check(config, world, folder, resume))
        with owned(folder, config, world, resume) as claim:
            task = Task(config, world)
            try:
                trainer = Trainer(config, task, folder, world, resume, claim)
                trainer.notes += notes
                return trainer.run()
            except SaveError as error:
                newest = latest(folder.checkpoints)
                kept = (
                    "there is none before it"
                    if newest is None
                    else f"stars-fast train {folder.path} --resume goes on from {newest.name}"
                )
                raise TrainingFailure(f"{error}; {kept}") from error


def _block_weights(config: RunConfig) -> int | None:
    try:
        return family_named(config.model.family).shape(config.model).block_weights
    except ConfigError:  # which the model will raise, if it is one
        return None


class _StepSize(NamedTuple):
    """The size of the first step, over all processes.

    samples, tokens: of the step, without pads. micro_samples: of a micro-batch on average.
    supervised: the share of the places, with pads, that have a target.
    """

    samples: int
    tokens: int
    micro_samples: float
    supervised: float


def _step_size(window: list[MicroBatch], world: World) -> _StepSize:
    supervised, places, tokens = world.total(
        [
            sum(len(batch.labels) for batch in window),
            sum(batch.tokens.numel() for batch in window),
            sum(batch.real_tokens for batch in window),
        ]
    )
    samples = window[0].step_samples
    return _StepSize(samples, tokens, samples / window[0].step_micro_batches, supervised / places)


def check(config: RunConfig, world: World, folder: RunFolder, resume: bool) -> None:
    """Refuse all that can be told to be wrong before data and model are loaded, which takes time.

    Raises:
        ConfigError: the settings can't be used.
    """
    refusal = reason_to_refuse(folder, config, resume) if world.first else None
    if refusal:
        raise ConfigError(refusal)
    try:
        window = config.train.on(world.size).accumulation
    except ValueError as error:
        raise ConfigError(f"train: {error}") from error
    try:
        config.penalty.micro_batches(window)
    except ValueError as error:
        raise ConfigError(f"penalty: {error}") from error
    if config.parallel.kind == "hsdp":
        config.parallel.copies(world)
    check_trackers(config.train.report_to)
    refused(config, world)


class Trainer:
    """One run: everything it holds, and the loop.

    Raises:
        ConfigError: what can't be trained together, or not on from the checkpoint there is.
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        folder: RunFolder,
        world: World,
        resume: bool = False,
        claim: Claim | None = None,
    ) -> None:
        train = config.train.on(world.size).over(len(task.data.source))
        given, config = config, replace(config, train=train)
        self.config = config
        self.task = task
        self.folder = folder
        self.world = world
        self.claim = claim
        self.notes: list[str] = []
        self.began = time.perf_counter()
        self.say = Speaker()
        self.batches = Batches(
            task.data.source,
            config.seed,
            train.batch_size,
            train.accumulation,
            world.rank,
            world.size,
            world.device,
        )
        self.model = task.loop.model
        loss = StepLoss(task.loop, config)
        self.penalty = loss.penalty
        wrap = partial(
            parallelise, loss, task.loop.layers, config.parallel, config.precision, world
        )
        captures = refused(config, world) is None
        self.step_loss = loss if captures else wrap()
        if config.train.compile:
            for layer in task.loop.layers:
                layer.compile()
        self.optimizer = make_optimizer(config.optim, self.model)
        self.checkpoints = Checkpoints(
            folder.checkpoints,
            world,
            config.train.keep,
            config.lora.wanted,
            self.say,
            claim,
        )
        self.meter = Meter(world.device, peak_flops(world.device, config.precision))
        self.collapse = CollapseMonitor(task.guessing)
        self.elapsed = 0.0
        """Seconds since the last line, of the run that this one continues."""
        self.unwritten: dict[str, Any] | None = None
        """The line of this step, which waits for its evaluation."""
        self.step = 0
        self.processes = world.size
        self.accumulation = train.accumulation
        self.sources = Sources.of(task, world)
        if resume:
            world.together(lambda: check_model(task, folder) if world.first else None)
        self._load()
        if self.step > train.total_steps:
            raise ConfigError(
                f"train.steps: expected at least the {self.step:,} steps that the run in "
                f"{folder.path} has done, got {train.total_steps:,}"
            )
        self.begins_again = resume and folder.environment.exists() and not self.step
        if resume and folder.config.exists() and world.first:
            self.notes += changed_settings(folder, given, self.step, len(task.data.source))
        set_up = set_up_graphs(loss, self.batches, config, world, task.packs, self.say)
        self.notes += set_up.notes
        if captures and loss.gradients is None:
            self.step_loss = wrap()
        if config.memory.recompute != "none":
            self.notes += fit_memory(
                self.step_loss, loss, self.optimizer, self.batches, config, world, set_up.beside
            )
        self.size = _step_size(self.batches.host_window(0), world)
        self.outside = task.loop.outside_block(self.size.supervised)
        gpus = gpus_of(world.device, world.size) if world.first else None
        if gpus is not None:
            self.notes += foreseen(config, gpus, self.size.tokens // max(self.size.samples, 1))
        self.costs = replace(config, penalty=self.penalty.as_drawn(self.size.micro_samples))
        self.progress = Progress(self.costs, self.step, self.outside, world.first)
        self.say.progress = self.progress
        self.log = world.together(lambda: self._open(given) if world.first else None)
        self.windows = Prefetch(self.batches, self.step, train.total_steps)

    def run(self) -> Outcome:
        """All remaining steps, then the evaluation and the figures.

        Raises:
            TrainingFailure: the run cannot recover.
            SaveError: the last checkpoint could not be written.
        """
        with ExitStack() as ending:  # all of it, whatever fails, and the last first
            if self.log is not None:
                ending.callback(self.log.close)
            ending.callback(self.checkpoints.close)  # a save flushes the log
            ending.callback(self.progress.close)
            ending.callback(self.windows.close)
            self._greet()
            with Interrupts() as interrupts:
                stopped = self._loop(interrupts)
                if not stopped:
                    self._end_saves()
            stopped = stopped or self._stopped(interrupts)
            if stopped:
                self._say_stopped(stopped)
            else:
                self._finish()
        return Outcome(self.step, self.folder.path, stopped)

    def _end_saves(self) -> None:
        """Wait for the last save; one that failed is tried again, as there may be room now."""
        try:
            self.checkpoints.wait()
        except SaveError:
            self._save()
            self.checkpoints.wait()

    def _loop(self, interrupts: Interrupts) -> int:
        """Steps until the end or a signal; the signal's number, 0 at the end."""
        train = self.config.train
        self._make_up_line()
        self.progress.pause()
        self.meter.since = time.perf_counter() - self.elapsed
        while self.step < train.total_steps:
            plan = plan_step(self.config, self.step)
            window = self.windows.window(self.step)
            stats = train_step(
                self.step_loss, self.optimizer, self.config, window, plan, self.world
            )
            self.meter.add(stats, plan, self._flops(plan, window))
            self.step += 1
            self.progress.step(plan.step, sum(plan.turns) / len(plan.turns))
            if self._due(train.log_every) or self._evaluates():
                self._record(plan)
            stopped = self._stopped(interrupts)
            if stopped or self._due(train.save_every):
                self._save()
            if stopped:
                self.checkpoints.wait()
                return stopped
            self._end_line()
        return 0

    def _stopped(self, interrupts: Interrupts) -> int:
        """The signal that any process has received, 0 if none has.

        Raises:
            TrainingFailure: another process has taken the folder.
        """
        stopped = self.world.largest(_LOST if self._lost else interrupts.received)
        if stopped == _LOST:
            raise self._lost_folder()
        return stopped

    def _say_stopped(self, number: int) -> None:
        self.say(
            f"{signal.Signals(number).name}: stopped after step {self.step}, saved; continue with "
            f"stars-fast train {self.folder.path} --resume"
            + (f", on {self.world.size} processes" if self.world.size > 1 else "")
        )

    @property
    def _lost(self) -> str | None:
        """Who has taken the run folder, as the first process knows."""
        return None if self.claim is None else self.claim.successor

    def _lost_folder(self) -> TrainingFailure:
        return TrainingFailure(
            f"stopped after step {self.step}: {self.folder.path} belongs to "
            f"{self._lost or 'another process'} now, as this run was not heard of for a while; "
            "that one goes on from the newest checkpoint"
        )

    def _due(self, every: int) -> bool:
        """Whether something that happens every so many steps, and at the end, is due."""
        return self.step == self.config.train.total_steps or (every > 0 and self.step % every == 0)

    def _evaluates(self) -> bool:
        """Whether to evaluate after this step; the last step's evaluation is the run's."""
        every = self.config.eval.every
        return every > 0 and self.step % every == 0 and self.step < self.config.train.total_steps

    def _flops(self, plan: StepPlan, window: list[MicroBatch]) -> float:
        """Operations that the step needs here, forward and backward; what is recomputed is not
        needed."""
        if self.meter.peak is None:
            return 0.0
        turns = [
            self.task.loop.turn_flops(batch.samples.lengths)
            * step_cost(self.costs, turns, plan.step, self.outside)
            for turns, batch in zip(plan.turns, window, strict=True)
        ]
        # Weights that stay as they are have no gradient, which is a third of it
        return (2 if self.config.lora.wanted else 3) * sum(turns)

    def _record(self, plan: StepPlan) -> None:
        """Make a line of metrics, and write it unless it waits for an evaluation; stop a run that
        cannot recover."""
        row, streak = self.meter.line(plan)
        warning = None
        if self.penalty.can_collapse:
            warning = self.collapse.check(row["loss"], row["penalty"])
        if warning:
            row["warning"] = warning
            self.say(f"warning at step {self.step}: {warning}")
        self.unwritten = row
        hopeless = streak >= self.config.train.max_nonfinite
        if hopeless or not self._evaluates():
            self._write_line()
        if hopeless:
            self._save()
            kept = f"The weights before them are saved in {self.folder.path}"
            try:
                self.checkpoints.wait()
            except SaveError as error:
                kept = str(error)
            raise TrainingFailure(
                f"stopped at step {self.step}: the loss or gradient of the last {streak} steps "
                f"was not finite. {kept}; a new run with a lower optim.lr or penalty.weight, or "
                f"with optim.clip, may help"
            )

    def _end_line(self) -> None:
        """Evaluate and write the line that waits for it, if one does; the checkpoint of its step is
        made before, as an evaluation may take hours, and holds the line."""
        if self.unwritten is not None:
            if self._evaluates():
                self.unwritten |= self._evaluate()
            self._write_line()

    def _make_up_line(self) -> None:
        """As `_end_line` for the step that the run goes on from, if it ended before its line was
        written."""
        if self.unwritten is None:
            return
        rows = [] if self.log is None else read_metrics(self.folder.metrics)
        if self.world.from_first(bool(rows) and rows[-1]["step"] == self.step):
            self.unwritten = None
        self._end_line()

    def _write_line(self) -> None:
        """Write and show the line of this step."""
        row, self.unwritten = self.unwritten, None
        assert row is not None
        if self.log is not None:
            self.log.write(row)
        self.progress.show(row)

    def _evaluate(self) -> Results:
        """The task's figures; the time they take is not the steps'."""
        results = self.task.evaluate(self.step_loss, self.say)
        self.world.wait()
        self.progress.pause()
        self.meter.restart_clock()
        return results

    def _save(self) -> None:
        """A checkpoint of this step, written while the steps go on."""
        start = time.perf_counter()
        state = {
            "step": self.step,
            "meter": self.meter.state(),
            "collapse": self.collapse.state(),
            "unwritten": self.unwritten,
            "processes": self.world.size,
            "accumulation": self.config.train.accumulation,
            **self.sources._asdict(),
        }
        before = (lambda: None) if self.log is None else self.log.sync
        self.checkpoints.save(self.step, self.model, self.optimizer, state, before)
        self.progress.pause()
        self.meter.since += time.perf_counter() - start  # tokens/s is that of the steps

    def _load(self) -> None:
        """Continue from the newest checkpoint that is whole, if there is one."""
        checkpoint = self.checkpoints.whole()
        if checkpoint is None:
            return
        state = self.checkpoints.load(checkpoint, self.model, self.optimizer)
        self.sources.check(state, checkpoint)
        self.meter.load(state["meter"])
        self.elapsed = state["meter"]["seconds"]
        self.collapse.load(state["collapse"])
        self.unwritten = state.get("unwritten")
        self.step = state["step"]
        self.processes = state["processes"]
        self.accumulation = state.get("accumulation", self.accumulation)

    def _greet(self) -> None:
        """Say what runs."""
        batch = self.task.describe(self.size.samples, self.size.tokens)
        self.say(banner(self.costs, self.task.title, self.model, batch, self.outside))
        where = f"{self.folder.path}, {self.world.size} x {self.world.device.type}"
        if self.world.device.type == "cpu":
            threads = torch.get_num_threads()
            where += f" with {threads} thread{'s' * (threads > 1)}"
        start = f"continues after step {self.step}" if self.step else "starts"
        if self.begins_again:
            start += " anew, as there is no checkpoint to continue from"
        self.say(f"run folder {where}; {start}")
        for note in (*self.task.data.notes, *self.notes, *self._warnings()):
            self.say(note)

    def _open(self, given: RunConfig) -> MetricsLog:
        """The first files of the run, on the first process.

        Raises:
            ConfigError: they can't be written.
        """
        try:
            open_run(self.folder, given, self.world.size)
            self.task.write(self.folder)
            return self._open_log()
        except OSError as error:
            path = self.folder.path
            raise ConfigError(f"{path} can't be written to: {cant_write(path, error)}") from error

    def _open_log(self) -> MetricsLog:
        """The metrics of this run, cut back to the step that it continues from."""
        config, train = self.config, self.config.train
        trackers = open_trackers(
            train.report_to,
            folder=self.folder.path,
            run=config.name,
            project=train.project,
            config=tree.to_dict(config),
            step=self.step,
        )
        if len(trackers) < len(train.report_to):
            self.notes.append("TensorBoard is not installed; metrics go to metrics.jsonl")
        return MetricsLog(self.folder.metrics, self.step, trackers, self.say)

    def _warnings(self) -> list[str]:
        """Warnings that a user should have before the run."""
        config = self.config
        notes = goes_on_otherwise(
            (self.processes, self.world.size), (self.accumulation, config.train.accumulation)
        )
        notes += self.task.warnings()
        notes += self.penalty.warnings(self.size.micro_samples)
        notes += beyond_the_end(config)
        rounding = rounding_warning(
            config.precision, config.optim.stochastic_rounding, config.optim.lr
        )
        if rounding:
            notes.append(rounding)
        return [f"warning: {note}" for note in notes]

    def _finish(self) -> None:
        """The task's figures at the end of the run."""
        results = self._evaluate()
        if not self.world.first:
            return
        if self._lost:
            raise self._lost_folder()
        for line in self.task.judge.tell(results) if results else ():
            self.say(line)
        try:
            if results:
                write_results(self.folder, {"step": self.step, **results})
            drawn = self._draw(results)
        except ImportError as error:
            self.say(str(error))
            drawn = []
        except OSError as error:
            path = self.folder.path
            raise TrainingFailure(
                f"the figures of the run's end could not be written: {cant_write(path, error)}; "
                f"stars-fast train {path} --resume makes them again"
            ) from error
        self._say_goodbye(drawn)

    def _say_goodbye(self, drawn: list[str]) -> None:
        """Say where everything is, and what one does next."""
        path = self.folder.path
        took = duration(time.perf_counter() - self.began)
        self.progress.close()  # so that nothing stands below the last lines
        self.say(f"done: {path}, {took}" + (f"; figures: {', '.join(drawn)}" if drawn else ""))
        for command in self.task.next_commands(path):
            self.say(f"next: {command}")

    def _draw(self, results: Results) -> list[str]:
        """Draw the figures, training curves and the task's; their names."""
        from stars_fast.base.plots import training_curves

        name = "training.png"
        rows = read_metrics(self.folder.metrics)
        title = f"{self.config.name}: training"
        training_curves(rows, self.folder.path / name, title=title)
        if not results:
            return [name]
        return [name, *self.task.judge.draw(results, self.folder.path, self.task.data.unit)]
