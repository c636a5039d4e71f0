"""The graphs of a run: one pair for each number of turns that comes often, captured when it first
comes; the other numbers run op by op.

All pairs share their buffers, and on a GPU one pool of memory, which is as large as the deepest of
them needs: a micro-batch runs backward before the next one runs forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from stars_fast.base.errors import ConfigError
from stars_fast.base.seeds import seed_dropout
from stars_fast.data.batches import MicroBatch
from stars_fast.data.fixed_shape import FixedShape
from stars_fast.models.hooks import all_are_hooked
from stars_fast.models.loop import Start
from stars_fast.ops.spans import no_questions_of_masks
from stars_fast.training.config import RunConfig
from stars_fast.training.graphs.kinds import FEWEST, Key, worth_capturing
from stars_fast.training.graphs.recorded import Buffers, Pair
from stars_fast.training.graphs.recorder import Recorder
from stars_fast.training.scale.distributed import World
from stars_fast.training.scale.flat_gradients import FlatGradients
from stars_fast.training.step.micro_step import MicroStep
from stars_fast.training.step.penalties.base import NoPenalty, Penalty
from stars_fast.training.step.precision import autocast
from stars_fast.training.step.train_step import StepLoss, run_between

CLOSE = 0.02
"""How far a replay may be from the same ops one by one, relative to their norm: atomic additions of
PyTorch's attention differ in bf16 from run to run by a tenth of that, what reads a wrong buffer by
the whole."""

_SHORT = 2
"""Turns of what is tried out: the first starts from another dtype than the others, perhaps."""


class Graphs:
    """Graphs in the place of `StepLoss.between`.

    Micro-batches are of `shape`. With `strict` rare ones are captured too, and a capture that fails
    is an error; else the kinds that are not captured yet run op by op from then on, and `say` is
    told. The processes of the `world` capture the same kinds: what fails on one fails on all.

    Attributes:
        keys: the kinds of micro-batches that are, or will be, captured.
    """

    def __init__(
        self,
        loss: StepLoss,
        config: RunConfig,
        shape: FixedShape,
        recorder: Recorder,
        world: World,
        strict: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        self.keys = worth_capturing(config, 0 if strict else FEWEST)
        self._loss = loss
        self._config = config
        self._recorder = recorder
        self._world = world
        self._device = world.device
        self._strict = strict
        self._say = say
        self._tokens = shape.tokens(world.device)
        self._buffers = Buffers()
        self._pairs: dict[Key, Pair] = {}
        self._noise: dict[Pair, Tensor] = {}
        self._now: MicroStep | None = None
        self._tried: list[Pair] = []  # the pool of memory lives as long as a graph in it
        self._drops = any(
            isinstance(each, nn.Dropout) and each.p > 0 for each in loss.loop.modules()
        )

    def between(self, micro: MicroStep, turns: int, penalty: Penalty) -> tuple[Tensor, Tensor]:
        """As `train_step.Between`, of a micro-batch of the shape."""
        key = Key(turns, not isinstance(penalty, NoPenalty))
        again = micro.recompute
        draws = self._drops and (again.dual or again.turns > 0)  # masks that must be drawn again
        if key in self.keys and not draws and torch.is_grad_enabled():
            pair = self._pairs.get(key) or self._captured(key, micro, penalty)
            # A replay calls no module, which hooks of all modules of the process wait for
            if pair is not None and not all_are_hooked():
                with self._loaded(micro, pair):
                    return pair(Start(micro.first, micro.inputs))
        with no_questions_of_masks():
            return run_between(micro, turns, penalty)

    def _captured(self, key: Key, micro: MicroStep, penalty: Penalty) -> Pair | None:
        if self._of_all("hooks" if all_are_hooked() else None) is not None:
            return None  # what they do would be captured; later, perhaps
        pair, why = self._new(micro, key.turns, penalty), None
        try:
            pair.record(self._recorder)
        except Exception as error:  # whatever CUDA or a kernel has against it
            why = f"a micro-batch of {key.turns} turns can't be captured: {_line(error)}"
        why = self._of_all(why)
        if why is None:
            self._pairs[key] = pair
            return pair
        self.keys = frozenset(self._pairs)
        if self._strict:
            raise ConfigError(f"train.graphs: expected auto or off, got on: {why}")
        self._say(f"warning: graphs: {why}; what is not captured yet runs op by op")
        return None

    def _of_all(self, why: str | None) -> str | None:
        """The first of the processes' reasons; with its number where there are several."""
        if why is not None and self._world.size > 1:
            why = f"process {self._world.rank}: {why}"
        return self._world.first_reason(why)

    def _new(self, micro: MicroStep, turns: int, penalty: Penalty) -> Pair:
        """The pair of a kind of micro-batch, of which `micro` is one."""
        loop, config, recompute = self._loss.loop, self._config, micro.recompute
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        known = replace(micro.batch, tokens=none, positions=none, labels=none)

        def region(start: Start) -> tuple[Tensor, Tensor]:
            # Anew each time, for nothing that was worked out of the tokens to be kept
            batch = replace(known, samples=replace(self._tokens))
            again = MicroStep(
                loop, batch, config, 0, recompute, start, lambda h: self._noise_like(pair, h)
            )
            with no_questions_of_masks():
                return run_between(again, turns, penalty)

        pair = Pair(region, Start(micro.first, micro.inputs), self._buffers)
        return pair

    def _noise_like(self, pair: Pair, h: Tensor) -> Tensor:
        """The buffer of the penalty's noise at a state, which `_loaded` fills before a replay."""
        if pair not in self._noise:
            self._noise[pair] = self._buffers.like("noise", h)
            if self._now is not None:
                self._fill_noise(pair, self._now)
        return self._noise[pair]

    @contextmanager
    def _loaded(self, micro: MicroStep, pair: Pair) -> Iterator[None]:
        """Write to the buffers what the pair reads of a micro-batch, and run it inside."""
        samples = micro.batch.samples
        for to, x in (
            (self._tokens.real, samples.real),
            (self._tokens.cu_seqlens, samples.cu_seqlens),
        ):
            if to is not None and x is not None:
                to.copy_(x, non_blocking=True)
        for name, value in zip(Start._fields, (micro.first, micro.inputs), strict=True):
            if value is not None:
                self._buffers.copied(name, value)
        if pair in self._noise:
            self._fill_noise(pair, micro)
        self._now = micro
        try:
            yield
        finally:
            self._now = None

    def _fill_noise(self, pair: Pair, micro: MicroStep) -> None:
        noise = self._noise[pair]
        noise.copy_(micro.noise(noise, micro.batch.samples))

    # -- before the first step

    def try_out(self, windows: Sequence[MicroBatch], gradients: FlatGradients) -> str | None:
        """Capture short micro-batches of each kind on the first of the `windows`, and replay them
        on the last, beside the same ops one by one. The first of all calls of their kernels, for
        later captures to meet none. Every process calls it.

        Returns:
            Why there can be no graphs, on all processes what the first of them has against it; None
            if all agree. Gradients are left at zero.
        """
        return self._of_all(self._tried_all(windows, gradients))

    def _tried_all(self, windows: Sequence[MicroBatch], gradients: FlatGradients) -> str | None:
        devices = [self._device] if self._device.type == "cuda" else []
        try:
            for penalised in sorted({key.penalised for key in self.keys}):
                penalty = self._loss.penalty if penalised else NoPenalty(self._config)
                with torch.random.fork_rng(devices):
                    why = self._tried_out(penalty, windows, gradients)
                if why is not None:
                    return why
        except Exception as error:  # whatever CUDA or a kernel has against it
            return f"the turns can't be captured: {_line(error)}"
        finally:
            gradients.zero()
        return None

    def _tried_out(
        self, penalty: Penalty, windows: Sequence[MicroBatch], gradients: FlatGradients
    ) -> str | None:
        loop, config = self._loss.loop, self._config
        self._loss.low.refresh()
        casts = autocast(config.precision, self._device, sharded=False)
        with self._loss.low.used(), casts:
            first, other = (MicroStep(loop, windows[i], config, -i) for i in (0, -1))
            pair = self._new(first, _SHORT + penalty.last_turns, penalty)
            self._tried.append(pair)

            def once() -> None:
                pair.forward()
                pair.backward()

            with self._loaded(first, pair):
                self._recorder.warm_up(once)
            pair.record(self._recorder)
            found = []
            for run in (pair.replay_once, once):
                gradients.zero()
                seed_dropout(config.seed, 0, 0, self._device)
                with self._loaded(other, pair):
                    pair.draw_bars(config.seed)
                    run()
                found.append([x.clone() for x in (*pair.results(), *gradients.flat)])
        for replayed, expected in zip(*found, strict=True):
            off = (replayed - expected).double().norm()
            if not off <= CLOSE * expected.double().norm():
                return "a captured micro-batch does not give what its ops give one by one"
        return None


def _line(error: Exception) -> str:
    """An error in one line."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first[:200]}"
