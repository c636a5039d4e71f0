"""Complex numbers as pairs of real ones and back: views of the stack."""

from __future__ import annotations

import torch

from stars_fast.dual.rule import rule
from stars_fast.dual.rules.shapes import matrix_transpose
from stars_fast.dual.tensor import Dual


@rule("mH", "adjoint", "H", kind="stacked")
def conjugate_transpose(input: Dual) -> Dual:
    return matrix_transpose(conj(input))


@rule("conj", kind="stacked")
def conj(input: Dual) -> Dual:
    return Dual(input.stack.conj()) if input.stack.is_complex() else input


@rule("resolve_conj", kind="stacked")
def resolve_conj(input: Dual) -> Dual:
    return Dual(input.stack.resolve_conj()) if input.stack.is_conj() else input


@rule("resolve_neg", kind="stacked")
def resolve_neg(input: Dual) -> Dual:
    return Dual(input.stack.resolve_neg()) if input.stack.is_neg() else input


@rule("real", kind="stacked")
def real(input: Dual) -> Dual:
    return Dual(torch.real(input.stack)) if input.stack.is_complex() else input


@rule("imag", kind="stacked")
def imag(input: Dual) -> Dual:
    return Dual(torch.imag(input.stack))


@rule("view_as_real", kind="stacked")
def view_as_real(input: Dual) -> Dual:
    return Dual(torch.view_as_real(input.stack))


@rule("view_as_complex", kind="stacked")
def view_as_complex(input: Dual) -> Dual:
    return Dual(torch.view_as_complex(input.stack))
