"""Random programs: a seed gives a block `h -> y` as a list of lines of Python.

Every line is run by torch as it is drawn, on tensors that require grad: what torch refuses, in the
forward or in the backward pass, is drawn again, so that a program is legal by construction. The
live values are the result, so that a write that reached too little or too much is seen.
"""

import functools
import random
import re
from dataclasses import dataclass, replace

import torch
from fuzz import tools
from fuzz.ops import COMPLEX, IN_PLACE, PURE, VIEWS
from torch.utils.checkpoint import checkpoint

SHAPES = [(2, 3, 4), (3, 4), (2, 4), (4,), (2, 2, 2, 4), (1, 3, 4), (2, 3, 2)]
WIDEST = 8  # of a weight
LARGEST = 96  # elements of a value
TALLEST = 30.0  # a value; finite differences see nothing of what is small beside it
TRIES = 20  # of a line
LIVE = 8  # values of a result
START = "start"  # the op of a program's first line

# What a program can call; a report prints this file above its programs.
TOOLS = {name: getattr(tools, name) for name in tools.__all__}

# Which of the inputs require grad. What torch allows depends on it: under no_grad, a write to what
# a backward pass would need, or to one of several views. The last two run the whole block inside.
MODES = {"all": "hWb", "weights": "Wb", "no_grad": "", "inference": ""}
MODES |= {"checkpoint": "hWb", "save_on_cpu": "Wb"}
LAYOUTS = {"contiguous": 16, "transposed": 2, "turned": 1, "swapped": 1, "sliced": 3}
LAYOUTS |= {"expanded": 1, "expanded inside": 1}
SCATTERS = ("select_scatter", "slice_scatter")


def lay_out(h, layout):
    """h with the strides of a layout."""
    dims = range(h.dim())
    if layout == "transposed":
        return with_order(h, tuple(reversed(dims)))
    if layout == "turned":
        return with_order(h, (*dims[1:], 0))
    if layout == "swapped":
        return with_order(h, (*dims[:-2], *reversed(dims[-2:])))
    if layout == "sliced":
        return torch.cat((h, h), -1)[..., : h.shape[-1]]
    if layout == "expanded" and h.dim() > 1:
        return h[:1].expand(h.shape)
    if layout == "expanded inside" and h.dim() > 2:
        return h[:, :1].expand(h.shape)
    return h


def with_order(h, order):
    """h with its dimensions in this order in memory, slowest first."""
    back = sorted(range(h.dim()), key=order.__getitem__)
    return h.permute(order).contiguous().permute(back)


@dataclass(frozen=True)
class Line:
    op: str
    text: str


class Held:
    """What a program detaches. Finite differences must hold it: `held(x)` hands on what it is given
    and keeps it, or, when `replay` is set, hands out what it kept instead."""

    def __init__(self):
        self.kept, self.at, self.replay = [], 0, False

    def __call__(self, x):
        if self.replay:
            self.at += 1
            return self.kept[self.at - 1]
        self.kept.append(x.clone())
        return x

    def rewind(self, replay):
        self.at, self.replay = 0, replay
        if not replay:
            self.kept = []


@dataclass(frozen=True)
class Program:
    """`lines` are the body of `def block(h, W, b, c)`, `outputs` what it returns, one after the
    other in one vector; `mode` says which inputs require grad and what is around the block,
    `layout` how h lies in memory."""

    seed: int
    mode: str
    shape: tuple[int, ...]
    layout: str
    lines: tuple[Line, ...]
    outputs: tuple[str, ...]

    def source(self):
        body = [line.text for line in self.lines]
        body.append(f"return torch.cat([{', '.join(self.outputs)}])")
        return "\n".join(["def block(h, W, b, c):", *(f"    {text}" for text in body)])

    def block(self, held=tools.held):
        names = TOOLS | {"held": held}
        exec(compile(self.source(), "<program>", "exec"), names)
        block = names["block"]
        if self.mode == "checkpoint":
            return functools.partial(checkpoint, block, use_reentrant=False)
        return functools.partial(tools.on_cpu, block) if self.mode == "save_on_cpu" else block

    def inputs(self):
        """h, v, the weights W and b and the constant c, by name."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        inputs = {"h": lay_out(draw(*self.shape), self.layout), "v": draw(*self.shape)}
        inputs |= {"W": draw(WIDEST, WIDEST) / 2, "b": 1 + draw(WIDEST) / 2, "c": draw(WIDEST)}
        for name in MODES[self.mode]:
            inputs[name].requires_grad_()
        return inputs

    def without(self, lines=(), outputs=()):
        kept = [line for i, line in enumerate(self.lines) if i not in lines]
        left = [out for i, out in enumerate(self.outputs) if i not in outputs]
        return replace(self, lines=tuple(kept), outputs=tuple(left))

    def plainer(self, i):
        """Line i, `x = ...`, as `x = h * 1.0`."""
        target = self.lines[i].text.split(" = ")[0]
        start = Line(START, f"{target} = h * 1.0")
        return replace(self, lines=(*self.lines[:i], start, *self.lines[i + 1 :]))

    def around(self):
        """The grad mode in which it runs."""
        if self.mode == "inference":
            return torch.inference_mode()
        return torch.set_grad_enabled(self.mode != "no_grad")

    def title(self):
        return f"seed {self.seed}, h {list(self.shape)} {self.layout}, mode {self.mode}"

    def ops(self):
        return tuple(line.op for line in self.lines)


class Rejected(Exception):
    """A line that can't be drawn for this value, or that would make the program useless."""


class Draw:
    """The fields of one line: `text` with everything in braces filled in."""

    def __init__(self, rng, values, x):
        self.rng, self.values, self.x = rng, values, x
        self.tensor = values[x]
        self.fixed = {"x": x}

    def fill(self, text):
        return re.sub(r"\{(\w+)\}", lambda match: self.field(match[1]), text)

    def field(self, name):
        if name in self.fixed:
            return self.fixed[name]
        value = getattr(self, name)()
        if name not in ("s", "o", "k", "mask"):
            self.fixed[name] = value
        return value

    # -- numbers and dimensions

    def k(self):
        return str(self.rng.choice((0.5, -0.7, 1.3, 2, -1.5)))

    def _dims(self):
        ndim = self.tensor.dim()
        if not ndim:
            raise Rejected
        return ndim

    def d(self):
        ndim = self._dims()
        return str(self.rng.choice((-1, self.rng.randrange(-ndim, ndim))))

    def e(self):
        ndim = self._dims()
        taken = int(self.field("d")) % ndim
        others = [i for i in range(-ndim, ndim) if i % ndim != taken]
        if not others:
            raise Rejected
        return str(self.rng.choice(others))

    def perm(self):
        order = list(range(self._dims()))
        self.rng.shuffle(order)
        return ", ".join(map(str, order))

    def width(self):
        self._dims()
        return str(self.tensor.shape[-1])

    def ones(self):
        return "1, " * (self._dims() - 1)

    def shape(self):
        size, parts = self.tensor.numel(), []
        for factor in (2, 3):
            if size % factor == 0 and self.rng.random() < 0.6:
                parts.append(factor)
                size //= factor
        parts.append(size)
        self.rng.shuffle(parts)
        return ", ".join(map(str, parts))

    def big(self):
        shape = [self.rng.choice((2, 3)) if size == 1 else size for size in self.tensor.shape]
        return ", ".join(map(str, [*([2] if self.rng.random() < 0.5 else []), *shape]))

    def pairs(self):
        if self.tensor.numel() % 2:
            raise Rejected
        return "-1, 2"

    # -- operands

    def _like(self, fits):
        names = [n for n, t in self.values.items() if t.is_floating_point() and fits(t.shape)]
        return self.rng.choice(names)

    def s(self):
        shape = self.tensor.shape
        if self.tensor.is_complex():
            return self.x
        return self._like(lambda other: other == shape)

    def o(self):
        return self._operand(self.tensor.shape)

    def _operand(self, shape):
        draw = self.rng.random()
        if draw < 0.25 or self.tensor.is_complex():
            return self.k()
        if draw < 0.45 and shape and shape[-1] <= WIDEST:
            return f"{self.rng.choice('bc')}[:{shape[-1]}]"
        if draw < 0.5:
            return f"torch.tensor({self.k()})"
        if draw < 0.55:
            return f"np.float64({self.k()})"

        def fits(other):
            try:
                return torch.broadcast_shapes(other, shape) == shape
            except RuntimeError:
                return False

        try:
            name = self._like(fits)
        except IndexError:
            return self.k()
        return name if self.rng.random() < 0.8 else f"{name}.sin()"

    def ramp(self):
        return f"ramp({self.x})"

    def W(self):
        n = int(self.width())
        if n > WIDEST:
            raise Rejected
        return f"W[:{n}, :{n}]"

    def b(self):
        n = int(self.width())
        if n > WIDEST:
            raise Rejected
        return f"b[:{n}]"

    def size(self):
        return str(self.tensor.numel())

    def all(self):
        order = list(range(self.tensor.numel()))
        self.rng.shuffle(order)
        return f"torch.tensor({order})"

    def square(self):
        rows = self.tensor.shape[-2]
        return f"({self.x} @ {self.x}.mT + 2 * torch.eye({rows}, dtype=torch.float64))"

    def diagonal(self):
        return f"torch.eye({self.tensor.shape[-2]}, dtype=torch.bool)"

    def image(self):
        pixels = f"{self.x}.reshape(1, 2, -1, {self.width()})"
        return f"{pixels}.contiguous(memory_format=torch.channels_last)"

    def heads(self):
        return f"{self.x}.reshape(1, 1, -1, {self.width()})"

    # -- indices

    def mask(self):
        draw = self.rng.random()
        if draw < 0.4:
            return f"{self.s()} > 0.1"
        if draw < 0.7:
            return f"{self.s()}.detach() < {self.rng.choice((0.5, -0.2, 9))}"
        return f"torch.arange({self.tensor.numel()}).view({self.x}.shape) % 2 == 0"

    def _along(self, dim, count):
        size = self.tensor.shape[dim]
        if not size:
            raise Rejected
        return f"torch.tensor({[self.rng.randrange(size) for _ in range(count)]})"

    def rows(self):
        return self._along(int(self.field("d")), self.rng.choice((1, 2, 3)))

    def row(self):
        return self._along(int(self.field("d")), 1)

    def row0(self):
        self._dims()
        return self._along(0, 1)

    def sub(self):
        ndim = self._dims()
        if self.rng.random() < 0.15:
            return self.mask()
        items, advanced = [], self.rng.random() < 0.3
        for dim in range(self.rng.randint(1, ndim)):
            items.append(self._item(dim, advanced))
        if self.rng.random() < 0.2:
            items.insert(self.rng.randint(0, len(items)), "None")
        if self.rng.random() < 0.3:
            items.append("...")
        elif self.rng.random() < 0.3 and "mask" not in items:
            tail = [self._item(ndim - 1, advanced)]
            items = [*items[: ndim - 1], "...", *tail] if ndim > 1 else ["...", *tail]
        return ", ".join(items)

    def _item(self, dim, advanced):
        size = self.tensor.shape[dim]
        if not size:
            raise Rejected
        at = self.rng.randrange(-size, size)
        basic = [str(at), str(at), ":", ":", "1:", ":-1", ":2", "::2", "-1:"]
        basic += [f"np.int64({at})", f"torch.tensor({at})", f"slice(0, np.int64({size}))"]
        if not advanced:
            return self.rng.choice(basic)
        # No row twice: what a write to a row twice gives, and its gradient, torch leaves open.
        rows = self.rng.sample(range(size), min(2, size))
        flags = [self.rng.random() < 0.7 for _ in range(size)]
        return self.rng.choice(
            (
                f"torch.tensor({rows})",
                f"torch.tensor({rows[:1]})",
                str(rows),
                f"torch.tensor({flags})",
                f"np.array({rows})",
                ":",
                str(at),
            )
        )

    def r(self):
        try:
            part = eval(f"x[{self.field('sub')}]", {**TOOLS, **self.values, "x": self.tensor})
        except Exception as error:
            raise Rejected from error
        return self._operand(part.shape)


def _overlaps(x):
    """Whether elements of x share memory."""
    places = sum((size - 1) * abs(stride) for size, stride in zip(x.shape, x.stride(), strict=True))
    return torch.arange(places + 1).as_strided(x.shape, x.stride()).unique().numel() < x.numel()


class Author:
    """Writes one program, line by line, and runs along."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        mode = self.rng.choices(list(MODES), (10, 6, 3, 1, 1, 1))[0]
        layout = self.rng.choices(list(LAYOUTS), LAYOUTS.values())[0]
        self.empty = Program(seed, mode, self.rng.choice(SHAPES), layout, (), ())
        self.lines, self.count = [], 0
        self.restart()

    def restart(self):
        """Run what stands, from the start: a rejected line may have written."""
        inputs = self.empty.inputs()
        self.leaves = [x for x in inputs.values() if x.requires_grad]
        self.names = TOOLS | inputs
        self.h = inputs["h"]
        self.values = {"h": self.h}
        for i, (line, targets) in enumerate(self.lines):
            try:
                exec(line.text, self.names)
            except RuntimeError:
                # Legal only after the questions that `judge` asks, which make torch look again at
                # the history of a view.
                self.lines = self.lines[:i]
                return self.restart()
            self.values.update((name, self.names[name]) for name in targets)
        return None

    def write(self):
        starts = ("h * 1.0", "h.clone()", "h.sin()", "h + c[:{width}]", "h * b[:{width}]")
        start = Draw(self.rng, self.values, "h").fill(self.rng.choice(starts))
        self.add(Line(START, f"x0 = {start}"), ("x0",))
        for _ in range(self.rng.randint(3, 9)):
            for _ in range(TRIES):
                try:
                    self.extend()
                    break
                except Rejected:
                    pass
        outputs = []
        names = [n for n in self.values if n != "h"]
        for name in [names[0], *names[1:][1 - LIVE :]]:  # the first depends on h
            if self.values[name].is_complex():
                outputs += [f"{name}.real.reshape(-1)", f"{name}.imag.reshape(-1)"]
            else:
                outputs.append(f"{name}.reshape(-1)")
        lines = tuple(line for line, _ in self.lines)
        return replace(self.empty, lines=lines, outputs=tuple(outputs))

    def extend(self):
        # Views and writes to them are where a pass can go wrong unseen.
        table = self.rng.choices((PURE, VIEWS, IN_PLACE, COMPLEX), (4, 3, 5, 2))[0]
        op = self.rng.choice(table)
        if self.empty.layout.startswith("expanded") and op.name == "storage_offset":
            raise Rejected  # the pass copies such an h: its rows need tangents of their own
        names = [
            name
            for name, value in self.values.items()
            if value.dim() >= op.dims and value.is_complex() == (op.dtype == "complex")
        ]
        if not names:
            raise Rejected
        late = names[-3:] if self.rng.random() < 0.6 else names
        draw = Draw(self.rng, self.values, self.rng.choice(late))
        try:
            text = draw.fill(op.text)
        except IndexError as error:
            raise Rejected from error
        if (op.in_place or op.name in SCATTERS) and _overlaps(draw.tensor):
            raise Rejected  # torch leaves open what such a write gives, and copies no other way
        if op.in_place:
            self.add(Line(op.name, text), (draw.x,), written=True)
            return
        try:
            result = eval(text, self.names)
        except Exception as error:
            raise Rejected from error
        parts = result if isinstance(result, (tuple, list)) else (result,)
        names = []
        for part in parts[:3]:
            usable = isinstance(part, torch.Tensor) and (
                part.is_floating_point() or part.is_complex()
            )
            if usable:
                self.count += 1
            names.append(f"x{self.count}" if usable else "_")
        target = ", ".join(names)
        if isinstance(result, (tuple, list)):
            target += ", *_" if len(parts) > 3 else "," if len(parts) == 1 else ""
        self.add(Line(op.name, f"{target} = {text}"), [n for n in names if n != "_"])

    def add(self, line, targets, written=False):
        try:
            exec(line.text, self.names)
            found = {name: self.names[name] for name in targets}
            self.judge({**self.values, **found}, written)
        except Exception as error:
            self.restart()
            raise Rejected from error
        self.lines.append((line, targets))
        self.values.update(found)

    def judge(self, values, written):
        for value in values.values():
            if not 0 < value.numel() <= LARGEST or not value.abs().max() <= TALLEST:
                raise Rejected
        if self.h._version:
            raise Rejected  # a block may not write to its input
        loss = sum(value.abs().sum() for value in values.values()) if written else None
        if loss is not None and loss.requires_grad:
            torch.autograd.grad(loss, self.leaves, retain_graph=True, allow_unused=True)


def write(seed):
    """The program of a seed."""
    torch.manual_seed(seed)
    author = Author(seed)
    # Tensors of the inference mode have no versions, by which writes to h are seen.
    with torch.set_grad_enabled(bool(MODES[author.empty.mode])):
        return author.write()
