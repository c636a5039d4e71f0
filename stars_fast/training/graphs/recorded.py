"""One pair of graphs: what lies between prelude and head, forward and backward.

    first, inputs, samples, noise --forward--> h, value
    h_bar, value_bar --backward--> first_bar, inputs_bar, and gradients added where they are

All of these are buffers that stay where they are. The forward keeps what the backward needs, so
each forward wants its backward before the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stars_fast.models.loop import Start
from stars_fast.training.graphs.recorder import Recorder

Region = Callable[[Start], tuple[Tensor, Tensor]]
"""h^(t) and the penalty from the start of the turns."""


class Buffers:
    """Tensors that stay where they are, by name, shape and dtype.

    Attributes:
        runs: forwards that were replayed on them, of whatever pair.
    """

    def __init__(self) -> None:
        self.runs = 0
        self._held: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}

    def like(self, name: str, x: Tensor) -> Tensor:
        """The buffer of that name for tensors like x; its values are whatever they are."""
        key = name, x.shape, x.dtype
        if key not in self._held:
            self._held[key] = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return self._held[key]

    def copied(self, name: str, x: Tensor) -> Tensor:
        """The same with the values of x."""
        return self.like(name, x).copy_(x.detach())


class Pair:
    """Forward and backward of a region, to be recorded once and replayed.

    start: like those that the region starts from, which get a gradient if these require one.
    """

    def __init__(self, region: Region, start: Start, buffers: Buffers) -> None:
        self._region = region
        self._start = {
            name: (buffers.like(name, x), x.requires_grad)
            for name, x in zip(Start._fields, start, strict=True)
            if x is not None
        }
        self._buffers = buffers
        self._leaves: dict[str, Tensor] = {}
        self._results: dict[str, Tensor] = {}
        self._replays: tuple[Callable[[], None], Callable[[], None]] | None = None
        self.outputs: dict[str, Tensor] = {}
        self.wanted: set[str] = set()

    def forward(self) -> None:
        """Run the region, op by op."""
        # What autocast has cast elsewhere would not be cast again in a replay, nor the other way
        torch.clear_autocast_cache()
        with torch.enable_grad():
            self._leaves = {
                name: x.detach().requires_grad_(want) for name, (x, want) in self._start.items()
            }
            h, value = self._region(Start(self._leaves["state"], self._leaves.get("inputs")))
        torch.clear_autocast_cache()
        self._results = {"h": h, "value": value}
        self.wanted = {name for name, x in self._results.items() if x.requires_grad}
        self.outputs = {name: self._buffers.copied(name, x) for name, x in self._results.items()}

    def backward(self) -> None:
        """The backward of what `forward` has left."""
        results = {name: x for name, x in self._results.items() if name in self.wanted}
        bars = [self._buffers.like(f"{name}_bar", x) for name, x in results.items()]
        # As in a step, whose backward stands outside of autocast
        with torch.autocast(self._start["state"][0].device.type, enabled=False):
            torch.autograd.backward(list(results.values()), bars)
        for name, leaf in self._leaves.items():
            bar = self._buffers.like(f"{name}_bar", leaf)
            if leaf.requires_grad and leaf.grad is not None:
                bar.copy_(leaf.grad)
            else:
                bar.zero_()
        self._leaves, self._results = {}, {}

    def record(self, recorder: Recorder) -> None:
        """Capture both.

        Raises:
            RuntimeError: something in them can't be captured.
        """
        try:
            forward = recorder.record(self.forward)
            self._replays = forward, recorder.record(self.backward)
        finally:
            self._leaves, self._results = {}, {}

    def replay_forward(self) -> int:
        """Run the region again; the number of this run."""
        assert self._replays is not None
        self._replays[0]()
        self._buffers.runs += 1
        return self._buffers.runs

    def replay_backward(self, run: int, bars: dict[str, Tensor | None]) -> dict[str, Tensor]:
        """The backward of that run with cotangents of `outputs`; the cotangents of the start.

        Raises:
            RuntimeError: another run came between.
        """
        if run != self._buffers.runs:  # on a GPU also one of other turns: they share memory
            raise RuntimeError(
                "graphs: another micro-batch ran before the backward of this one, over what it had "
                "saved; call backward after each"
            )
        assert self._replays is not None
        for name in self.wanted:
            bar = bars[name]
            assert bar is not None
            self._buffers.copied(f"{name}_bar", bar)
        self._replays[1]()
        return {name: self._buffers.like(f"{name}_bar", x) for name, (x, _) in self._start.items()}

    def replay_once(self) -> None:
        """Forward and backward with the cotangents that the buffers hold."""
        assert self._replays is not None
        for replay in self._replays:
            replay()

    def draw_bars(self, seed: int) -> None:
        """Write normal numbers to the cotangents of `outputs`."""
        generator = torch.Generator().manual_seed(seed)
        for name in sorted(self.wanted):
            x = self.outputs[name]
            bar = torch.randn(x.shape, generator=generator) / x.numel() ** 0.5
            self._buffers.copied(f"{name}_bar", bar.to(x))

    def results(self) -> list[Tensor]:
        """The buffers that forward and backward have written to."""
        bars = (self._buffers.like(f"{name}_bar", x) for name, (x, _) in self._start.items())
        return [*self.outputs.values(), *bars]

    def __call__(self, start: Start) -> tuple[Tensor, Tensor]:
        """h^(t) and the penalty by replaying, in the graph of `start`, whose values the buffers
        have already. The gradients of parameters are added to theirs in the backward."""
        anchor = torch.zeros((), device=start.state.device, requires_grad=True)
        return _Replayed.apply(anchor, *start, self)


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, state: Tensor, inputs: Tensor | None, pair: Pair
    ) -> tuple[Tensor, Tensor]:
        ctx.pair, ctx.run = pair, pair.replay_forward()
        h, value = (pair.outputs[name].detach() for name in ("h", "value"))
        if "value" not in pair.wanted:
            ctx.mark_non_differentiable(value)
        return h, value

    @staticmethod
    def backward(ctx: Any, h_bar: Tensor, value_bar: Tensor) -> tuple[Tensor | None, ...]:
        bars = ctx.pair.replay_backward(ctx.run, {"h": h_bar, "value": value_bar})
        wanted = zip(("state", "inputs"), ctx.needs_input_grad[1:3], strict=True)
        return (None, *(bars[name].detach() if want else None for name, want in wanted), None)
