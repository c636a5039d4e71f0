"""torchao's AdamW for weights kept in bf16, which rounds them up or down at random, right on
average: a step that is smaller than the spacing of numbers moves a weight now and then."""

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from stars_fast.base.errors import ConfigError
from stars_fast.base.optional import need
from stars_fast.base.seeds import derive

_AVERAGES = ("exp_avg", "exp_avg_sq")


def rounding_adamw(groups: list[dict[str, Any]], options: dict[str, Any]) -> torch.optim.Optimizer:
    """torchao's AdamW over bf16 parameters, its averages in fp32.

    In bf16 an average of squares that decays by 0.999 would never fall: 0.001 of itself is less
    than half of the spacing of numbers.

    Raises:
        ConfigError: torchao is missing, is of another form, or parameters are not bf16.
    """
    params = [p for group in groups for p in group["params"]]
    wrong = sorted({str(p.dtype) for p in params} - {"torch.bfloat16"})
    if wrong:
        raise ConfigError(
            "optim.stochastic_rounding rounds weights kept in bf16: set precision to bfloat16, "
            f"got weights of {', '.join(wrong)}"
        )
    optimizer = _class()(groups, **options, bf16_stochastic_round=True)
    for p in params:
        averages = {name: torch.zeros_like(p, dtype=torch.float32) for name in _AVERAGES}
        optimizer.state[p] = {"step": torch.tensor(0.0), **averages}
    _load_averages_as_they_are(optimizer)
    return optimizer


def rounding_step(optimizer: torch.optim.Optimizer, lr: float, device: torch.device) -> None:
    """One step at `lr`. What it draws follows from the number of steps taken alone: the same on
    every process, which keeps copies of a weight equal, and after a resumption. The other draws of
    the run go on as if there were none."""
    for group in optimizer.param_groups:
        group["lr"].fill_(lr)
    taken = max(int(state["step"]) for state in optimizer.state.values())
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(derive(0, "rounding", taken))
        optimizer.step()


def _class() -> Any:
    purpose = "runs with optim.stochastic_rounding"
    found = getattr(need("torchao.optim", purpose), "_AdamW", None)
    if found is None:
        raise ConfigError(
            "optim.stochastic_rounding needs torchao.optim._AdamW, which torchao 0.18 has; this is "
            f"torchao {need('torchao', purpose).__version__}"
        )
    return found


def _load_averages_as_they_are(optimizer: torch.optim.Optimizer) -> None:
    """`Optimizer.load_state_dict` casts averages to the dtype of their weights: cast them anew
    from what it was given."""
    given: list[dict[str, Any]] = []

    def before(_: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        given.append(saved)

    def after(optimizer: torch.optim.Optimizer) -> None:
        saved = given.pop()
        keys = chain.from_iterable(group["params"] for group in saved["param_groups"])
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for key, p in zip(keys, params, strict=True):
            for name in _AVERAGES:
                average: Tensor = saved["state"][key][name]
                optimizer.state[p][name] = average.to(p.device, torch.float32, copy=True)

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
