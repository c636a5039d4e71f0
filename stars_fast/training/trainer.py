"""The training loop: steps, metrics, checkpoints, resumption and the end of a run."""

import math
import signal
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from stars_fast.data.addition import AdditionData
from stars_fast.evaluation.addition import evaluate
from stars_fast.models.looped import LoopedLM
from stars_fast.training.batches import Batches
from stars_fast.training.checkpoint import latest, load_state, load_weights, save_checkpoint
from stars_fast.training.collapse import CollapseMonitor
from stars_fast.training.config import TrainConfig, load_config
from stars_fast.training.cost import outside_block
from stars_fast.training.distributed import World, processes
from stars_fast.training.interrupt import Interrupts
from stars_fast.training.metrics import Meter, MetricsLog, read_metrics
from stars_fast.training.optim import make_optimizer
from stars_fast.training.optional import need
from stars_fast.training.progress import Progress, banner
from stars_fast.training.run_folder import RunFolder
from stars_fast.training.seeds import derive
from stars_fast.training.step import Plan, StepLoss, plan_step, train_step
from stars_fast.training.tree import ConfigError


class TrainingFailure(RuntimeError):
    """A run that cannot recover; its state is saved and the message says why it stopped."""


class Outcome(NamedTuple):
    """How a run ended: steps done, the folder, the signal that stopped it (0 for none)."""

    step: int
    folder: Path
    signal: int


def train(config: TrainConfig, resume: bool = False) -> Outcome:
    """Train as `config` says, in this process or as one of those that torchrun started.

    With `resume` the run in the folder continues, bit for bit, from its newest checkpoint; a
    folder that is not there yet begins. Raises ConfigError for a configuration or folder that
    cannot be used, TrainingFailure for a run that cannot recover.
    """
    need("safetensors.torch", "checkpoints")
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    with processes(config.train.device) as world:
        folder = RunFolder(str(config.out))
        refusal = world.from_first(folder.refusal(config, resume) if world.first else None)
        if refusal:
            raise ConfigError(refusal)
        trainer = Trainer(config, folder, world)
        if world.first:
            folder.open(config, world.size)
        return trainer.run()


class Trainer:
    """One run: everything it holds, and the loop."""

    def __init__(self, config: TrainConfig, folder: RunFolder, world: World) -> None:
        self.config = config
        self.folder = folder
        self.world = world
        try:
            self.data = AdditionData(config.data)
            self.batches = Batches(
                self.data,
                config.seed,
                config.train.batch_size,
                config.train.accumulation,
                world.rank,
                world.size,
                world.device,
            )
        except (ValueError, OSError) as error:
            raise ConfigError(f"data: {error}") from error
        self.model = make_model(config).to(world.device)
        self.optimizer = make_optimizer(config.optim, self.model)
        self.meter = Meter(world.device)
        self.collapse = CollapseMonitor(math.log(config.model.vocab_size))
        self.step = 0
        self.processes = world.size
        self._load()
        loss = StepLoss(self.model, config)
        self.step_loss: StepLoss | DistributedDataParallel = loss
        if world.size > 1:
            self.step_loss = DistributedDataParallel(loss, gradient_as_bucket_view=True)

    def run(self) -> Outcome:
        """All remaining steps, then the evaluation and the figures."""
        self._greet()
        try:
            with Interrupts() as interrupts:
                stopped = self._loop(interrupts)
            if not stopped:
                self._finish()
        finally:
            self.progress.close()
            if self.log is not None:
                self.log.close()
        return Outcome(self.step, self.folder.path, stopped)

    def _loop(self, interrupts: Interrupts) -> int:
        """Steps until the end or a signal; the signal's number, 0 at the end."""
        train = self.config.train
        while self.step < train.steps:
            plan = plan_step(self.config, self.step)
            window = self.batches.window(self.step)
            stats = train_step(
                self.step_loss, self.optimizer, self.config, window, plan, self.world
            )
            self.meter.add(stats, plan)
            self.step += 1
            self.progress.step(plan.step, sum(plan.turns) / len(plan.turns))
            if self._due(train.log_every) or self._evaluates():
                self._record(plan)
            stopped = self.world.largest(interrupts.received)
            if stopped or self._due(train.save_every):
                self._save()
            if stopped:
                name = signal.Signals(stopped).name
                self.progress.say(
                    f"{name}: stopped after step {self.step}, saved; continue with "
                    f"stars-fast train {self.folder.path} --resume"
                )
                return stopped
        return 0

    def _due(self, every: int) -> bool:
        """Whether something that happens every so many steps, and at the end, is due."""
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)

    def _evaluates(self) -> bool:
        """Whether to evaluate after this step; the last step's evaluation is the run's."""
        every = self.config.eval.every
        return every > 0 and self.step % every == 0 and self.step < self.config.train.steps

    def _record(self, plan: Plan) -> None:
        """Write and show a line of metrics; stop a run that cannot recover."""
        row, streak = self.meter.line(plan)
        warning = None
        if self.config.penalised == "jacobian":
            warning = self.collapse.check(row["loss"], row["penalty"])
        if warning:
            row["warning"] = warning
            self.progress.say(f"warning at step {self.step}: {warning}")
        if self._evaluates() and self.config.eval.turns:
            row["accuracy"] = self._accuracy()
        if self.log is not None:
            self.log.write(row)
        self.progress.show(row)
        if streak >= self.config.train.max_nonfinite:
            self._save()
            raise TrainingFailure(
                f"stopped at step {self.step}: the loss or gradient of the last {streak} steps "
                f"was not finite. The weights before them are saved in {self.folder.path}; a new "
                f"run with a lower optim.lr or penalty.weight, or with optim.clip, may help"
            )

    def _accuracy(self) -> dict[int, float]:
        """Accuracy on unseen samples by number of turns, evaluated on the first process."""
        accuracy = {}
        if self.world.first:
            turns = list(self.config.eval.turns)
            accuracy = evaluate(self.model, self.data, turns, self.config.eval.limit)
        self.world.wait()
        self.progress.pause()
        self.meter.restart_clock()
        return accuracy

    def _save(self) -> None:
        """A checkpoint of this step, written by the first process."""
        start = time.perf_counter()
        if self.world.first:
            assert self.log is not None
            self.log.sync()
            state = {
                "step": self.step,
                "optimizer": self.optimizer.state_dict(),
                "meter": self.meter.state(),
                "collapse": self.collapse.state(),
                "processes": self.world.size,
            }
            keep = self.config.train.keep
            save_checkpoint(self.folder.checkpoints, self.step, self.model, state, keep)
        self.world.wait()
        self.progress.pause()
        self.meter.since += time.perf_counter() - start  # tokens/s is that of the steps

    def _load(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        checkpoint = self.world.from_first(latest(self.folder.checkpoints))
        if checkpoint is None:
            return
        load_weights(checkpoint, self.model)
        state = load_state(checkpoint)
        self.optimizer.load_state_dict(state["optimizer"])
        self.meter.load(state["meter"])
        self.collapse.load(state["collapse"])
        self.step = state["step"]
        self.processes = state["processes"]

    def _greet(self) -> None:
        """Open the metrics and the progress bar, and say what runs."""
        first = self.world.first
        train = self.config.train
        window = self.batches.window(0)
        share = sum(len(batch.labels) for batch in window) / sum(
            batch.tokens.numel() for batch in window
        )
        tokens = sum(batch.real_tokens for batch in window) * self.world.size
        rest = outside_block(self.model, share)
        self.progress = Progress(self.config, self.step, rest, first)
        self.progress.say(banner(self.config, self.model, tokens, rest))
        events = self.folder.tensorboard if train.tensorboard else None
        self.log = MetricsLog(self.folder.metrics, self.step, events) if first else None
        if self.log is not None and train.tensorboard and not self.log.has_tensorboard:
            self.progress.say("TensorBoard is not installed; metrics go to metrics.jsonl alone")
        where = f"{self.folder.path}, {self.world.size} x {self.world.device.type}"
        start = f"continues after step {self.step}" if self.step else "starts"
        self.progress.say(f"run folder {where}; {start}")
        if self.processes != self.world.size:
            self.progress.say(
                f"warning: the checkpoint is of {self.processes} processes and "
                f"{self.world.size} go on: the same samples and depths, but not bit for bit"
            )
        if never_penalises(self.config):
            self.progress.say("warning: penalty.start_step is not before the last step: no penalty")
        if not self.step:
            self.meter.restart_clock()

    def _finish(self) -> None:
        """The accuracy against turns, and the figures."""
        folder = self.folder
        accuracy = self._accuracy() if self.config.eval.turns else {}
        if not self.world.first:
            return
        if accuracy:
            folder.write_results({"step": self.step, "accuracy": accuracy})
            shown = "  ".join(f"{turns}: {value:.1%}" for turns, value in accuracy.items())
            self.progress.say(f"exact match by turns  {shown}")
        try:
            self._draw(accuracy)
        except ImportError as error:
            self.progress.say(str(error))
        self.progress.say(f"done: {folder.path}")

    def _draw(self, accuracy: dict[int, float]) -> None:
        """The figures: training curves, accuracy against turns."""
        from stars_fast.analysis.plots import accuracy_against_turns, training_curves

        config, folder = self.config, self.folder
        training_curves(read_metrics(folder.metrics), folder.path / "training.png")
        if accuracy:
            accuracy_against_turns(
                {config.name: accuracy},
                folder.path / "accuracy.png",
                title=f"{config.name}: exact match on unseen sums",
                trained_depth=config.trained_turns,
            )


def never_penalises(config: TrainConfig) -> bool:
    """Whether a method with a penalty ends before its penalty starts."""
    return config.penalised is not None and config.penalty.start_step >= config.train.steps


def make_model(config: TrainConfig) -> LoopedLM:
    """The model of `config` with its initial weights, a function of the seed."""
    torch.manual_seed(derive(config.seed, "init"))
    return LoopedLM(config.model)


def load_model(path: str | Path, step: int | None = None) -> tuple[LoopedLM, TrainConfig]:
    """The model of a run, at `step` or its newest checkpoint, and the run's configuration.

    Raises ConfigError if the run or the checkpoint is not there.
    """
    folder = RunFolder(path)
    if not folder.config.exists():
        raise ConfigError(f"{path} is not a run folder: it has no config.yaml")
    config = load_config(str(folder.config))
    model = LoopedLM(config.model)
    load_weights(folder.checkpoint(step), model)
    return model, config
