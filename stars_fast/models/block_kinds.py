"""The blocks that `looped_block` makes: what a turn needs besides the state, and the turn.

Shapes: B batch, S tokens, D model width.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from stars_fast.dual.dual_pass import first_output
from stars_fast.models.decoder_layers import (
    DecoderLayers,
    accepted,
    closing_norm,
    is_needed,
    run_layers,
)
from stars_fast.tokens import describe_tokens

OPTIONS = ("attention_mask", "position_ids", "cu_seqlens", "inputs")


class LoopedBlock(ABC, nn.Module):
    """One turn h [B, S, D] -> [B, S, D], with what it needs besides h; made by `looped_block`.

    A call may bring its own `attention_mask`, `position_ids`, `cu_seqlens` or `inputs`, which
    replace those of construction: `fused_jsrr(block, h, kwargs={"attention_mask": mask})` cuts them
    along with h where `fraction` < 1.
    """

    def __init__(self, given: dict[str, Tensor | None]) -> None:
        super().__init__()
        self._given = given
        self._kept: tuple[Any, list[Tensor], Any] | None = None

    def forward(self, h: Tensor, **options: Tensor | None) -> Tensor:
        """h [B, S, D], a tensor or a `Dual` -> [B, S, D].

        Raises:
            TypeError: an unknown option, and as `looped_block`.
        """
        unknown = set(options) - set(OPTIONS)
        if unknown:
            raise TypeError(f"{sorted(unknown)[0]}: expected one of {OPTIONS}")
        changed = {name: value for name, value in options.items() if value is not None}
        like = _like(h)
        if changed:
            return self.turn(h, self.prepare(like, **{**self._given, **changed}))
        settings, tensors = self.made_of()
        tensors += [given for given in self._given.values() if isinstance(given, Tensor)]
        # A fake tensor is of use to one trace, and one made in inference mode doesn't tell when it
        # is written to.
        if type(like) is not Tensor or any(tensor.is_inference() for tensor in tensors):
            return self.turn(h, self.prepare(like, **self._given))
        # What is made in inference mode can't be used in training.
        place = h.shape, h.dtype, h.device, like.is_inference()
        key = place, settings, [(id(tensor), tensor._version) for tensor in tensors]
        kept = self._kept  # read once: other threads may replace it
        if kept is None or kept[0] != key:
            # The tensors are kept so that no other gets the id of one of them.
            kept = self._kept = key, tensors, self.prepare(like, **self._given)
        return self.turn(h, kept[2])

    def made_of(self) -> tuple[Any, list[Tensor]]:
        """Settings and tensors that the context depends on besides h and the arguments."""
        return None, []

    @abstractmethod
    def prepare(self, like: Tensor, **given: Tensor | None) -> Any:
        """The context of a turn at the shape, dtype and device of `like`."""

    @abstractmethod
    def turn(self, h: Tensor, context: Any) -> Tensor:
        """One turn in a context."""


class ModelTurn(LoopedBlock):
    """A turn of a model of this package, which runs any number of them by its argument `turns`.

    Attributes:
        injects: whether a turn takes in `inputs`, which the output of the model holds by that name.
    """

    injects = False

    def __init__(self, model: Any, given: dict[str, Tensor | None]) -> None:
        super().__init__(given)
        self._model = (model,)  # not as a module: its parameters are more than a turn's

    @property
    def model(self) -> Any:
        """The model without its head, where that is a model by itself."""
        return self._model[0]

    @property
    @abstractmethod
    def last(self) -> nn.Module:
        """The module that a turn ends with: its output is the state."""


class OuroTurn(ModelTurn):
    """A model that prepares and runs its turns itself."""

    def __init__(self, model: Any, given: dict[str, Tensor | None]) -> None:
        refuse("Ouro", inputs=given["inputs"])
        super().__init__(model, given)
        self.layers, self.norm = model.layers, model.norm

    @property
    def last(self) -> nn.Module:
        return self.norm

    def made_of(self) -> tuple[Any, list[Tensor]]:
        return getattr(self.model.config, "sliding_window", None), []

    def prepare(self, like: Tensor, inputs: Tensor | None = None, **given: Tensor | None) -> Any:
        refuse("Ouro", inputs=inputs)
        return self.model.prepare(like, **given)

    def turn(self, h: Tensor, context: Any) -> Tensor:
        return self.model.turn(h, context)


class LoopedDecoderTurn(ModelTurn):
    """A turn of a looped decoder of this package."""

    def __init__(self, model: Any, given: dict[str, Tensor | None]) -> None:
        super().__init__(model, given)
        self.layers, self.adapter, self.norm = model.block, model.adapter, model.norm_between
        self.injects = model.config.injection != "none"
        if not self.injects:
            refuse("a looped decoder without injection", inputs=given["inputs"])

    @property
    def last(self) -> nn.Module:
        return self.layers[-1] if self.norm is None else self.norm

    def made_of(self) -> tuple[Any, list[Tensor]]:
        return self.model.made_of()

    def prepare(self, like: Tensor, inputs: Tensor | None = None, **given: Any) -> Any:
        if not self.injects:
            refuse("a looped decoder without injection", inputs=inputs)
        elif inputs is None or inputs.shape != like.shape:
            raise ValueError(
                f"inputs: expected the prelude's output, of h's shape {list(like.shape)}, got "
                f"{None if inputs is None else list(inputs.shape)}"
            )
        return self.model.prepare(like, inputs=inputs, **given)

    def turn(self, h: Tensor, context: Any) -> Tensor:
        return self.model.turn(h, context)


class HuginnTurn(ModelTurn):
    """Huginn of this package: the adapter mixes the input into the state, then the core layers."""

    injects = True

    def __init__(self, model: Any, given: dict[str, Tensor | None]) -> None:
        super().__init__(model, given)
        self.adapter, self.core_block = model.part("adapter"), model.part("core_block")

    @property
    def last(self) -> nn.Module:
        return self.core_block[-1]

    def prepare(self, like: Tensor, inputs: Tensor | None = None, **given: Tensor | None) -> Any:
        inputs = _injected(inputs, like)
        return inputs, self.model.prepare(like, **given)

    def turn(self, h: Tensor, context: Any) -> Tensor:
        return self.model.turn(h, *context)


class DecoderStack(LoopedBlock):
    """Decoder layers of the transformers library's form, and the closing norm if it is part."""

    def __init__(
        self,
        stack: Any,
        layers: list[tuple[int, nn.Module]],
        config: Any,
        norm: bool,
        given: dict[str, Tensor | None],
    ) -> None:
        refuse("a decoder stack", inputs=given["inputs"])
        super().__init__(given)
        self.layers = nn.ModuleList(layer for _, layer in layers)
        self.norm = getattr(stack, closing_norm(stack)) if norm else None
        self.rotary_emb = getattr(stack, "rotary_emb", None)
        self.config = config
        self._calls = DecoderLayers(layers, config, self.rotary_emb)

    @property
    def last(self) -> nn.Module:
        """The module that a turn ends with: its output is the state."""
        return self.layers[-1] if self.norm is None else self.norm

    def made_of(self) -> tuple[Any, list[Tensor]]:
        return self._calls.made_of()

    def prepare(self, like: Tensor, inputs: Tensor | None = None, **given: Any) -> Any:
        refuse("a decoder stack", inputs=inputs)
        return self._calls.arguments(like, describe_tokens(like, **given))

    def turn(self, h: Tensor, context: Any) -> Tensor:
        h = run_layers(self.layers, h, context)
        return h if self.norm is None else self.norm(h)


_UNMASKED = "Huginn, whose layers take no mask (pass documents as rows, padded on the right)"


class CoreBlock(LoopedBlock):
    """Huginn: the adapter mixes the input into the state, then the core layers.

    Its layers are always causal and take no other mask of tensors; pads on the right need none.
    """

    def __init__(
        self, core: Any, holder: Any, config: Any, given: dict[str, Tensor | None]
    ) -> None:
        refuse(_UNMASKED, cu_seqlens=given["cu_seqlens"])
        super().__init__(given)
        if getattr(config, "test_time_noise", 0):
            raise ValueError(
                "model: expected config.test_time_noise = 0 (the map of a turn would be random), "
                f"got {config.test_time_noise}"
            )
        self.adapter, self.core_block = core.adapter, core.core_block
        self._holder = (holder,)
        self.accepted = [accepted(layer, _CORE_ARGUMENTS) for layer in self.core_block]

    def made_of(self) -> tuple[Any, list[Tensor]]:
        return None, [self._holder[0].freqs_cis]

    def prepare(self, like: Tensor, inputs: Tensor | None = None, **given: Any) -> Any:
        refuse(_UNMASKED, cu_seqlens=given.get("cu_seqlens"))
        tokens = describe_tokens(like, **given)
        tokens.check_pads_last("Huginn")
        inputs = _injected(inputs, like)
        table = self._holder[0].freqs_cis  # [1, longest, 1, ...], by position
        if like.shape[1] > table.shape[1]:
            raise ValueError(
                f"h: expected at most {table.shape[1]} tokens (Huginn's rotary table), "
                f"got {like.shape[1]}"
            )
        offered = {
            "freqs_cis": table.to(like.device)[0, tokens.positions],
            "step_idx": 0,
            "block_idx": 0,
            "mask": None,
        }
        arguments = [{name: offered[name] for name in names} for names in self.accepted]
        return inputs, arguments

    def turn(self, h: Tensor, context: Any) -> Tensor:
        inputs, arguments = context
        h = self.adapter(torch.cat([h, inputs], dim=-1))
        for layer, each in zip(self.core_block, arguments, strict=True):
            h = first_output(layer(h, **each))
        return h


class Chain(LoopedBlock):
    """Modules h -> h, one after the other."""

    def __init__(self, layers: Any) -> None:
        super().__init__({})
        for layer in layers:
            if not isinstance(layer, nn.Module):
                raise TypeError(f"model: expected a list of modules, got a {type(layer).__name__}")
            _check_map(layer)
        self.layers = nn.ModuleList(layers)

    def prepare(self, like: Tensor, **given: Tensor | None) -> None:
        refuse("a list of layers", **given)

    def turn(self, h: Tensor, context: None) -> Tensor:
        for layer in self.layers:
            h = first_output(layer(h))
        return h


def _injected(inputs: Tensor | None, like: Tensor) -> Tensor:
    """Huginn's injected input, on the device of h.

    Raises:
        ValueError: there is none, or it has another shape.
    """
    if inputs is None:
        raise ValueError(
            "inputs: expected Huginn's injected input [B, S, D], the prelude's output, got None"
        )
    if inputs.shape != like.shape:
        raise ValueError(
            f"inputs: expected the shape of h {list(like.shape)}, got {list(inputs.shape)}"
        )
    return inputs.to(like.device)


_CORE_ARGUMENTS = "freqs_cis step_idx block_idx mask".split()


def _check_map(layer: nn.Module) -> None:
    """Raise TypeError for a layer that needs more than a state, as a decoder's do."""
    for p in list(inspect.signature(layer.forward).parameters.values())[1:]:
        # transformers gives the tables of positions a default, but needs them.
        if is_needed(p) or p.name == "position_embeddings":
            raise TypeError(
                f"model: expected a list of layers h -> h', but {type(layer).__name__} needs "
                f"{p.name!r}; of a decoder, pass the model itself, and a slice of its layers as "
                "`layers`"
            )


def chosen_layers(
    stack: nn.ModuleList, config: Any, layers: slice | None
) -> list[tuple[int, nn.Module]]:
    """The layers of the block with their place in the stack."""
    if layers is not None and not isinstance(layers, slice):
        raise TypeError(f"layers: expected a slice, got {type(layers).__name__}")
    count = getattr(config, "num_hidden_layers", None) or len(stack)
    chosen = list(enumerate(stack))[:count][layers or slice(None)]
    if not chosen:
        raise ValueError(f"layers: expected some of the {count} layers, got none in {layers}")
    return chosen


def refuse(what: str, **options: Any) -> None:
    """Raise ValueError for an option that means nothing to this kind of block."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name}: expected None for {what}, got {type(value).__name__}")


def _like(h: Tensor) -> Tensor:
    """A tensor of h's shape, dtype and device, without its values, tangent or memory."""
    return torch.zeros((), dtype=h.dtype, device=h.device).expand(h.shape)
