"""Phi, the map of one turn, of a looped (or loopable) language model, as a callable h -> h'.

    block = looped_block(model, attention_mask=mask)
    loss = fused_jsrr(block, h, mask=mask)

The model's own layers run, unmodified; what a turn needs besides the state (attention masks, rotary
tables, injected inputs) is prepared here.

Shapes: B batch, S tokens, D model width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stars_fast.dual.run import first_output
from stars_fast.models.token_layout import TokenLayout

# Where wrappers and heads keep the model inside.
_INNER = ("module", "_orig_mod", "base_model", "model", "transformer")
_TOKEN_NAMES = {"input_ids", "tokens", "idx"}
_OPTIONS = ("attention_mask", "position_ids", "cu_seqlens", "inputs")


def looped_block(
    model: Any,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    inputs: Tensor | None = None,
    norm: bool | None = None,
    layers: slice | None = None,
) -> Callable[..., Any]:
    """The shared block of one turn, ready for `fused_jsrr`, `fused_jvp` and `explain`.

    What counts as the turn:
        Ouro (this package's, or loaded by remote code): all layers, then the closing norm.
        Huginn: the adapter on (state, inputs), then the core block. Its layers take no mask, so
            pads must stand on the right, and documents can't be packed.
        `LoopedLM`: its `block`.
        any decoder stack of transformers (Llama, Qwen, Mistral, Gemma, GPT-2, ...): all its layers,
            or those in `layers`; its closing norm belongs to the head and is left out unless
            `norm=True`.
        a list of modules h -> h: one after the other.
        any other module or callable that takes a state: itself.

    The result is the model's own module or callable for `LoopedLM` and the last kind, else a
    `LoopedBlock`, whose parameters are those that the turn uses.
    Masks and tables are worked out at the first call, for the shape of its h, and kept until the
    shape changes.

    Args:
        model: the model, with or without its head; wrapped by DDP, torch.compile or PEFT or not.
        attention_mask: [B, S], boolean or 0/1, 1 for real tokens; pads may stand anywhere.
            Hand it to `fused_jsrr` as `mask` too.
        position_ids: [S], [1, S] or [B, S] integers. By default the real tokens of a row (or of
            a packed document) are counted from 0.
        cu_seqlens: [n + 1] bounds of documents packed in one row, h [1, total, D]: each sees
            itself alone. Hand it to `fused_jsrr` too.
        inputs: [B, S, D], Huginn's injected input embeddings (the prelude's output). The Jacobian
            is that in the state alone; the gradient of the loss reaches `inputs` unless detached.
        norm: whether the closing norm ends the turn; by default for Ouro only.
        layers: which layers of a decoder stack make up the block; all by default.

    Raises:
        TypeError: no turn is known in `model`; what was looked for is named. A layer takes an
            argument that is not known here.
        ValueError: an option that this kind of model can't take, a kind of attention other than
            causal (full or sliding window), or (at the call) a mask of another shape than h.
    """
    given = {
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "cu_seqlens": cu_seqlens,
        "inputs": inputs,
    }
    if isinstance(model, (list, tuple, nn.ModuleList)):
        _refuse("a list of layers", norm=norm, layers=layers, **given)
        return _Chain(model)
    if _is_looped_lm(model):
        _refuse("LoopedLM", norm=norm, layers=layers, **given)
        return model.block
    if not _takes_tokens(model):
        if not callable(model) or _has_no_forward(model):
            raise _unknown(model)
        _refuse("a callable h -> h'", norm=norm, layers=layers, **given)
        return model

    inside = list(_inside(model))
    config = next((m.config for m in inside if getattr(m, "config", None) is not None), None)
    is_ouro = getattr(config, "model_type", None) == "ouro"
    for part in inside:
        if is_ouro and all(callable(getattr(part, name, None)) for name in ("prepare", "turn")):
            _refuse("Ouro's own turn", layers=layers, norm=None if norm else norm)
            return _OuroTurn(part, given)
        if hasattr(part, "core_block") and hasattr(part, "adapter"):
            _refuse("Huginn's core block", layers=layers, norm=norm or None)
            return _CoreBlock(part, _holder_of(inside, "freqs_cis"), config, given)
    for part in inside:
        for name in ("layers", "h"):
            stack = getattr(part, name, None)
            if isinstance(stack, nn.ModuleList):
                own = getattr(part, "config", config)
                ends = is_ouro if norm is None else norm
                return _DecoderStack(part, _chosen(stack, own, layers), own, ends, given)
    raise _unknown(model)


def _unknown(model: Any) -> TypeError:
    return TypeError(
        f"model: expected Ouro (model_type 'ouro' with prepare and turn), Huginn "
        f"(transformer.adapter and transformer.core_block), LoopedLM (block, prelude, coda), a "
        f"decoder with a ModuleList `layers` or `h`, a list of layers, or a callable h -> h', got "
        f"{type(model).__name__}"
    )


class LoopedBlock(nn.Module):
    """One turn h [B, S, D] -> [B, S, D], with what it needs besides h; made by `looped_block`.

    A call may bring its own `attention_mask`, `position_ids`, `cu_seqlens` or `inputs`, which
    replace those of construction: `fused_jsrr(block, h, kwargs={"attention_mask": mask})` cuts them
    along with h where `fraction` < 1.
    """

    def __init__(self, given: dict[str, Tensor | None]) -> None:
        super().__init__()
        self._given = given
        self._kept: tuple[Any, Any] | None = None

    def forward(self, h: Tensor, **options: Tensor | None) -> Tensor:
        """h [B, S, D], a tensor or a `Dual` -> [B, S, D].

        Raises TypeError for an unknown option, and as `looped_block`.
        """
        unknown = set(options) - set(_OPTIONS)
        if unknown:
            raise TypeError(f"{sorted(unknown)[0]}: expected one of {_OPTIONS}")
        changed = {name: value for name, value in options.items() if value is not None}
        if changed:
            return self.turn(h, self.prepare(_like(h), **{**self._given, **changed}))
        # What is made in inference mode can't be used in training.
        place = h.shape, h.dtype, h.device, torch.is_inference_mode_enabled()
        key = (*place, self.settings(), _versions(self._given))
        if self._kept is None or self._kept[0] != key:
            self._kept = key, self.prepare(_like(h), **self._given)
        return self.turn(h, self._kept[1])

    def settings(self) -> Any:
        """What else the context depends on."""
        return None

    def prepare(self, like: Tensor, **given: Tensor | None) -> Any:
        """The context of a turn at the shape, dtype and device of `like`."""
        raise NotImplementedError

    def turn(self, h: Tensor, context: Any) -> Tensor:
        """One turn in a context."""
        raise NotImplementedError


class _OuroTurn(LoopedBlock):
    """A model that prepares and runs its turns itself."""

    def __init__(self, model: Any, given: dict[str, Tensor | None]) -> None:
        _refuse("Ouro", inputs=given["inputs"])
        super().__init__(given)
        # Only what a turn uses; the model itself would bring its embeddings in.
        self.layers, self.norm = model.layers, model.norm
        self._model = (model,)

    def prepare(self, like: Tensor, inputs: Tensor | None = None, **given: Tensor | None) -> Any:
        _refuse("Ouro", inputs=inputs)
        return self._model[0].prepare(like, **given)

    def turn(self, h: Tensor, context: Any) -> Tensor:
        return self._model[0].turn(h, context)


class _DecoderStack(LoopedBlock):
    """Decoder layers of the transformers library's form, and the closing norm if it is part."""

    def __init__(
        self,
        stack: Any,
        layers: list[tuple[int, nn.Module]],
        config: Any,
        norm: bool,
        given: dict[str, Tensor | None],
    ) -> None:
        _refuse("a decoder stack", inputs=given["inputs"])
        super().__init__(given)
        self.layers = nn.ModuleList(layer for _, layer in layers)
        self.norm = _closing_norm(stack) if norm else None
        self.rotary_emb = getattr(stack, "rotary_emb", None)
        self.kinds = [_attention_kind(layer, i, config) for i, layer in layers]
        self.accepted = [_accepted(layer, _STACK_ARGUMENTS) for layer in self.layers]
        self.config = config
        _check_causal(self.layers, config)

    def settings(self) -> Any:
        return getattr(self.config, "_attn_implementation", None)

    def prepare(self, like: Tensor, inputs: Tensor | None = None, **given: Tensor | None) -> Any:
        _refuse("a decoder stack", inputs=inputs)
        layout = TokenLayout.of(like, **given)
        shared = {
            "position_ids": layout.positions,
            "cache_position": torch.arange(like.shape[1], device=like.device),
            "use_cache": False,
        }
        kinds = {kind: self._per_kind(kind, like, layout) for kind in set(self.kinds)}
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

    def _per_kind(self, kind: str, like: Tensor, layout: TokenLayout) -> dict[str, Any]:
        """Mask and rotary tables of the layers of one kind of attention."""
        window = self.config.sliding_window if kind == "sliding_attention" else None
        found: dict[str, Any] = {"attention_mask": self._mask(like, layout, window)}
        if self.rotary_emb is not None:
            typed = "layer_type" in inspect.signature(self.rotary_emb.forward).parameters
            with torch.no_grad():
                found["position_embeddings"] = self.rotary_emb(
                    like, layout.positions, *([kind] if typed else [])
                )
        return found

    def _mask(self, like: Tensor, layout: TokenLayout, window: int | None) -> Tensor | None:
        implementation = self.settings()
        if implementation not in (None, "sdpa", "eager"):
            raise ValueError(
                "model: expected the attention implementation 'sdpa' or 'eager' (no other carries "
                f"tangents), got {implementation!r}; see its set_attn_implementation"
            )
        if implementation == "eager":  # adds what it is given, and is not causal without
            zero = torch.zeros((), dtype=like.dtype, device=like.device)
            return torch.where(layout.visible(window), zero, torch.finfo(like.dtype).min)
        return None if layout.is_causal(window) else layout.visible(window)

    def turn(self, h: Tensor, context: Any) -> Tensor:
        for layer, arguments in zip(self.layers, context, strict=True):
            h = first_output(layer(h, **arguments))
        return h if self.norm is None else self.norm(h)


class _CoreBlock(LoopedBlock):
    """Huginn: the adapter mixes the input into the state, then the core layers.

    Its layers are always causal and take no other mask of tensors; pads on the right need none.
    """

    def __init__(
        self, core: Any, holder: Any, config: Any, given: dict[str, Tensor | None]
    ) -> None:
        super().__init__(given)
        if getattr(config, "test_time_noise", 0):
            raise ValueError(
                "model: expected config.test_time_noise = 0 (the map of a turn would be random), "
                f"got {config.test_time_noise}"
            )
        self.adapter, self.core_block = core.adapter, core.core_block
        self._holder = (holder,)
        self.accepted = [_accepted(layer, _CORE_ARGUMENTS) for layer in self.core_block]

    def prepare(self, like: Tensor, inputs: Tensor | None = None, **given: Tensor | None) -> Any:
        if inputs is None:
            raise ValueError(
                "inputs: expected Huginn's injected input [B, S, D], the prelude's output, got None"
            )
        if inputs.shape != like.shape:
            raise ValueError(
                f"inputs: expected the shape of h {list(like.shape)}, got {list(inputs.shape)}"
            )
        layout = TokenLayout.of(like, **given)
        layout.check_pads_last("Huginn")
        table = self._holder[0].freqs_cis  # [1, longest, 1, ...], by position
        if like.shape[1] > table.shape[1]:
            raise ValueError(
                f"h: expected at most {table.shape[1]} tokens (Huginn's rotary table), "
                f"got {like.shape[1]}"
            )
        offered = {
            "freqs_cis": table.to(like.device)[0, layout.positions],
            "step_idx": 0,
            "block_idx": 0,
            "mask": None,
        }
        arguments = [{name: offered[name] for name in accepted} for accepted in self.accepted]
        return inputs.to(like.device), arguments

    def turn(self, h: Tensor, context: Any) -> Tensor:
        inputs, arguments = context
        h = self.adapter(torch.cat([h, inputs], dim=-1))
        for layer, each in zip(self.core_block, arguments, strict=True):
            h = first_output(layer(h, **each))
        return h


class _Chain(LoopedBlock):
    """Modules h -> h, one after the other."""

    def __init__(self, layers: Any) -> None:
        super().__init__({})
        for layer in layers:
            if not isinstance(layer, nn.Module):
                raise TypeError(f"model: expected a list of modules, got a {type(layer).__name__}")
            _accepted(layer, ())
        self.layers = nn.ModuleList(layers)

    def forward(self, h: Tensor) -> Tensor:  # type: ignore[override]
        for layer in self.layers:
            h = first_output(layer(h))
        return h


_STACK_ARGUMENTS = (
    "attention_mask position_ids position_embeddings cache_position use_cache".split()
)
# Layers of the transformers library hand these on to their attention if they don't name them.
_HANDED_ON = {"attention_mask", "position_ids", "position_embeddings"}
_CORE_ARGUMENTS = "freqs_cis step_idx block_idx mask".split()


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
        needed = p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        if needed and p.name not in offered:
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


def _chosen(stack: nn.ModuleList, config: Any, layers: slice | None) -> list[tuple[int, nn.Module]]:
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


def _inside(model: Any) -> Iterator[Any]:
    """The model and the models within it, from the outside in."""
    seen: set[int] = set()
    todo = [model]
    while todo:
        part = todo.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        inner = (getattr(part, name, None) for name in _INNER)
        todo += [each for each in inner if isinstance(each, nn.Module)]


def _holder_of(parts: list[Any], name: str) -> Any:
    holder = next((part for part in parts if isinstance(getattr(part, name, None), Tensor)), None)
    if holder is None:
        raise TypeError(
            f"model: expected Huginn's rotary table {name}, got {type(parts[0]).__name__}"
        )
    return holder


def _is_looped_lm(model: Any) -> bool:
    return isinstance(getattr(model, "block", None), nn.Module) and all(
        callable(getattr(model, name, None)) for name in ("prelude", "coda")
    )


def _takes_tokens(model: Any) -> bool:
    """Whether this is a language model rather than a map of states."""
    if not isinstance(model, nn.Module):
        return False
    if isinstance(getattr(model, "module", None), nn.Module):
        return _takes_tokens(model.module)
    if hasattr(model, "get_input_embeddings"):
        return True
    parameters = inspect.signature(model.forward).parameters
    return bool(_TOKEN_NAMES & set(list(parameters)[:1]))


def _has_no_forward(model: Any) -> bool:
    return isinstance(model, nn.Module) and type(model).forward is nn.Module.forward


def _refuse(what: str, **options: Any) -> None:
    """Raise ValueError for an option that means nothing to this kind of block."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name}: expected None for {what}, got {type(value).__name__}")


def _versions(given: dict[str, Any]) -> list[int]:
    """What changes when a tensor is written to in place."""
    tensors = (value for value in given.values() if isinstance(value, Tensor))
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


def _like(h: Tensor) -> Tensor:
    """A tensor of h's shape, dtype and device, without its values, tangent or memory."""
    return torch.zeros((), dtype=h.dtype, device=h.device).expand(h.shape)
