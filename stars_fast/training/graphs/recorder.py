"""Functions captured and run again: CUDA graphs, or a stand-in on the CPU.

A function that can be captured reads tensors that stay where they are and writes to such; it asks
no tensor for its values. The stand-in calls it again, so that all but the capture itself can be
tested without a GPU.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

Run = Callable[[], None]

_stands_in: ContextVar[bool] = ContextVar("stands_in", default=False)


class Recorder(ABC):
    """Captures functions; what one leaves free the next may use."""

    @abstractmethod
    def warm_up(self, run: Run) -> None:
        """Call a function as it will be captured, for all that happens at a first call."""

    @abstractmethod
    def record(self, run: Run) -> Run:
        """Capture a function: the result does again all that `run` does on the device. Until it is
        called nothing is done, or need not be.

        Raises:
            RuntimeError: the function does what can't be captured.
        """


class CudaRecorder(Recorder):
    """CUDA graphs in one pool of memory, which functions captured one after the other share: a
    replay may write over what those before it left there."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def warm_up(self, run: Run) -> None:
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            run()
        here.wait_stream(self._stream)

    def record(self, run: Run) -> Run:
        gc.collect()  # what was run op by op before may hold memory in circles
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # Other threads go on meanwhile: one pins the next batch, NCCL's looks at its events
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                run()
        except BaseException:
            torch.cuda.set_stream(here)  # which `torch.cuda.graph` leaves undone after an error
            raise
        return graph.replay


class StandIn(Recorder):
    """Calls a function again; on any device."""

    def warm_up(self, run: Run) -> None:
        run()

    def record(self, run: Run) -> Run:
        return run


@contextmanager
def stand_in() -> Iterator[None]:
    """Inside, a run on the CPU has a `StandIn`."""
    token = _stands_in.set(True)
    try:
        yield
    finally:
        _stands_in.reset(token)


def recorder_for(device: torch.device) -> Recorder | None:
    """The recorder of a device; None where there is none."""
    if device.type == "cuda":
        return CudaRecorder(device)
    return StandIn() if _stands_in.get() else None
