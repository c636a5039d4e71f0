"""Low-rank adapters (LoRA, Hu et al. 2021, https://arxiv.org/abs/2106.09685) on the shared block of
a looped model of any family, made by PEFT."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stars_fast.base.checks import check_integer, check_number
from stars_fast.base.errors import ConfigError
from stars_fast.base.optional import need
from stars_fast.base.seeds import derive
from stars_fast.models.loop import Loop

ALL_LINEAR = "all-linear"
ADAPTER = "default"
"""PEFT's name of the only adapter that a model has here."""


@dataclass
class LoraConfig:
    """Low-rank adapters of the shared block, which are trained while all other weights stay.

    rank: of the adapters; none trains all weights, without adapters.
    alpha: what an adapter adds is scaled by alpha / rank; none for rank.
    dropout: of what the adapters read.
    targets: all-linear (every linear map of the block, and nothing outside it), or names of linear
        maps of the block, such as q_proj,v_proj or mlp.up_proj.
    per_turn: adapters of its own for every turn; only false, the error says why.
    """

    rank: int | None = None
    alpha: float | None = None
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    per_turn: bool = False

    def __post_init__(self) -> None:
        if self.rank is not None:
            check_integer("rank", self.rank, 1)
        if self.alpha is not None:
            check_number("alpha", self.alpha, 0.0, open_low=True)
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout: expected a number in [0, 1), got {self.dropout}")
        if not self.targets or (ALL_LINEAR in self.targets and len(self.targets) > 1):
            raise ValueError(
                f"targets: expected {ALL_LINEAR} or names of linear maps, got {list(self.targets)}"
            )
        if self.per_turn:
            raise ValueError(
                "per_turn: expected false, got true: all turns share one block, of whose Jacobian "
                "the penalty is, and a model may take more turns than it was trained with"
            )
        said = [
            name
            for name, default in (("alpha", None), ("dropout", 0.0), ("targets", (ALL_LINEAR,)))
            if getattr(self, name) != default
        ]
        if said and not self.wanted:
            raise ValueError(
                f"rank: expected an integer with {said[0]} given (without it there are no "
                "adapters), got None"
            )

    @property
    def wanted(self) -> bool:
        """Whether there are adapters."""
        return self.rank is not None


def base_dtype(precision: str) -> torch.dtype:
    """The dtype of the frozen weights of a run: bf16 wherever it computes in bf16."""
    return torch.float32 if precision == "float32" else torch.bfloat16


def adapt(loop: Loop, config: LoraConfig, dtype: torch.dtype, seed: int) -> None:
    """Put adapters on the block of `loop`, in place; they alone want a gradient from now on.

    The map computed does not change: adapters begin with a factor of zeros.

    Args:
        loop: its linear maps become PEFT's.
        config: with a rank.
        dtype: of the adapters. Where it is not that of the weights they adapt, run the model under
            autocast: inputs are not cast, so that maps which read the same state share it.
        seed: of the run; initial adapters follow from it.

    Raises:
        ConfigError: PEFT is missing, the block has no linear map of a name in `config.targets`, or
            the rank is above that of all of them.
    """
    peft = need("peft", "LoRA adapters")
    assert config.rank is not None
    chosen = target_names(loop, config.targets)
    maps: list[Any] = [loop.model.get_submodule(name) for name in chosen]
    most = max(min(each.weight.shape) for each in maps)
    if config.rank > most:
        raise ConfigError(
            f"lora.rank: expected at most {most}, the rank of the maps themselves, got "
            f"{config.rank}"
        )
    made = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.rank if config.alpha is None else config.alpha,
        lora_dropout=config.dropout,
        target_modules=_shortest(loop.model, chosen),
        fan_in_fan_out=not any(isinstance(each, nn.Linear) for each in maps),
    )
    loop.model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "lora"))
        peft.inject_adapter_in_model(made, loop.model, ADAPTER)
    for layer in adapted_layers(loop.model).values():
        layer.cast_input_dtype_enabled = False
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)


def target_names(loop: Loop, targets: Sequence[str]) -> list[str]:
    """Names in `loop.model` of the linear maps of the block that `targets` mean.

    Raises:
        ConfigError: a name of no linear map there; those that there are are listed.
    """
    inside = {id(module) for layer in loop.layers for module in layer.modules()}
    linear = [
        name
        for name, module in loop.model.named_modules()
        if id(module) in inside and _is_linear(module)
    ]
    if not linear:
        raise ConfigError("lora.rank: expected a block with linear maps, got one without")
    if tuple(targets) == (ALL_LINEAR,):
        return linear
    unknown = [each for each in targets if not any(_is_named(name, each) for name in linear)]
    if unknown:
        known = dict.fromkeys(name.rpartition(".")[2] for name in linear)
        raise ConfigError(
            f"lora.targets: expected {ALL_LINEAR} or names of linear maps of the shared block "
            f"({', '.join(known)}), got {', '.join(unknown)}"
        )
    return [name for name in linear if any(_is_named(name, each) for each in targets)]


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The modules of PEFT that hold an adapter, by name."""
    names = {name: each for name, each in model.named_modules() if hasattr(each, "base_layer")}
    if not names:
        return {}
    layers = need("peft.tuners.lora", "LoRA adapters").LoraLayer
    return {name: each for name, each in names.items() if isinstance(each, layers)}


def fingerprint(model: nn.Module) -> str:
    """A short hash of the names and values of the weights that want no gradient: another one for
    another base, bit for bit, though not for values that change places within a weight."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    facts = [
        (name, list(p.shape), str(p.dtype), int(_bits(p, bits).sum(dtype=torch.int64)))
        for name, p in model.named_parameters()
        if not p.requires_grad
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _bits(p: nn.Parameter, dtypes: dict[int, torch.dtype]) -> torch.Tensor:
    return p.detach().contiguous().view(dtypes[p.element_size()])


def _is_linear(module: nn.Module) -> bool:
    """Whether PEFT adapts a module as a linear map: torch's, or the transposed one of GPT-2."""
    if isinstance(module, nn.Linear):
        return True
    if not type(module).__module__.startswith("transformers."):
        return False
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _shortest(model: nn.Module, chosen: Sequence[str]) -> list[str]:
    """Last names that mean the chosen modules and no others of the model, else their full names:
    what an adapter's configuration says."""
    short = sorted({name.rpartition(".")[2] for name in chosen})
    meant = [n for n, _ in model.named_modules() if any(_is_named(n, each) for each in short)]
    return short if sorted(meant) == sorted(chosen) else list(chosen)
