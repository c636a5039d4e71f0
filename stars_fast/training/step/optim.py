"""AdamW with decay on matrices only, and the learning rate as a function of the step."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stars_fast.training.step.rounding import rounding_adamw, rounding_step


@dataclass
class OptimConfig:
    """The optimiser and its schedule.

    lr: peak learning rate.
    betas: AdamW's two decay rates of its averages. eps: AdamW's epsilon.
    weight_decay: decoupled decay, on parameters with two or more dimensions.
    schedule: cosine (warm-up, then a half cosine) or wsd (warm-up, stable, linear decay).
    warmup_steps: steps of linear warm-up, or below 1 a fraction of the run; the first step already
        moves.
    decay_steps: length of wsd's decay at the end of the run, in steps or below 1 as a fraction.
    min_lr_ratio: learning rate of the last step over lr.
    clip: largest gradient norm, none for no limit.
    stochastic_rounding: round weights kept in bf16 up or down at random, right on average, with
        torchao's AdamW; for precision bfloat16.
    """

    lr: float = 1e-3
    betas: tuple[float, ...] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup_steps: float = 0
    decay_steps: float = 0
    min_lr_ratio: float = 0.0
    clip: float | None = 1.0
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        if self.schedule not in ("cosine", "wsd"):
            raise ValueError(f"schedule: expected one of ('cosine', 'wsd'), got {self.schedule!r}")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas: expected two numbers in [0, 1), got {self.betas}")
        for name in ("lr", "eps", "weight_decay", "warmup_steps", "decay_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected at least 0, got {getattr(self, name)}")
        for name in ("warmup_steps", "decay_steps"):
            value = getattr(self, name)
            if value > 1 and value != int(value):
                raise ValueError(
                    f"{name}: expected a whole number of steps, or a fraction of the run below 1, "
                    f"got {value}"
                )
        if not 0.0 <= self.min_lr_ratio <= 1.0:
            raise ValueError(f"min_lr_ratio: expected a value in [0, 1], got {self.min_lr_ratio}")
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"clip: expected a positive number or none, got {self.clip}")


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The learning rate of `step` (from 0) in a run of `steps`.

    Warm-up over w steps: lr (step + 1) / w. Then, with m = min_lr_ratio:
    cosine: lr (m + (1 - m) (1 + cos(pi p)) / 2), p from 0 at step w to 1 at the last step;
    wsd: lr, and over the last d steps lr (1 - (1 - m) q), q = 1/d, 2/d, ..., 1.
    w = warmup_steps and d = decay_steps, or the nearest whole number to a fraction's steps.
    """
    warmup, decay = schedule_steps(config, steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "cosine":
        progress = (step - warmup) / max(steps - 1 - warmup, 1)
        fall = (1.0 - math.cos(math.pi * min(progress, 1.0))) / 2.0
    else:
        into = step - (steps - decay) + 1
        fall = min(max(into / decay, 0.0), 1.0) if decay else 0.0
    return config.lr * (1.0 - (1.0 - config.min_lr_ratio) * fall)


def schedule_steps(config: OptimConfig, steps: int) -> tuple[int, int]:
    """w and d of `learning_rate` in a run of `steps`."""
    return _whole(config.warmup_steps, steps), _whole(config.decay_steps, steps)


def _whole(length: float, steps: int) -> int:
    return round(length * steps) if length < 1 else int(length)


def make_optimizer(config: OptimConfig, module: nn.Module) -> torch.optim.Optimizer:
    """AdamW over the parameters of `module` that require a gradient, in two groups by decay.

    Parameters may be shards of fsdp and hsdp.

    Raises:
        ConfigError: `stochastic_rounding` without torchao, or for weights that are not all bf16.
    """
    params = [p for p in module.parameters() if p.requires_grad]
    matrices = [p for p in params if p.dim() >= 2]
    others = [p for p in params if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    beta1, beta2 = config.betas
    options: dict[str, Any] = {"lr": config.lr, "betas": (beta1, beta2), "eps": config.eps}
    if config.stochastic_rounding:
        return rounding_adamw(groups, options)
    return torch.optim.AdamW(groups, **options, fused=True)


def gradient_norm(module: nn.Module, clip: float | None) -> Tensor:
    """The norm of all gradients of `module`, a scalar on their device; scaled down to `clip`.

    Gradients may be shards: the norm is that of the whole, the same on every process.
    """
    parameters = [p for p in module.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if hasattr(norm, "full_tensor"):  # a DTensor, whose class takes a second to import
        norm = norm.full_tensor()
    if clip is not None:
        nn.utils.clip_grads_with_norm_(parameters, clip, norm)
    return norm


def step_if(optimizer: torch.optim.Optimizer, finite: Tensor, lr: float) -> None:
    """One optimiser step at `lr` if the scalar bool `finite`, else none.

    PyTorch's AdamW decides on the device: `found_inf` is the attribute through which
    `torch.amp.GradScaler` tells a fused optimiser to leave weights, averages and step counts alone;
    here there is no scale beside it. torchao's has no such thing: the host waits for `finite`.
    """
    if not isinstance(optimizer, torch.optim.AdamW):
        if finite:
            rounding_step(optimizer, lr, finite.device)
        return
    for group in optimizer.param_groups:
        group["lr"] = lr
    # The fused optimiser's own copy to offloaded weights would not be waited for
    place = optimizer.param_groups[0]["params"][0].device
    optimizer.found_inf = (~finite).float().to(place)  # type: ignore[attr-defined]
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.step()
