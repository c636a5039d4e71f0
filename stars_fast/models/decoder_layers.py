"""Decoder layers of the transformers library as functions of the state: what they take besides it.

Shapes: B batch, S tokens, D model width.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stars_fast.dual.dual_pass import first_output
from stars_fast.tokens import Tokens

CACHE_NAMES = ("cache", "past_key_values", "layer_past")
"""Names of a layer's argument for the cache: that of today, that of before, and GPT-NeoX's."""

_ARGUMENTS = (
    *"attention_mask position_ids position_embeddings cache_position use_cache".split(),
    *CACHE_NAMES,
)
# Layers hand these on to their attention if they don't name them.
_HANDED_ON = {"attention_mask", "position_ids", "position_embeddings"}


class DecoderLayers:
    """The arguments of some layers of one decoder, in the order in which they run.

    Args:
        layers: with their place in the decoder.
        config: of the decoder.
        rotary: its module of rotary tables; None where its positions are not rotary.

    Attributes:
        kinds: full_attention or sliding_attention of each.
        accepted: the arguments of each, of those that are known here.

    Raises:
        TypeError: a layer needs an argument that is not known here.
        ValueError: its attention is not causal, full or with a sliding window.
    """

    def __init__(
        self, layers: Sequence[tuple[int, nn.Module]], config: Any, rotary: nn.Module | None
    ) -> None:
        self.config = config
        self.rotary = rotary
        self.kinds = [_attention_kind(layer, place, config) for place, layer in layers]
        # Falcon's layers take the biases of ALiBi, and None where its positions are rotary.
        offered = _ARGUMENTS if getattr(config, "alibi", True) else (*_ARGUMENTS, "alibi")
        self.accepted = [accepted(layer, offered) for _, layer in layers]
        self._names = [type(layer).__name__ for _, layer in layers]
        _check_causal([layer for _, layer in layers], config)

    def arguments(self, like: Tensor, tokens: Tokens) -> list[dict[str, Any]]:
        """The arguments of each layer besides the state, for `run_layers`.

        Args:
            like: [B, S, D]; shape, dtype and device count.
            tokens: of the states.

        Raises:
            ValueError: a layer can't take the mask that it needs, or the attention implementation
                is one that carries no tangents.
        """
        shared = {
            "position_ids": tokens.positions,
            "cache_position": torch.arange(
                tokens.past, tokens.past + like.shape[1], device=like.device
            ),
            "use_cache": False,
            "alibi": None,
            **dict.fromkeys(CACHE_NAMES),
        }
        kinds = {kind: self._per_kind(kind, like, tokens) for kind in set(self.kinds)}
        for kind, names, layer in zip(self.kinds, self.accepted, self._names, strict=True):
            if kinds[kind]["attention_mask"] is not None and "attention_mask" not in names:
                raise ValueError(
                    f"model: expected layers that take attention_mask, which pads, documents and "
                    f"windows need; {layer} doesn't"
                )
        return [
            {name: value for name, value in {**shared, **kinds[kind]}.items() if name in names}
            for kind, names in zip(self.kinds, self.accepted, strict=True)
        ]

    def made_of(self) -> tuple[Any, list[Tensor]]:
        """Settings and tensors that arguments depend on besides h and the tokens."""
        names = ("_attn_implementation", "sliding_window")
        tables = [] if self.rotary is None else list(self.rotary.buffers())
        return [getattr(self.config, name, None) for name in names], tables

    def _per_kind(self, kind: str, like: Tensor, tokens: Tokens) -> dict[str, Any]:
        """Mask and rotary tables of the layers of one kind of attention."""
        window = self.config.sliding_window if kind == "sliding_attention" else None
        found: dict[str, Any] = {"attention_mask": self._mask(like, tokens, window)}
        if self.rotary is not None:
            typed = "layer_type" in inspect.signature(self.rotary.forward).parameters
            with torch.no_grad():
                found["position_embeddings"] = self.rotary(
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
        plain = tokens.is_causal(window) and (not tokens.past or tokens.length == 1)
        return None if plain else tokens.visible(window)


def run_layers(
    layers: Iterable[nn.Module], h: Tensor, arguments: list[dict[str, Any]], cache: Any = None
) -> Tensor:
    """h [B, S, D], a tensor or a `Dual`, through all layers -> [B, S, D].

    Args:
        arguments: of each layer, from `DecoderLayers.arguments`.
        cache: an object whose `update` takes keys and values of a layer; None for no cache.
    """
    for layer, given in zip(layers, arguments, strict=True):
        if cache is not None:
            told = dict.fromkeys(CACHE_NAMES, cache) | {"use_cache": True}
            given = given | {name: told[name] for name in told if name in given}
        h = first_output(layer(h, **given))
    return h


def accepted(layer: nn.Module, offered: Any) -> set[str]:
    """Names of the offered arguments that a layer takes besides the state.

    Raises:
        TypeError: it needs one that is not offered.
    """
    parameters = list(inspect.signature(layer.forward).parameters.values())
    names = {p.name for p in parameters[1:]}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        names |= _HANDED_ON
    for p in parameters[1:]:
        if is_needed(p) and p.name not in offered:
            raise TypeError(
                f"model: expected layers that need nothing but h and {', '.join(offered)}, got "
                f"{type(layer).__name__}, which needs {p.name!r}"
            )
    return names & set(offered)


def is_needed(p: inspect.Parameter) -> bool:
    """Whether a call has to give this argument."""
    return p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)


def _attention_kind(layer: nn.Module, index: int, config: Any) -> str:
    """full_attention or sliding_attention."""
    kinds = getattr(config, "layer_types", None)
    kind = getattr(layer, "attention_type", None) or (kinds[index] if kinds else None)
    if kind is None:
        slides = getattr(config, "use_sliding_window", True) is not False and _reads_window(layer)
        window = getattr(config, "sliding_window", None)
        kind = "sliding_attention" if slides and window else "full_attention"
    if kind not in ("full_attention", "sliding_attention"):
        raise ValueError(
            f"model: expected layers of full_attention or sliding_attention, got {kind}"
        )
    return kind


def _reads_window(layer: nn.Module) -> bool:
    """Whether the code of a layer heeds `sliding_window`: that of transformers makes masks of it in
    the same file (a Llama whose configuration has kept the key does not); of other code it is
    assumed."""
    file = type(layer).__module__
    if not file.startswith("transformers."):
        return True
    return hasattr(sys.modules[file], "create_sliding_window_causal_mask")


def _check_causal(layers: Sequence[nn.Module], config: Any) -> None:
    both_ways = getattr(config, "use_bidirectional_attention", False)
    causal = getattr(config, "is_causal", True) is not False and not both_ways
    modules = (module for layer in layers for module in layer.modules())
    if not causal or any(getattr(m, "is_causal", True) is False for m in modules):
        raise ValueError("model: expected causal attention, got attention in both directions")


def layer_list(stack: Any) -> nn.ModuleList | None:
    """The layers of a decoder, where it has them under a known name (`layers`, `h`)."""
    found = (getattr(stack, name, None) for name in LAYER_NAMES)
    return next((each for each in found if isinstance(each, nn.ModuleList)), None)


LAYER_NAMES = ("layers", "h")
_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


def closing_norm(stack: Any) -> str:
    """The name of a decoder's norm after its last layer.

    Raises:
        TypeError: it has none of the known names.
    """
    for name in _NORM_NAMES:
        if isinstance(getattr(stack, name, None), nn.Module):
            return name
    raise TypeError(
        f"model: expected a decoder with a closing norm {' or '.join(_NORM_NAMES)}, got "
        f"{type(stack).__name__} without one"
    )
