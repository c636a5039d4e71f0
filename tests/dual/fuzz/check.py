"""One program through the dual pass, held against torch itself.

    value      eager, to rounding
    tangent    central differences of eager along v
    gradient   of <y_bar, y> + <y_dot_bar, J v> in h and the weights, along one random direction:
               central differences of that sum, whose value and tangent were just held against eager

Where the differences of two steps, or ahead and behind, disagree, the program sits at a kink.
"""

import traceback
import warnings
from dataclasses import dataclass

import torch
from fuzz.programs import Held, lay_out

from stars_fast import fused_jvp

STEPS = (1e-5, 1e-6, 1e-4)
FINE = 1e-6  # step at which the slopes ahead and behind are compared
ROUNDING = 1e-15  # relative change of h by which no smooth value moves
NEARBY = 16  # such changes to try
EXACT = 1e-9  # relative; fp64 keeps 1e-16, and a program sums some hundred terms
SLOPE = 2e-5  # relative; central differences in fp64 keep about eight digits of a smooth function


@dataclass(frozen=True)
class Outcome:
    """kind: agree, illegal (eager refuses too), rough (no finite difference to be had), torch
    (eager's own gradient is wrong), refused (an error of ours), crash (an error that is not ours),
    silent (a wrong number)."""

    kind: str
    detail: str = ""

    @property
    def fails(self):
        return self.kind in ("crash", "silent")


def check(program):
    """The outcome of one program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _Trial(program).outcome()


class _Trial:
    def __init__(self, program):
        self.program = program
        self.held = Held()
        self.block = program.block(self.held)
        inputs = program.inputs()
        self.v, self.c = inputs.pop("v"), inputs.pop("c")
        self.inputs = list(inputs.values())  # h, W, b
        # Rows that move apart can't share memory: in a slice, at least, they do not lie densely.
        self.expanded = program.layout.startswith("expanded")
        self.moved_layout = "sliced" if self.expanded else program.layout
        self.leaves = [x for x in self.inputs if x.requires_grad]
        self.generator = torch.Generator().manual_seed(program.seed + 1)

    def randn_like(self, x):
        draw = torch.randn(x.shape, generator=self.generator, dtype=torch.float64)
        return torch.empty_like(x).copy_(draw)

    def eager(self, h, W, b, replay=True):
        self.held.rewind(replay)
        return self.block(h, W, b, self.c)

    def ours(self, h, W, b, replay=True):
        self.held.rewind(replay)
        return fused_jvp(self.block, h, self.v, args=(W, b, self.c))

    def outcome(self):
        with self.program.around():
            return self.judge()

    def judge(self):
        try:
            y = self.eager(*self.inputs, replay=False)
            self.y_bar, self.y_dot_bar = self.randn_like(y), self.randn_like(y)
            self.eager_grads = self.gradients((y * self.y_bar).sum())
        except Exception as error:
            return Outcome("illegal", str(error))
        if not y.isfinite().all():
            return Outcome("rough", "not finite")
        try:
            got, got_dot = self.ours(*self.inputs, replay=False)
            loss = self.pair(got, got_dot)
            grads = self.gradients(loss)
        except Exception as error:
            return self.failed(error)
        if got.shape != y.shape:
            return Outcome("silent", f"shape: {list(got.shape)}, eager {list(y.shape)}")
        if not torch.allclose(got, y, rtol=EXACT, atol=EXACT):
            return Outcome("rough" if self.jumps(got, y) else "silent", f"value: {_worst(got, y)}")
        outcome = self.tangent(got_dot)
        if not outcome and self.leaves:
            outcome = self.gradient(loss.item(), grads)
        return outcome or Outcome("agree")

    def gradients(self, loss):
        """In h, W and b; None where nothing leads there."""
        found = iter(())
        if loss.requires_grad:
            found = iter(torch.autograd.grad(loss, self.leaves, allow_unused=True))
        return [next(found, None) if x.requires_grad else None for x in self.inputs]

    def pair(self, y, y_dot):
        return (y * self.y_bar).sum() + (y_dot * self.y_dot_bar).sum()

    def failed(self, error):
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        frames = traceback.extract_tb(error.__traceback__)
        places = [frame.lineno for frame in frames if frame.filename == "<program>"]
        lines = self.program.source().splitlines()
        where = lines[places[-1] - 1].strip() if places else "backward"
        ours = "stars_fast" in text
        return Outcome("refused" if ours else "crash", f"{text} | at: {where}")

    def moved(self, directions, step):
        h, W, b = (x.detach() + step * d for x, d in zip(self.inputs, directions, strict=True))
        return lay_out(h, self.moved_layout), W, b

    def jumps(self, got, y):
        """Whether eager gives each of our numbers too, when h changes by rounding: by the order of
        equal numbers."""
        h, W, b = (x.detach() for x in self.inputs)
        agrees = torch.isclose(got, y, rtol=EXACT, atol=EXACT)
        with torch.no_grad():
            for _ in range(NEARBY):
                x = h * (1 + ROUNDING * self.randn_like(h))
                nearby = self.eager(lay_out(x, self.program.layout), W, b)
                agrees |= torch.isclose(got, nearby, rtol=EXACT, atol=EXACT)
        return bool(agrees.all())

    def tangent(self, got_dot):
        still = [torch.zeros_like(x) for x in self.inputs[1:]]

        def eager(step):
            return self.eager(*self.moved([self.v, *still], step))

        with torch.no_grad():
            try:
                wrong = compare("tangent", eager, got_dot.detach())
            except RuntimeError as error:
                return Outcome("rough", f"no difference: {error}")  # legal for an expanded h alone
            if wrong and self.expanded:
                wrong = Outcome("rough", wrong.detail)  # its rows tie
            # At a kink torch's own choice of a slope is as good as any.
            rough = wrong and wrong.kind == "rough"
            return None if rough and self.agrees_with_torch(got_dot) else wrong

    def agrees_with_torch(self, got_dot):
        h, W, b = (x.detach() for x in self.inputs)
        try:
            _, y_dot = torch.func.jvp(lambda h: self.eager(h, W, b), (h,), (self.v,))
        except RuntimeError:
            return False
        return torch.allclose(got_dot, y_dot, rtol=EXACT, atol=EXACT)

    def gradient(self, loss, grads):
        directions = [self.randn_like(x) * x.requires_grad for x in self.inputs]

        def along(grads):
            parts = zip(grads, directions, strict=True)
            total = sum((g * d).sum() for g, d in parts if g is not None)
            return torch.as_tensor(total, dtype=torch.float64)

        def ours(step):
            return self.pair(*self.ours(*self.moved(directions, step)))

        def eager(step):
            return (self.eager(*self.moved(directions, step)) * self.y_bar).sum()

        try:
            with torch.no_grad():
                again = self.pair(*self.ours(*self.inputs)).item()
                if abs(again - loss) > EXACT * (1 + abs(loss)):
                    return Outcome("silent", f"no_grad: {again}, with grad {loss}")
                wrong = compare("gradient", ours, along(grads))
                if wrong and compare("gradient", eager, along(self.eager_grads)):
                    return Outcome("torch" if wrong.kind == "silent" else wrong.kind, wrong.detail)
                return wrong
        except Exception as error:
            return self.failed(error)


def compare(name, f, got):
    """None where `got` is the slope of f at 0, in every element at one of the steps."""
    slopes, wrong = [], torch.ones_like(got, dtype=torch.bool)
    for step in STEPS:
        ahead, behind = f(step), f(-step)
        slopes.append((ahead - behind) / (2 * step))
        tolerance = SLOPE * (1 + slopes[-1].abs().max() + slopes[-1].abs())
        wrong &= ~((got - slopes[-1]).abs() <= tolerance)
        if not wrong.any():
            return None
    kink = (f(FINE) - 2 * f(0.0) + f(-FINE)).abs() / FINE
    gap = torch.maximum((slopes[0] - slopes[1]).abs(), kink)
    judged = wrong & ~(gap >= (got - slopes[0]).abs())  # elements whose error no kink explains
    if not judged.any():
        return Outcome("rough", f"{name}: slopes differ by {gap[wrong].max():.1e}")
    return Outcome("silent", f"{name}: {_worst(got.where(judged, slopes[0]), slopes[0])}")


def _worst(got, expected):
    gap = (got - expected).abs().nan_to_num(float("inf")).reshape(-1)
    at = int(gap.argmax())
    return (
        f"expected {expected.reshape(-1)[at].item():.8g}, got {got.reshape(-1)[at].item():.8g} "
        f"(element {at} of {gap.numel()})"
    )
