"""A kernel in Gluon run on the CPU: its own source, with PyTorch behind the names of Gluon.

A program's partitions are threads of which one runs at a time; which goes on at a barrier is drawn
from a seed. Copies by TMA end at any time after they were asked for, products of warp groups when
they are waited for. Shared memory begins as NaN.

Every access to a tile of shared memory is checked for races by vector clocks: it must be known, by
way of barriers, to come after the accesses that it conflicts with, whatever the order of this run.
A product or a copy reads until it is waited for. What a partition has stored needs its fence before
a product or a copy reads it. Of barriers, the phases are counted as in PTX: a wait that could take
one phase for another is an error, and so is a run in which nobody can go on.

Not emulated: layouts, what the four warps of a partition owe each other (the compiler's work), and
the rounding of products.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Race(AssertionError):
    """An access that may come at another time than it must."""


class Stuck(AssertionError):
    """No partition can go on."""


class _Stopped(BaseException):
    """Ends the partitions that are left when one has failed."""


def _later(clock: Counter, other: Counter) -> bool:
    """Whether all of `other` is known to `clock`."""
    return all(clock[name] >= count for name, count in other.items())


class _Partition:
    def __init__(self, name: str, clock: Counter) -> None:
        self.name = name
        self.clock = Counter(clock)
        self.tick()
        self.ready: Callable[[], bool] = lambda: True
        self.turn = threading.Semaphore(0)
        self.products: list[_Product] = []
        self.stores: list[tuple[_Cell, Tensor, tuple]] = []
        self.unfenced: set[_Cell] = set()
        self.waits: Counter = Counter()
        self.done = False

    def tick(self) -> None:
        self.clock[self.name] += 1


class _Cell:
    """One tile of shared memory: who wrote it last, who has read it since."""

    def __init__(self) -> None:
        self.written: Counter = Counter()
        self.read: Counter = Counter()
        self.under_way = 0  # products and copies that read it
        self.unfenced_by: str | None = None

    def begin_read(self, by: _Partition, asynchronous: bool) -> None:
        if not _later(by.clock, self.written):
            raise Race(f"{by.name} reads what may not be written yet")
        if asynchronous and self.unfenced_by is not None:
            raise Race(f"{by.name} reads what {self.unfenced_by} stored without a fence")
        self.under_way += asynchronous

    def end_read(self, by: _Partition, asynchronous: bool) -> None:
        self.under_way -= asynchronous
        self.read[by.name] = by.clock[by.name]

    def write(self, by: _Partition, agent: str) -> None:
        if self.under_way:
            raise Race(f"{agent} writes what a product or a copy may still read")
        if not (_later(by.clock, self.written) and _later(by.clock, self.read)):
            raise Race(f"{agent} writes what may still be read or written")
        self.read = Counter()


class _Shared:
    """Shared memory: `cells` of tiles along the first dimension, or a view of one tile."""

    def __init__(self, machine: _Machine, data: Tensor, cells: Any) -> None:
        self.machine, self.data, self.cells = machine, data, cells

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, index: int) -> _Shared:
        return _Shared(self.machine, self.data[int(index)], self.cells[int(index)])

    def reshape(self, shape: Iterable[int]) -> _Shared:
        return _Shared(self.machine, self.data.view(*shape), self.cells)

    def permute(self, order: Iterable[int]) -> _Shared:
        return _Shared(self.machine, self.data.permute(*order), self.cells)

    def store(self, value: Tensor) -> None:
        by = self.machine.current
        assert value.dtype == self.dtype
        assert value.shape == self.data.shape
        self.cells.write(by, by.name)
        by.tick()
        self.cells.written = Counter({by.name: by.clock[by.name]})
        self.cells.unfenced_by = by.name
        by.unfenced.add(self.cells)
        self.data.copy_(value)

    def load(self, layout: object) -> Tensor:
        by = self.machine.current
        self.cells.begin_read(by, False)
        self.cells.end_read(by, False)
        return self.data.clone()


class _Barrier:
    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = 0
        self.phase = 0
        self.clock: Counter = Counter()
        self.completed: Counter = Counter()

    def arrive(self, clock: Counter, count: int = 1, size: int = 0) -> None:
        self.clock |= clock
        self.pending -= count
        self.bytes += size
        assert self.pending >= 0, "more arrivals than the barrier counts"
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            self.completed = Counter(self.clock)


class _Barriers:
    """An array of barriers in shared memory."""

    def __init__(self, count: int) -> None:
        self.found: list[_Barrier | None] = [None] * count

    def index(self, index: int) -> tuple[_Barriers, int]:
        return self, int(index)


class _Product:
    """A product that is under way. Its value is there when it was waited for."""

    def __init__(self, by: _Partition, a: _Shared, b: _Shared, before: Any, wide: torch.dtype):
        self.by, self.a, self.b, self.before, self.wide = by, a, b, before, wide
        self.value: Tensor | None = None
        for x in (a, b):
            x.cells.begin_read(by, True)
        assert a.shape[1] == b.shape[0]

    def finish(self) -> None:
        product = self.a.data.to(self.wide) @ self.b.data.to(self.wide)
        before = self.before.value if isinstance(self.before, _Product) else self.before
        assert self.before is None or before is not None
        self.value = product if before is None else before + product
        self.by.tick()
        for x in (self.a, self.b):
            x.cells.end_read(self.by, True)


class _Pointer:
    def __init__(self, data: Tensor, offset: Any = 0) -> None:
        self.data, self.offset = data, offset

    def __add__(self, other: Any) -> _Pointer:
        return _Pointer(self.data, self.offset + other)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        offset, mask = torch.broadcast_tensors(
            torch.as_tensor(self.offset), torch.as_tensor(True if mask is None else mask)
        )
        used = offset[mask]
        assert used.numel() == 0 or 0 <= used.min() <= used.max() < self.data.numel()
        return offset, mask


class _Tiles:
    """A tensor descriptor: x [a, b, c, rows, columns] in blocks [1, 1, 1, n, m]."""

    layout = None

    def __init__(self, descriptor: Any) -> None:
        self.x = descriptor.base.as_strided(descriptor.shape, descriptor.strides)
        self.block_shape = list(descriptor.block_shape)
        self.dtype = self.x.dtype

    def place(self, coordinates: list) -> tuple[Tensor, tuple[slice, slice]]:
        a, b, c, row, column = (int(i) for i in coordinates)
        assert row >= 0
        assert column == 0
        rows, columns = self.block_shape[3:]
        rows, columns = min(rows, self.x.shape[3] - row), min(columns, self.x.shape[4])
        inside = slice(0, max(rows, 0)), slice(0, columns)
        return self.x[a, b, c, row:][inside], inside


class _Machine:
    """The state of one program that runs.

    Attributes:
        wide: the dtype that `gl.float32` is.
        broken: what is left out, so that a test sees the check fail: "fence", or the number of a
            barrier that nobody waits for.
        products: how many were computed.
    """

    def __init__(self, program: int, wide: torch.dtype, seed: int, broken: object) -> None:
        self.program, self.wide, self.broken = program, wide, broken
        self.random = random.Random(seed)
        self.current = _Partition("program", Counter())
        self.back = threading.Semaphore(0)
        self.copies: list[Callable[[], None]] = []
        self.copied = 0
        self.products = 0
        self.failed: BaseException | None = None

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Others go on, and this partition when it is ready and drawn."""
        me = self.current
        if me.name == "program":
            assert ready()
            return
        me.ready = ready
        self.back.release()
        me.turn.acquire()
        if self.failed is not None:
            raise _Stopped

    def warp_specialize(self, functions: list, warps: object, registers: object) -> None:
        program = self.current
        program.tick()
        partitions = [_Partition(function.__name__, program.clock) for function, _ in functions]

        def run(partition: _Partition, function: Callable, arguments: tuple) -> None:
            partition.turn.acquire()
            try:
                if self.failed is None:
                    function(*arguments)
                    assert not partition.products, f"{partition.name} leaves products under way"
                    assert not partition.stores, f"{partition.name} leaves stores under way"
            except _Stopped:
                pass
            except BaseException as error:
                self.failed = error
            partition.done = True
            self.back.release()

        threads = [
            threading.Thread(target=run, args=(partition, *call), daemon=True)
            for partition, call in zip(partitions, functions, strict=True)
        ]
        for thread in threads:
            thread.start()
        while self.failed is None and not all(p.done for p in partitions):
            able: list[Any] = [p for p in partitions if not p.done and p.ready()]
            able += self.copies
            if not able:
                left = [p.name for p in partitions if not p.done]
                self.failed = Stuck(f"all wait: {left}")
                break
            chosen = self.random.choice(able)
            if chosen in self.copies:
                self.copies.remove(chosen)
                chosen()
            else:
                self.current = chosen
                chosen.turn.release()
                self.back.acquire()
        for partition, thread in zip(partitions, threads, strict=True):
            partition.turn.release()
            thread.join()
        self.current = program
        if self.failed is not None:
            raise self.failed
        assert not self.copies, "copies that nobody waits for"

    # Barriers and fences.

    def init(self, barrier: tuple[_Barriers, int], count: int) -> None:
        barriers, index = barrier
        barriers.found[index] = _Barrier(count)

    def arrive(self, barrier: tuple[_Barriers, int], count: int = 1) -> None:
        barriers, index = barrier
        self.current.tick()
        barriers.found[index].arrive(self.current.clock, count)
        self.current.tick()
        self.pause()

    def expect(self, barrier: tuple[_Barriers, int], size: int) -> None:
        barriers, index = barrier
        barriers.found[index].arrive(self.current.clock, 1, int(size))
        self.pause()

    def wait(self, barrier: tuple[_Barriers, int], parity: int) -> None:
        barriers, index = barrier
        if self.broken == index:
            return
        found, me, parity = barriers.found[index], self.current, int(parity)
        self.pause(lambda: found.phase % 2 != parity)
        ahead = found.phase - me.waits[index]
        me.waits[index] += 1
        # At the first wait 1, or 0 for the phase before all; then always the same.
        assert ahead == me.waits.setdefault((index, "ahead"), ahead), "a phase was passed over"
        assert ahead in (0, 1)
        me.clock |= found.completed

    def fence(self) -> None:
        if self.broken == "fence":
            return
        for cell in self.current.unfenced:
            cell.unfenced_by = None
        self.current.unfenced.clear()

    # Copies.

    def copy_in(self, tiles: _Tiles, place: list, barrier: tuple, to: _Shared) -> None:
        by = self.current
        self.copied += 1
        agent = f"copy {self.copied}"
        to.cells.write(by, agent)
        to.cells.written = Counter({agent: 1})
        clock = by.clock | Counter({agent: 1})
        source, inside = tiles.place(place)

        def run() -> None:
            to.data.zero_()
            to.data[0, 0, 0][inside] = source
            barriers, index = barrier
            barriers.found[index].arrive(clock, 0, -2 * to.data.numel())

        self.copies.append(run)
        self.pause()

    def copy_out(self, tiles: _Tiles, place: list, source: _Shared) -> None:
        source.cells.begin_read(self.current, True)
        self.current.stores.append((source.cells, source.data, tiles.place(place)))
        self.pause()

    def store_wait(self, pending: int) -> None:
        by = self.current
        while len(by.stores) > pending:
            cell, data, (to, inside) = by.stores.pop(0)
            to.copy_(data[0, 0, 0][inside])
            cell.end_read(by, True)

    # Products.

    def product(
        self, a: _Shared, b: _Shared, before: Any, *, use_acc: bool = True, is_async: bool = False
    ) -> _Product:
        assert is_async
        self.products += 1
        made = _Product(self.current, a, b, before if use_acc else None, self.wide)
        self.current.products.append(made)
        self.pause()
        return made

    def product_wait(self, pending: int, results: list) -> Any:
        self.pause()
        under_way = self.current.products
        while len(under_way) > pending:
            under_way.pop(0).finish()
        values = [x.value for x in results]
        assert all(value is not None for value in values), "a result that was not waited for"
        return values[0] if len(values) == 1 else tuple(values)

    # Global memory.

    def load(self, pointer: _Pointer, mask: Any = None, other: Any = 0) -> Tensor:
        offset, mask = pointer.places(mask)
        return torch.where(mask, pointer.data[torch.where(mask, offset, 0)], other)

    def atomic_add(self, pointer: _Pointer, value: Tensor, mask: Any, sem: str) -> None:
        offset, mask = pointer.places(mask)
        added = value[mask].to(pointer.data.dtype)
        pointer.data.index_put_((offset[mask],), added, accumulate=True)
        self.pause()

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: object) -> Any:
        if layout == "barriers":
            return _Barriers(shape[0])
        data = torch.full(shape, float("nan"), dtype=dtype)
        return _Shared(self, data, [_Cell() for _ in range(shape[0])])

    def names(self) -> tuple[dict[str, object], dict[str, object]]:
        """Stand-ins for the modules of Gluon, and for its functions that kernels import."""

        class NVMMASharedLayout:
            get_default_for = staticmethod(lambda *arguments: None)

        language = SimpleNamespace(
            float32=self.wide,
            int64=torch.int64,
            constexpr=lambda x: x,
            program_id=lambda axis: torch.tensor(self.program, dtype=torch.int32),
            arange=lambda start, stop, layout=None: torch.arange(start, stop, dtype=torch.int32),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            exp2=torch.exp2,
            where=lambda mask, x, y: torch.where(mask, x, y),
            minimum=lambda x, y: torch.minimum(*map(torch.as_tensor, (x, y))),
            maximum=lambda x, y: torch.maximum(*map(torch.as_tensor, (x, y))),
            min=torch.amin,
            max=torch.amax,
            cdiv=lambda x, y: (x + y - 1) // y,
            static_range=range,
            load=self.load,
            atomic_add=self.atomic_add,
            allocate_shared_memory=self.allocate,
            warp_specialize=self.warp_specialize,
            SliceLayout=lambda *arguments: None,
            BlockedLayout=lambda *arguments: None,
            NVMMADistributedLayout=lambda *arguments: None,
            NVMMASharedLayout=NVMMASharedLayout,
        )
        barriers = SimpleNamespace(
            init=self.init,
            arrive=self.arrive,
            expect=self.expect,
            wait=self.wait,
            MBarrierLayout=lambda: "barriers",
        )
        modules = {
            "language": language,
            "mbarrier": barriers,
            "tma": SimpleNamespace(store_wait=self.store_wait),
        }
        functions = {
            "async_load": self.copy_in,
            "async_copy_global_to_shared": self.copy_in,
            "async_store": self.copy_out,
            "async_copy_shared_to_global": self.copy_out,
            "fence_async_shared": self.fence,
            "warpgroup_mma": self.product,
            "warpgroup_mma_wait": self.product_wait,
        }
        return modules, functions


def _translated(kernel: Any, machine: _Machine) -> Callable[..., None]:
    """The Python function of a kernel, and of those it calls, with a machine's names."""
    modules, functions = machine.names()
    scopes: dict[int, dict[str, object]] = {}

    def function_of(kernel: Any) -> Callable[..., None]:
        source = kernel.fn
        scope = source.__globals__
        if id(scope) not in scopes:
            scopes[id(scope)] = translated = {}
            translated.update({name: translate(value) for name, value in scope.items()})
        return FunctionType(
            source.__code__, scopes[id(scope)], source.__name__, source.__defaults__
        )

    def translate(value: Any) -> object:
        if isinstance(value, ModuleType):
            return modules.get(value.__name__.rsplit(".", 1)[-1], value)
        if type(value).__name__ == "constexpr":
            return value.value
        if hasattr(value, "fn") and hasattr(value, "__name__"):
            return function_of(value)
        return functions.get(getattr(value, "__name__", ""), value)

    return function_of(kernel)


class Emulated:
    """A stand-in for a kernel: launched in the same way, it runs in the emulator.

    Attributes:
        products: how many each program of the last launch computed.
    """

    def __init__(
        self, kernel: Any, wide: torch.dtype, seed: int = 0, broken: object = None
    ) -> None:
        """
        Args:
            kernel: a function that `gluon.jit` was applied to.
            wide: the dtype in which it computes what it computes in fp32.
            seed: of the order in which partitions and copies go on.
            broken: what to leave out: "fence", or the waits at the barrier of that number.
        """
        self.kernel, self.wide, self.seed, self.broken = kernel, wide, seed, broken
        self.products: list[int] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        """
        Raises:
            Race, Stuck, AssertionError: what the kernel does wrong, by the call that is returned.
        """

        def run(*arguments: object, **options: object) -> None:
            constants = {name: x for name, x in options.items() if name in self.kernel.arg_names}
            self.products = []
            for program in range(grid[0]):
                machine = _Machine(program, self.wide, self.seed * grid[0] + program, self.broken)
                _translated(self.kernel, machine)(*map(_argument, arguments), **constants)
                self.products.append(machine.products)

        return run


def _argument(x: Any) -> object:
    if isinstance(x, Tensor):
        return _Pointer(x.view(-1))
    if isinstance(x, int):
        return torch.tensor(x, dtype=torch.int32)
    return _Tiles(x) if hasattr(x, "block_shape") else x
