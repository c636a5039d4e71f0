"""Memory of the training step: what the backward keeps, measured, and what it computes a second
time where all of that does not fit.

    one micro-batch -> Activations (bytes) --+
    free memory ----> budget ----------------+-> choose(turns) -> Choice (logged, for run_turns)

What is alive at the worst moments of a step of T turns, r of them recomputed:

    shared + r state + (T - r) turn      kept by the turns, when the last one has run
      + rest + dual + flight             the dual turn's backward, which comes first
      + 2 rest                           or: the head's backward, with the gradient of what it kept
      + layer                            or: the backward of the last turn
    shared + r state + turn + layer      the r-th turn, recomputed and going backward; the plain
                                         turns after it are gone by then

With layers recomputed, `turn_by_layer` stands for `state`, and the last line ends in `layer` twice:
one recomputed layer and the gradients of its backward. `flight` are the gradients of a dual layer;
with the dual turn recomputed `dual_by_layer` stands for `dual`, and `flight` counts twice. That
gradients in flight take at most what one layer keeps is the only figure that is not measured.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from stars_fast.base.checks import check_number
from stars_fast.dual.tensor import Dual
from stars_fast.models.loop import Turn
from stars_fast.training.scale.distributed import World
from stars_fast.training.step.turns import KEEP_ALL, Recompute, TurnByLayer, recomputed

GIB = 1024**3

USABLE = 0.9
"""Part of the free memory that activations may take; allocators lose some to fragments."""

DUAL_COST = 2
"""Time of a dual turn over that of a turn."""


@dataclass
class MemoryConfig:
    """Which activations the backward keeps and which it computes a second time.

    recompute: none, turn (all turns, one at a time), layer (all layers of turns and dual turn, one
        at a time), or auto: the least that fits in the budget.
    budget: GiB for activations on a device; none for the free memory less what gradients and
        optimiser state still will take.
    """

    recompute: Literal["auto", "none", "turn", "layer"] = "auto"
    budget: float | None = None

    def __post_init__(self) -> None:
        choices = ("auto", "none", "turn", "layer")
        if self.recompute not in choices:
            raise ValueError(f"recompute: expected one of {choices}, got {self.recompute!r}")
        if self.budget is not None:
            check_number("budget", self.budget, 0.0, open_low=True)


class Activations(NamedTuple):
    """Bytes kept for the backward of one micro-batch.

    state: h itself.
    turn: by one plain turn, with the state it starts from.
    layer: by the biggest layer of a turn, with its part of what is shared; by the turn where layers
        are not known.
    turn_by_layer: by one turn whose layers are recomputed; None where layers are not known.
    dual, dual_layer, dual_by_layer: the same of the dual turn.
    rest: prelude, coda, head and loss.
    shared: what all turns keep together: weights cast by autocast, masks, tables.
    """

    state: int
    turn: int
    layer: int
    turn_by_layer: int | None
    dual: int
    dual_layer: int
    dual_by_layer: int | None
    rest: int
    shared: int

    def scaled(self, ratio: float) -> "Activations":
        """For a micro-batch of `ratio` times as many tokens, in rows of the same length."""
        sizes: dict[str, Any] = self._asdict()
        for name, size in sizes.items():
            if size is not None and name != "shared":
                sizes[name] = round(size * ratio)
        return Activations(**sizes)


class Choice(NamedTuple):
    """A choice of what is recomputed, and its bytes of activations at the peak."""

    recompute: Recompute
    peak: int
    budget: int | None

    @property
    def fits(self) -> bool:
        """Whether the peak is expected to stay within the budget."""
        return self.budget is None or self.peak <= self.budget

    def describe(self) -> str:
        """One line for the log, with a warning where it does not fit."""
        line = f"{self.recompute.describe()}: activations take {_gib(self.peak)}"
        if self.budget is None:
            return f"{line} (free memory is not known here)"
        if self.fits:
            return f"{line} of {_gib(self.budget)}"
        return (
            f"warning: activations are expected to take {_gib(self.peak)}, more than the budget of "
            f"{_gib(self.budget)}, and the step {self.recompute.describe()}; make micro-batches or "
            "rows smaller"
        )


def peak(activations: Activations, recompute: Recompute, turns: int, penalised: bool = True) -> int:
    """Bytes of activations at the worst moment of a step of `turns` turns in the graph.

    `penalised` says whether the step has a dual turn. The docstring of this file derives it.

    Raises:
        ValueError: a choice by layers that are not known.
    """
    a, r = activations, min(recompute.turns, turns)
    by_layer = recompute.per == "layer"
    kept = a.shared + r * (_known(a.turn_by_layer) if by_layer else a.state) + (turns - r) * a.turn
    dual, flight = 0, 0
    if penalised and a.dual:
        dual, flight = a.dual, a.dual_layer
        if recompute.dual:
            dual, flight = _known(a.dual_by_layer), 2 * a.dual_layer
    first = kept + max(a.rest + dual + flight, 2 * a.rest, a.layer)
    if r == 0:
        return first
    once = 2 * a.layer if by_layer else a.turn + a.layer
    return max(first, kept - (turns - r) * a.turn + once)


def choose(
    config: MemoryConfig,
    activations: Activations,
    budget: int | None,
    turns: int,
    penalised: bool = True,
) -> Choice:
    """Choose what to recompute in a step of `turns` turns in the graph; arithmetic alone.

    Under "auto" the choice is the one that costs the least time of those that fit in `budget`
    bytes, of equals the smallest; where none fits the smallest of all. So less budget never keeps
    more. `budget` None stands for no limit.

    Raises:
        ValueError: recompute "layer" where the layers are not known.
    """
    layers = activations.turn_by_layer is not None
    dual = penalised and activations.dual > 0
    if config.recompute == "none":
        plans = [KEEP_ALL]
    elif config.recompute == "turn":
        plans = [Recompute(turns, "turn")]
    elif config.recompute == "layer":
        plans = [Recompute(turns, "layer", dual)]
    else:
        duals = (False, True) if layers and dual else (False,)
        plans = [Recompute(0, "turn", each) for each in duals]
        for count in range(1, turns + 1):
            plans += [Recompute(count, "turn", each) for each in duals]
            plans += [Recompute(count, "layer", each) for each in duals if layers]
    choices = [Choice(plan, peak(activations, plan, turns, penalised), budget) for plan in plans]
    fitting = [choice for choice in choices if choice.fits]
    if fitting:
        return min(fitting, key=lambda choice: (_cost(choice.recompute), choice.peak))
    return min(choices, key=lambda choice: (choice.peak, _cost(choice.recompute)))


def measure_activations(
    model: nn.Module,
    prelude: Callable[[], Tensor],
    block: Turn,
    loss: Callable[[Tensor], Any],
    penalty: Callable[[Turn, Tensor], Any] | None = None,
    layered: TurnByLayer | None = None,
) -> Activations:
    """Bytes that each part of a step keeps for the backward, measured on one micro-batch.

    Runs the parts forward, without keeping anything and without moving the random generators: it
    needs no more memory than a forward without a graph. What autocast and mode the step has must
    hold around this call too. Under FSDP2 call it on every process, inside the forward of the root.

    Args:
        model: holds the parameters and buffers, which do not count.
        prelude: gives h^(0), [B, S, D].
        block: one turn.
        loss: coda, head and token loss of a state.
        penalty: of a block at a state, e.g. `fused_jsrr`; None for a run without one.
        layered: the layers of the block, from `turns.by_layer`; None if not known.
    """
    devices = [p.device for p in model.parameters() if p.is_cuda][:1]
    with torch.random.fork_rng(devices), torch.enable_grad(), _Kept(model) as kept:
        h = prelude()
        before = kept.new()
        h = block(h)
        first = kept.new()
        h = block(h)
        turn = kept.new()  # what the first has kept for all is not new
        loss(h)
        head = kept.new()
        if penalty is not None:
            penalty(block, h)
        dual = kept.new()

        layer, by_layer, dual_layer, dual_by_layer = turn, None, dual, None
        if layered is not None:
            layer, by_layer = _layers(model, layered, lambda each: each(h))
            if penalty is not None:
                dual_layer, dual_by_layer = _layers(model, layered, lambda each: penalty(each, h))
    return Activations(
        state=_bytes(h),
        turn=turn,
        layer=layer,
        turn_by_layer=by_layer,
        dual=dual,
        dual_layer=dual_layer,
        dual_by_layer=dual_by_layer,
        rest=before + head,
        shared=max(first - turn, 0),
    )


def activation_budget(
    config: MemoryConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    whole_gradients: bool = False,
    gradients_held: bool = False,
) -> int | None:
    """Bytes that activations may take on this process's device; None where that is not known.

    Free memory less what is not there yet: gradients, the optimiser's averages (two a parameter,
    as Adam's), one gradient before it is added to its sum, and under FSDP2 three of the biggest
    unit (gathered, being gathered, and its gradient). With `whole_gradients` FSDP2 keeps them, in
    fp32, between the micro-batches of a step. With `gradients_held` the memory of all gradients is
    taken already: DDP makes its buckets, which they are views of, when it wraps the model. A margin
    of a tenth stays free. Weights must not be gathered when this is called.
    """
    if config.budget is not None:
        return round(config.budget * GIB)
    params = [p for p in model.parameters() if p.requires_grad]
    free = free_memory(next(model.parameters()).device)
    if free is None:
        return None
    sizes = [_bytes(p) for p in params]
    coming = 0
    if not gradients_held:
        coming += sum(size for p, size in zip(params, sizes, strict=True) if p.grad is None)
    coming += sum(
        2 * size for p, size in zip(params, sizes, strict=True) if not optimizer.state.get(p)
    )
    coming += max(sizes, default=0) + 3 * _biggest_unit(model)
    if whole_gradients:
        coming += sum(4 * p.numel() for p in params)
    return max(int(USABLE * (free - coming)), 0)


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process can still take on `device`; None where the system does not say.

    On the CPU processes of one machine share alike, as torchrun counts them.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    limits = [limit for limit in (_available(), _group_limit()) if limit is not None]
    return min(limits) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if limits else None


def agree(
    activations: Activations, budget: int | None, world: World
) -> tuple[Activations, int | None]:
    """The largest activations and the smallest budget of any process, so that all choose alike.

    Under FSDP the choice sets the order of the collectives. Every process must call this.
    """
    sizes: dict[str, Any] = activations._asdict()
    sizes = {name: None if size is None else world.largest(size) for name, size in sizes.items()}
    unknown = world.largest(int(budget is None))
    smallest = -world.largest(-(budget or 0))
    return Activations(**sizes), None if unknown else smallest


class _Kept:
    """Counts the bytes of the storages that are saved for a backward, once each, without keeping
    them: no backward can follow. Parameters and buffers do not count."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._bytes = 0
        self._seen = WeakIdKeyDictionary()
        hook: Any = self._count
        self._hooks = saved_tensors_hooks(hook, hook)

    def __enter__(self) -> "_Kept":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def new(self) -> int:
        """Bytes since the last call."""
        found, self._bytes = self._bytes, 0
        return found

    def _count(self, tensor: Tensor) -> None:
        tensor = tensor.stack if isinstance(tensor, Dual) else tensor
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        self._seen[storage] = True
        # Asked anew each time: FSDP2 swaps its parameters while a layer runs.
        held = (*self._model.parameters(), *self._model.buffers())
        if all(each.untyped_storage() is not storage for each in held):
            self._bytes += storage.nbytes()


def _layers(model: nn.Module, layered: TurnByLayer, use: Callable[[Turn], Any]) -> tuple[int, int]:
    """Bytes kept by the biggest layer of a block, and by the block with its layers recomputed;
    `use` runs a block."""
    biggest = 0

    def run(layer: Any, *args: Any) -> Any:
        nonlocal biggest
        with _Kept(model) as kept:
            out = layer(*args)
        biggest = max(biggest, kept.new())
        return out

    use(layered(run))
    with _Kept(model) as kept:
        use(layered(recomputed))
    return biggest, kept.new()


def _cost(recompute: Recompute) -> int:
    """Extra time, in turns run forward."""
    return recompute.turns + DUAL_COST * recompute.dual


def _known(size: int | None) -> int:
    if size is None:
        raise ValueError(
            "recompute: expected auto, none or turn where the layers of the block are not known, "
            "got layer"
        )
    return size


def _bytes(tensor: Tensor) -> int:
    """Bytes of this process's part of a tensor."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


def _biggest_unit(model: nn.Module) -> int:
    """Bytes of the biggest group of parameters that FSDP2 gathers at once; 0 without it."""
    if not any(hasattr(p, "to_local") for p in model.parameters()):
        return 0
    from torch.distributed.fsdp import FSDPModule

    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    counted: set[int] = set()
    biggest = 0
    for unit in reversed(units):  # inner ones first; what they own is not their parent's
        own = [p for p in unit.parameters() if id(p) not in counted]
        counted |= {id(p) for p in own}
        biggest = max(biggest, sum(p.numel() * p.element_size() for p in own))
    return biggest


def _available() -> int | None:
    """Bytes of the machine's memory that can be taken without swapping (Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _group_limit() -> int | None:
    """Bytes left under the limit of this process's control group (containers on Linux)."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such file, or "max"
        return None
    return max(limit - used + int(stat.get("inactive_file", 0)), 0)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
