"""A backward that has no derivative of its own, and says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def first_derivative(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the `backward` of an autograd function, which raises where it is asked for a graph
    of itself (`create_graph=True`).

    torch's `once_differentiable` raises later, in the second backward, and then only if the
    cotangent wants a gradient: with a fixed v, as in the gradient of ||v^T J||^2, a derivative by
    the op's inputs would be left out in silence.

    Args:
        name: of the op.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def run(ctx: Any, *grads: Any) -> Any:
            # Compilers trace a backward with gradients enabled; they ask for no second one.
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                raise RuntimeError(
                    f"{name}: expected a first derivative, got create_graph=True: this op has no "
                    "second one; fused_jvp and fused_jsrr carry a tangent that can be "
                    "differentiated, and torch's own ops allow double backward"
                )
            return backward(ctx, *grads)

        return run

    return decorate
