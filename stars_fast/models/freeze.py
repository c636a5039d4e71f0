"""Parts of a model that training leaves as they are."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from stars_fast.base.errors import ConfigError


def freeze(model: nn.Module, parts: Sequence[str]) -> None:
    """Let the weights within `parts` want no gradient.

    Args:
        parts: names of modules or parameters, or stretches of the paths to them, such as lm_head or
            layers.0.mlp.

    Raises:
        ConfigError: a name of nothing that is trained, or nothing is left to train.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for part in parts:
        within = [p for name, p in trained.items() if f".{part}." in f".{name}."]
        if not within:
            words = (word for name in trained for word in name.split(".") if not word.isdecimal())
            known = ", ".join(dict.fromkeys(words))
            raise ConfigError(f"train.freeze: expected parts of the model ({known}), got {part}")
        for p in within:
            p.requires_grad_(False)
    if not any(p.requires_grad for p in trained.values()):
        raise ConfigError(f"train.freeze: expected to leave something to train, got {list(parts)}")
