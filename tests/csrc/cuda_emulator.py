"""The launchers of `csrc/cuda` compiled for the CPU (`emulator/`), on torch tensors.

Every operand lies between guards of NaN and with NaN between its rows; what is written there is an
error, what is read there spoils a sum. Results and scratch start as NaN.
"""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent / "emulator"
CSRC = Path(__file__).parents[2] / "csrc" / "cuda"
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
GUARD = 64


class Rows(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("row", ctypes.c_int64), ("pair", ctypes.c_int64)]


class Parameter(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("type", ctypes.c_int32)]


def arguments(name, operands, parameters=(), pointers=(), eps=(), flags=()):
    """The struct of launch.h whose fields come in this order."""
    fields = [(key, Rows) for key in operands] + [(key, Parameter) for key in parameters]
    fields += [(key, ctypes.c_void_p) for key in pointers]
    fields += [("rows", ctypes.c_int64), ("width", ctypes.c_int32)]
    fields += [(key, ctypes.c_float) for key in eps] + [(key, ctypes.c_bool) for key in flags]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


NORM = arguments("NormArgs", ["x", "y"], ["weight", "bias"], eps=["eps"], flags=["centre"])
NORM_BACKWARD = arguments(
    "NormBackwardArgs",
    ["grad", "x", "x_bar"],
    ["weight"],
    ["weight_bar", "bias_bar", "partials"],
    ["eps"],
    ["centre"],
)
SANDWICH = arguments(
    "SandwichArgs",
    ["branch", "residual", "h", "x"],
    ["weight_out", "weight_in"],
    eps=["eps_out", "eps_in"],
)
SANDWICH_BACKWARD = arguments(
    "SandwichBackwardArgs",
    ["h_bar", "x_bar", "branch", "h", "branch_bar", "residual_bar"],
    ["weight_out", "weight_in"],
    ["out_bar", "in_bar", "partials"],
    ["eps_out", "eps_in"],
)


def build(folder):
    """The emulator as a shared library, in `folder`."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not there")
    flags = "-std=c++17 -O0 -fPIC -fsanitize=alignment,bounds".split()
    objects, running = [], []
    for source in [*sorted(CSRC.glob("*.cu")), HERE / "emulator.cpp"]:
        objects.append(folder / f"{source.stem}.o")
        command = [compiler, *flags, f"-I{HERE}", f"-I{CSRC}", "-x", "c++", "-c", str(source)]
        running.append(subprocess.Popen([*command, "-o", str(objects[-1])]))
        if len(running) >= (os.cpu_count() or 1):
            assert running.pop(0).wait() == 0
    assert all(process.wait() == 0 for process in running)
    library = folder / "emulator.so"
    subprocess.run(
        [compiler, *flags, "-shared", *map(str, objects), "-o", str(library)], check=True
    )
    return ctypes.CDLL(str(library))


class Guarded:
    """A stack of rows [..., rows, width] in memory of its own.

    Args:
        values: what it holds; NaN for a result of that shape and dtype if None.
        gap: entries between rows.
        shift: entries by which it misses 16-byte alignment.
    """

    def __init__(self, values, shape=None, dtype=None, gap=0, shift=0):
        shape = tuple(values.shape if values is not None else shape)
        dtype = values.dtype if values is not None else dtype
        stride = [1]
        for size, extra in zip(reversed(shape[1:]), [gap, *[0] * len(shape)], strict=False):
            stride.insert(0, stride[0] * size + extra)
        room = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
        room = room if all(shape) else 0
        self.memory = torch.full((room + 2 * GUARD,), torch.nan, dtype=dtype)
        self.view = self.memory.as_strided(shape, stride, GUARD + shift)
        if values is not None:
            self.view.copy_(values)
        self.before = None if values is None else self.memory.clone()

    @property
    def pointer(self):
        return self.view.data_ptr()

    def rows(self, dual):
        # With one row its stride may be anything.
        row = self.view.stride(-2) if self.view.shape[-2] > 1 else self.view.shape[-1]
        return Rows(self.pointer, row, self.view.stride(0) if dual else 0)

    def result(self):
        """The values, after a check that nothing else was written."""
        inside = torch.zeros_like(self.memory, dtype=torch.bool)
        inside.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()).fill_(
            True
        )
        assert self.memory[~inside].isnan().all()
        return self.view.clone()

    def untouched(self):
        return torch.equal(self.memory.nan_to_num(7.0), self.before.nan_to_num(7.0))


class Emulator:
    """The ops, on tensors [2, rows, width] with `dual` and [rows, width] without.

    Inputs have `gap` entries between rows, everything lies `shift` entries off alignment.
    """

    def __init__(self, library):
        self.library = library
        library.emulate_partial_rows.restype = ctypes.c_int64
        library.emulate_partial_rows.argtypes = [ctypes.c_int64]
        self.gap = self.shift = 0

    def device(self, multiprocessors=2, backwards=False):
        self.library.emulate_device(multiprocessors, ctypes.c_bool(backwards))

    def _call(self, op, struct, inputs, outputs, parameters, sums, dual, extra=()):
        """inputs, outputs: name -> tensor or None; sums: name -> wanted."""
        x = next(iter(t for t in inputs.values() if t is not None))
        rows, width = x.shape[-2:]
        held = {k: None if t is None else self._guard(t, self.gap) for k, t in inputs.items()}
        made = {
            k: Guarded(None, x.shape, x.dtype, 0, self.shift) if wanted else None
            for k, wanted in outputs.items()
        }
        weights = {k: None if t is None else self._guard(t, 0) for k, t in parameters.items()}
        gradients = {
            k: Guarded(None, (width,), torch.float32) if wanted else None
            for k, wanted in sums.items()
        }
        scratch = Guarded(None, (2, self.library.emulate_partial_rows(rows), width), torch.float32)
        fields = {}
        for name, operand in {**held, **made}.items():
            fields[name] = Rows(None, 0, 0) if operand is None else operand.rows(dual)
        for name, weight in weights.items():
            if weight is None:
                fields[name] = Parameter(None, 0)
            else:
                fields[name] = Parameter(weight.pointer, TYPES[weight.view.dtype])
        for name, gradient in gradients.items():
            fields[name] = None if gradient is None else gradient.pointer
        if sums:
            fields["partials"] = scratch.pointer if any(sums.values()) else None
        packed = struct(**fields, rows=rows, width=width, **dict(extra))
        function = getattr(self.library, f"emulate_{op}")
        args = [ctypes.byref(packed), TYPES[x.dtype], ctypes.c_bool(dual)]
        assert function(*args) == 0
        scratch.result()
        assert all(t.untouched() for t in [*held.values(), *weights.values()] if t is not None)
        return [None if t is None else t.result() for t in [*made.values(), *gradients.values()]]

    def __call__(self, name, *args):
        return getattr(self, name)(*args)

    def _guard(self, tensor, gap):
        return Guarded(tensor, gap=gap, shift=self.shift)

    def norm(self, x, weight, bias, eps, centre, dual):
        parameters = {"weight": weight, "bias": bias}
        extra = {"eps": eps, "centre": centre}
        (y,) = self._call("norm", NORM, {"x": x}, {"y": True}, parameters, {}, dual, extra)
        return y

    def norm_backward(self, grad, x, weight, eps, centre, dual, weight_grad, bias_grad):
        sums = {"weight_bar": weight_grad, "bias_bar": bias_grad}
        return self._call(
            "norm_backward",
            NORM_BACKWARD,
            {"grad": grad, "x": x},
            {"x_bar": True},
            {"weight": weight},
            sums,
            dual,
            {"eps": eps, "centre": centre},
        )

    def sandwich(self, branch, residual, weight_out, weight_in, eps_out, eps_in, dual):
        return self._call(
            "sandwich",
            SANDWICH,
            {"branch": branch, "residual": residual},
            {"h": True, "x": True},
            {"weight_out": weight_out, "weight_in": weight_in},
            {},
            dual,
            {"eps_out": eps_out, "eps_in": eps_in},
        )

    def sandwich_backward(
        self, h_bar, x_bar, branch, h, weight_out, weight_in, eps_out, eps_in, dual
    ):
        normed = weight_out is not None
        return self._call(
            "sandwich_backward",
            SANDWICH_BACKWARD,
            {"h_bar": h_bar, "x_bar": x_bar, "branch": branch if normed else None, "h": h},
            {"branch_bar": normed, "residual_bar": True},
            {"weight_out": weight_out, "weight_in": weight_in},
            {"out_bar": normed, "in_bar": True},
            dual,
            {"eps_out": eps_out, "eps_in": eps_in},
        )
