"""A dual turn as a CUDA graph: no Python, no launches, where the host is slower than the GPU.

A dual pass of a deep block issues thousands of small calls from Python; below some size the GPU
waits for them. Captured once at a fixed shape, forward and backward are one launch each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stars_fast.dual.dual_pass import dual_pass
from stars_fast.ops.spans import no_questions_of_masks


class GraphedBlock(nn.Module):
    """A block whose dual pass at one shape is captured; pass it to `fused_jsrr` as the block.

    Each pass needs its backward before the next one (a RuntimeError says so). Parameters without a
    `.grad` get one of zeros, for the graph's own buffers not to become theirs.

    Args:
        block: a module on a CUDA device, without hooks, whose control flow and memory do not
            depend on values. Its parameters must stay where they are (no FSDP).
        h: the shape, dtype and device of the states, e.g. [B, S, D]; values do not matter.
        args, kwargs: further arguments of `block`, fixed at capture: tensors among them are read
            again at each replay, so update them in place.

    Raises:
        TypeError: `block` is not a module.
        ValueError: `h` is not on a CUDA device, or not on the one that graphs are captured on here.
    """

    def __init__(
        self,
        block: nn.Module,
        h: Tensor,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(block, nn.Module):
            raise TypeError(f"block: expected a module, got {type(block).__name__}")
        if not h.is_cuda:
            raise ValueError(f"h: expected a tensor on a CUDA device, got {h.device}")
        _check_captured_here(h.device)
        self.block = block
        self.shape, self.dtype = (2, *h.shape), h.dtype
        sample = torch.zeros(self.shape, dtype=h.dtype, device=h.device)
        turn = _DualTurn(block, args, kwargs or {})
        captured: Any = torch.cuda.make_graphed_callables(
            turn, (sample,), num_warmup_iters=3, allow_unused_input=True
        )
        self._replays = 0
        # In a list: a submodule would bring the block's parameters in a second time.
        self._captured = [captured]

    def forward(self, h: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The block itself, for ordinary tensors."""
        return self.block(h, *args, **kwargs)

    def dual(self, stack: Tensor) -> Tensor:
        """The captured pass: [2, *h.shape] -> [2, *h.shape].

        Raises:
            ValueError: `stack` has another shape or dtype than at capture, or wants a gradient.
        """
        if stack.shape != self.shape or stack.dtype != self.dtype or stack.requires_grad:
            raise ValueError(
                f"h: this graph was captured for {list(self.shape[1:])} {self.dtype} without a "
                f"gradient, got {list(stack.shape[1:])} {stack.dtype}"
                f"{' with one' if stack.requires_grad else ''}"
            )
        captured = self._captured[0]
        captured.training = self.block.training  # in another mode than at capture it runs eagerly
        if torch.is_grad_enabled():
            for p in self.block.parameters():
                if p.requires_grad and p.grad is None:
                    # Else it would be the graph's own buffer, which the next replay fills.
                    p.grad = torch.zeros_like(p)
        out = captured(stack).clone()  # the next replay writes to the graph's own memory
        self._replays += 1
        if out.requires_grad:
            out.register_hook(partial(self._check_newest, self._replays))
        return out

    def _check_newest(self, replay: int, _: Tensor) -> None:
        if replay != self._replays:
            raise RuntimeError(
                "GraphedBlock: another pass ran before the backward of this one, over what it had "
                "saved; call backward after each pass"
            )


def _check_captured_here(device: torch.device) -> None:
    """Raise ValueError if torch would capture on another device: what runs on `device` meanwhile
    would not be captured, and a replay would do nothing."""
    current = torch.device("cuda", torch.cuda.current_device())
    if device != current:
        raise ValueError(
            f"h: expected a tensor on the current CUDA device {current}, got {device}; call under "
            f"`with torch.cuda.device({device.index}):`"
        )
    stream = torch.cuda.graph.default_capture_stream  # made at the first capture of the process
    if stream is not None and stream.device != device:
        raise ValueError(
            f"h: expected a tensor on {stream.device}, where this process captured its first "
            f"graph, got {device}; capture in a process for each device"
        )


class _DualTurn(nn.Module):
    def __init__(self, block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.block, self.args, self.kwargs = block, args, kwargs
        self.training = block.training

    def forward(self, stack: Tensor) -> Tensor:
        with no_questions_of_masks():
            return dual_pass(self.block, stack, self.args, self.kwargs)
