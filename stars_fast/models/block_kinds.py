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
from stars_fast.tokens import Tokens, describe_tokens

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


class OuroTurn(LoopedBlock):
    """A model that prepares and runs its turns itself."""

    def __init__(self, model: Any, given: dict[str, Tensor | None]) -> None:
        refuse("Ouro", inputs=given["inputs"])
        super().__init__(given)
        # Only what a turn uses; the model itself would bring its embeddings in.
        self.layers, self.norm = model.layers, model.norm
        self._model = (model,)

    def made_of(self) -> tuple[Any, list[Tensor]]:
        return getattr(self._model[0].config, "sliding_window", None), []

    def prepare(self, like: Tensor, inputs: Tensor | None = None, **given: Tensor | None) -> Any:
        refuse("Ouro", inputs=inputs)
        return self._model[0].prepare(like, **given)

    def turn(self, h: Tensor, context: Any) -> Tensor:
        return self._model[0].turn(h, context)


class HuginnTurn(LoopedBlock):
    """Huginn of this package: the adapter mixes the input into the state, then the core layers."""

    def __init__(self, model: Any, given: dict[str, Tensor | None]) -> None:
        super().__init__(given)
        # Only what a turn uses; the model itself would bring its other layers in.
        self.adapter, self.core_block = model.part("adapter"), model.part("core_block")
        self._model = (model,)

    def prepare(self, like: Tensor, inputs: Tensor | None = None, **given: Tensor | None) -> Any:
        inputs = _injected(inputs, like)
        return inputs, self._model[0].prepare(like, **given)

    def turn(self, h: Tensor, context: Any) -> Tensor:
        return self._model[0].turn(h, *context)


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
        self.norm = _closing_norm(stack) if norm else None
        self.rotary_emb = getattr(stack, "rotary_emb", None)
        self.kinds = [_attention_kind(layer, i, config) for i, layer in layers]
        self.accepted = [_accepted(layer, _STACK_ARGUMENTS) for layer in self.layers]
        self.config = config
        _check_causal(self.layers, config)

    def made_of(self) -> tuple[Any, list[Tensor]]:
        names = ("_attn_implementation", "sliding_window")
        tables = [] if self.rotary_emb is None else list(self.rotary_emb.buffers())
        return [getattr(self.config, name, None) for name in names], tables

    def prepare(self, like: Tensor, inputs: Tensor | None = None, **given: Any) -> Any:
        refuse("a decoder stack", inputs=inputs)
        tokens = describe_tokens(like, **given)
        shared = {
            "position_ids": tokens.positions,
            "cache_position": torch.arange(like.shape[1], device=like.device),
            "use_cache": False,
        }
        kinds = {kind: self._per_kind(kind, like, tokens) for kind in set(self.kinds)}
        for layer, kind, accepted in zip(self.layers, self.kinds, self.accepted, strict=True):
            if kinds[kind]["attention_mask"] is not None and "attention_mask" not in accepted:
                raise ValueError(
                    f"model: expected layers that take attention_mask, which pads, documents and "
                    f"windows need; {type(layer).__name__} doesn't"
                )
        return [
            {name: value for name, value in {**shared, **kinds[kind]}.items() if name in accepted}
            for kind, accepted in zip(self.kinds, self.accepted, strict=True)
        ]

    def _per_kind(self, kind: str, like: Tensor, tokens: Tokens) -> dict[str, Any]:
        """Mask and rotary tables of the layers of one kind of attention."""
        window = self.config.sliding_window if kind == "sliding_attention" else None
        found: dict[str, Any] = {"attention_mask": self._mask(like, tokens, window)}
        if self.rotary_emb is not None:
            typed = "layer_type" in inspect.signature(self.rotary_emb.forward).parameters
            with torch.no_grad():
                found["position_embeddings"] = self.rotary_emb(
                    like, tokens.positions, *([kind] if typed else [])
                )
        return found

    def _mask(self, like: Tensor, tokens: Tokens, window: int | None) -> Tensor | None:
        implementation = getattr(self.config, "_attn_implementation", None)
        if implementation not in (None, "sdpa", "eager"):
            raise ValueError(
                "model: expected the attention implementation 'sdpa' or 'eager' (no other carries "
                f"tangents), got {implementation!r}; see its set_attn_implementation"
            )
        if implementation == "eager":  # adds what it is given, and is not causal without
            zero = torch.zeros((), dtype=like.dtype, device=like.device)
            return torch.where(tokens.visible(window), zero, torch.finfo(like.dtype).min)
        return None if tokens.is_causal(window) else tokens.visible(window)

    def turn(self, h: Tensor, context: Any) -> Tensor:
        for layer, arguments in zip(self.layers, context, strict=True):
            h = first_output(layer(h, **arguments))
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
        self.accepted = [_accepted(layer, _CORE_ARGUMENTS) for layer in self.core_block]

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
        arguments = [{name: offered[name] for name in accepted} for accepted in self.accepted]
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


_STACK_ARGUMENTS = (
    "attention_mask position_ids position_embeddings cache_position use_cache".split()
)
# Layers of the transformers library hand these on to their attention if they don't name them.
_HANDED_ON = {"attention_mask", "position_ids", "position_embeddings"}
_CORE_ARGUMENTS = "freqs_cis step_idx block_idx mask".split()


def _check_map(layer: nn.Module) -> None:
    """Raise TypeError for a layer that needs more than a state, as a decoder's do."""
    for p in list(inspect.signature(layer.forward).parameters.values())[1:]:
        # transformers gives the tables of positions a default, but needs them.
        if _is_needed(p) or p.name == "position_embeddings":
            raise TypeError(
                f"model: expected a list of layers h -> h', but {type(layer).__name__} needs "
                f"{p.name!r}; of a decoder, pass the model itself, and a slice of its layers as "
                "`layers`"
            )


def _is_needed(p: inspect.Parameter) -> bool:
    return p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)


def _accepted(layer: nn.Module, offered: Any) -> set[str]:
    """Which of the offered arguments a layer takes besides the state.

    Raises:
        TypeError: it needs one that is not offered.
    """
    parameters = list(inspect.signature(layer.forward).parameters.values())
    names = {p.name for p in parameters[1:]}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        names |= _HANDED_ON
    for p in parameters[1:]:
        if _is_needed(p) and p.name not in offered:
            raise TypeError(
                f"model: expected layers that take h and {list(offered)}, but "
                f"{type(layer).__name__} needs {p.name!r}"
            )
    return names & set(offered)


def _attention_kind(layer: nn.Module, index: int, config: Any) -> str:
    """full_attention or sliding_attention."""
    kinds = getattr(config, "layer_types", None)
    kind = getattr(layer, "attention_type", None) or (kinds[index] if kinds else None)
    if kind is None:
        slides = getattr(config, "use_sliding_window", True) is not False
        window = getattr(config, "sliding_window", None)
        kind = "sliding_attention" if slides and window else "full_attention"
    if kind not in ("full_attention", "sliding_attention"):
        raise ValueError(
            f"model: expected layers of full_attention or sliding_attention, got {kind}"
        )
    return kind


def _check_causal(layers: nn.ModuleList, config: Any) -> None:
    both_ways = getattr(config, "use_bidirectional_attention", False)
    causal = getattr(config, "is_causal", True) is not False and not both_ways
    if not causal or any(getattr(m, "is_causal", True) is False for m in layers.modules()):
        raise ValueError("model: expected causal attention, got attention in both directions")


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


def _closing_norm(stack: Any) -> nn.Module:
    for name in ("norm", "final_layernorm", "final_layer_norm", "ln_f"):
        if isinstance(getattr(stack, name, None), nn.Module):
            return getattr(stack, name)
    raise TypeError(
        "norm: expected the model to have norm, final_layernorm, final_layer_norm or ln_f, got "
        f"{type(stack).__name__} without one"
    )


def refuse(what: str, **options: Any) -> None:
    """Raise ValueError for an option that means nothing to this kind of block."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name}: expected None for {what}, got {type(value).__name__}")


def _like(h: Tensor) -> Tensor:
    """A tensor of h's shape, dtype and device, without its values, tangent or memory."""
    return torch.zeros((), dtype=h.dtype, device=h.device).expand(h.shape)
