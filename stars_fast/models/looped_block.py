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

from torch import Tensor, nn

from stars_fast.models.block_kinds import (
    Chain,
    CoreBlock,
    DecoderStack,
    HuginnTurn,
    LoopedDecoderTurn,
    OuroTurn,
    chosen_layers,
    refuse,
)
from stars_fast.models.decoder_layers import layer_list
from stars_fast.models.loop_keys import norm_closes_turn

# Where wrappers and heads keep the model inside.
_WRAPPED = ("module", "_orig_mod")
_INNER = (*_WRAPPED, "base_model", "model", "transformer")
_TOKEN_NAMES = {"input_ids", "tokens", "idx"}


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
        Huginn: the adapter on (state, inputs), then the core block. Loaded by remote code, its
            layers take no mask, so pads must stand on the right, and documents can't be packed.
        a looped decoder (`LoopedDecoderForCausalLM`): injection, block, and its norm between turns.
        `LoopedLM`: its `block`, after the injection if it has one.
        any decoder stack of transformers (Llama, Qwen, Mistral, Gemma, GPT-2, ...): all its layers,
            or those in `layers`; its closing norm belongs to the head and is left out unless
            `norm=True`.
        Nanbeige, a decoder stack that loops itself: all layers, then the closing norm unless its
            configuration says `skip_loop_final_norm`. A configuration that tells of another loop is
            an error: there `layers` and `norm` have to say what a turn is.
        a list of modules h -> h: one after the other.
        any other module or callable that takes a state: itself. A module takes tokens if it has
            get_input_embeddings, or names its first argument so and holds an nn.Embedding.

    The result is the model's own module or callable for `LoopedLM` and the last kind, else a
    `LoopedBlock`, whose parameters are those that the turn uses.
    Masks and tables are worked out at the first call, for the shape of its h, and kept until that
    changes or what they are made of does: a tensor given here, the model's rotary table, its window
    or attention implementation. A tensor made in inference mode can't tell, and nothing made of it
    is kept. The layers are those that the model has when this is called.

    Args:
        model: the model, with or without its head; wrapped by DDP, torch.compile or PEFT or not.
        attention_mask: [B, S], boolean or integers 0/1 (on the CPU floats too), 1 for real tokens;
            pads may stand anywhere. Hand it to `fused_jsrr` as `mask` too.
        position_ids: [S], [1, S] or [B, S] integers. By default the real tokens of a row (or of
            a packed document) are counted from 0. Where they fall or stay within a row, a packed
            document begins, which sees itself alone; with `attention_mask` that is an error.
            The host doesn't wait to look at positions on a GPU: a decoder stack given them there
            runs under a dense mask.
        cu_seqlens: [n + 1] bounds of documents packed in one row, h [1, total, D]: each sees
            itself alone. It goes with neither of the above. Hand it to `fused_jsrr` too.
        inputs: [B, S, D], the injected input of Huginn, and of looped decoders and `LoopedLM` with
            an injection (the prelude's output). The Jacobian is that in the state alone; the
            gradient of the loss reaches `inputs` unless detached.
        norm: whether the closing norm ends the turn; by default for Ouro and Nanbeige only.
        layers: which layers of a decoder stack make up the block; all by default.

    Raises:
        TypeError: no turn is known in `model`; what was looked for is named. A layer takes an
            argument that is not known here.
        ValueError: an option that this kind of model can't take, a loop that is not known (its keys
            are named), a kind of attention other than causal (full or sliding window), or (at the
            call) arguments that don't fit h or each other.
    """
    given = {
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "cu_seqlens": cu_seqlens,
        "inputs": inputs,
    }
    if isinstance(model, (list, tuple, nn.ModuleList)):
        refuse("a list of layers", norm=norm, layers=layers, **given)
        return Chain(model)
    bare = _unwrapped(model)
    if _is_looped_lm(bare) and not hasattr(bare, "takes_turns"):
        if not getattr(bare, "injects", False):
            refuse("LoopedLM without injection", norm=norm, layers=layers, **given)
            return bare.block
        refuse("LoopedLM", norm=norm, layers=layers, **(given | {"inputs": None}))
        return bare.turn(inputs)
    if not _takes_tokens(bare):
        if not callable(model) or _has_no_forward(model):
            raise _unknown(model)
        refuse("a callable h -> h'", norm=norm, layers=layers, **given)
        return model

    inside = list(_inside(model))
    config = next((m.config for m in inside if getattr(m, "config", None) is not None), None)
    model_type = getattr(config, "model_type", None)
    is_ouro, is_huginn = model_type == "ouro", model_type == "huginn_raven"
    for part in inside:
        if getattr(part, "takes_turns", None) is True and model_type == "looped_decoder":
            refuse("a looped decoder", layers=layers, norm=norm)
            return LoopedDecoderTurn(part, given)
        if is_ouro and all(callable(getattr(part, name, None)) for name in ("prepare", "turn")):
            refuse("Ouro's own turn", layers=layers, norm=None if norm else norm)
            return OuroTurn(part, given)
        if is_huginn and all(callable(getattr(part, name, None)) for name in ("prepare", "turn")):
            refuse("Huginn's own turn", layers=layers, norm=norm or None)
            return HuginnTurn(part, given)
        if hasattr(part, "core_block") and hasattr(part, "adapter"):
            refuse("Huginn's core block", layers=layers, norm=norm or None)
            return CoreBlock(part, _holder_of(inside, "freqs_cis"), config, given)
    for part in inside:
        stack = layer_list(part)
        if stack is not None:
            own = getattr(part, "config", config)
            if norm is None or layers is None:  # nobody has said what a turn is
                closes = norm_closes_turn(own)
                norm = closes if norm is None else norm
            return DecoderStack(part, chosen_layers(stack, own, layers), own, norm, given)
    raise _unknown(model)


def _unknown(model: Any) -> TypeError:
    return TypeError(
        f"model: expected Ouro (model_type 'ouro' with prepare and turn), Huginn "
        f"(transformer.adapter and transformer.core_block), LoopedLM (block, prelude, coda), a "
        f"decoder with a ModuleList `layers` or `h`, a list of layers, or a callable h -> h', got "
        f"{type(model).__name__}"
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


def _unwrapped(model: Any) -> Any:
    """The model without DistributedDataParallel, torch.compile and the like."""
    inner = (getattr(model, name, None) for name in _WRAPPED)
    found = next((each for each in inner if isinstance(each, nn.Module)), None)
    return model if found is None else _unwrapped(found)


def _takes_tokens(model: Any) -> bool:
    """Whether this is a language model rather than a map of states."""
    if not isinstance(model, nn.Module):
        return False
    if hasattr(model, "get_input_embeddings"):
        return True
    first = next(iter(inspect.signature(model.forward).parameters), None)
    return first in _TOKEN_NAMES and any(isinstance(m, nn.Embedding) for m in model.modules())


def _has_no_forward(model: Any) -> bool:
    return isinstance(model, nn.Module) and type(model).forward is nn.Module.forward
