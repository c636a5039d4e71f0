"""A decoder of transformers taken apart for a looped one, and whether its parts are understood."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stars_fast.models.decoder_layers import DecoderLayers, closing_norm, run_layers
from stars_fast.models.injection import Adapter
from stars_fast.models.loop_keys import refuse_unread_loop
from stars_fast.models.looped_decoder.model import causal_class, layer_name
from stars_fast.models.looped_decoder.parts import LearnedState

_TOKENS = 8
"""Tokens of the sequence on which decoder and parts are compared."""

_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Relative error in the L2 norm up to which they are the same; 16 bits see 0.05. What is not
understood differs by far more, or not at all on small logits."""


def check_decoder(model: Any) -> None:
    """Refuse what is no causal decoder of transformers.

    Raises:
        TypeError: it says what came instead.
        ValueError: its configuration tells of a loop that it does not run.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model: expected a causal language model of transformers, got {type(model).__name__}"
        )
    kind = type(model).__name__
    if "turns" in model.config.attribute_map:
        raise TypeError(f"model: expected a decoder that does not loop yet, got {kind}")
    if model.config.is_encoder_decoder:
        raise TypeError(f"model: expected a decoder, got {kind}, which has an encoder")
    expected = causal_class(model.config)
    if not isinstance(model, expected):
        raise TypeError(f"model: expected a {expected.__name__}, got {kind}")
    refuse_unread_loop(vars(model.config), type(model.config))
    stack = model.base_model
    layers = getattr(stack, layer_name(stack))
    closing_norm(stack)
    told = getattr(model.config, "num_hidden_layers", None)
    if len(layers) != told:
        raise TypeError(
            f"model: expected a decoder of num_hidden_layers={told} layers, got {kind} with "
            f"{len(layers)}"
        )
    if model.get_output_embeddings() is None:
        raise TypeError(f"model: expected a head (get_output_embeddings), got {kind} without one")


def take_over(cls: Any, config: Any, model: Any) -> Any:
    """A `LoopedDecoderForCausalLM` that is made of the modules of `model`."""
    base = model.base_model
    with torch.device("meta"):
        looped = cls(config)
    inner = looped.model
    config.decoder = inner.stem.config = model.config
    outside = {layer_name(base), closing_norm(base)}
    own = *base.named_children(), *base._parameters.items(), *base._buffers.items()
    for name, part in own:
        if name not in outside:
            setattr(inner.stem, name, part)
    layers = getattr(base, layer_name(base))
    parts = inner.prelude_layers, inner.block, inner.coda_layers
    for part, places in zip(parts, config.parts, strict=True):
        for i, place in enumerate(places):
            part[i] = layers[place]
    inner.norm = getattr(base, closing_norm(base))
    looped.lm_head = model.get_output_embeddings()
    like = looped.lm_head.weight
    for made in (inner.adapter, inner.learned, inner.norm_between):
        if made is not None:
            made.to_empty(device=like.device).to(like.dtype)
            _start(made)
    inner._calls.config, inner._calls.rotary = config.decoder, inner.rotary
    return looped


@torch.no_grad()
def _start(module: nn.Module) -> None:
    if isinstance(module, Adapter):
        module.linear.weight.copy_(module.start())
    elif isinstance(module, LearnedState):
        module.vector.zero_()
    else:
        assert isinstance(module, nn.RMSNorm)
        nn.init.ones_(module.weight)


@torch.no_grad()
def check_understood(looped: Any, model: Any) -> None:
    """Compare a decoder with its parts put together again, on a few tokens.

    Raises:
        TypeError: the logits differ, or the parts or the decoder don't run, so that its forward
            does more than is known here.
        ValueError: as `DecoderLayers.arguments`.
    """
    kind, was_training = type(model).__name__, model.training
    size = min(_TOKENS, model.config.vocab_size)
    tokens = torch.arange(size, device=looped.lm_head.weight.device).unsqueeze(0)
    wanted = "model: expected an architecture whose forward is embedding, layers, norm and head"
    model.eval()
    try:
        with _named(
            f"model: expected a decoder that runs on tokens alone, got {kind}, which fails with"
        ):
            expected = model(input_ids=tokens, use_cache=False).logits
        with _named(f"{wanted}, got {kind}: its parts put together again fail with"):
            found = _put_together(looped, model, tokens)
    finally:
        model.train(was_training)
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    if not error <= _ROUNDING.get(expected.dtype, 0.05):
        raise TypeError(
            f"{wanted}, got {kind}: its parts put together again give other logits (relative "
            f"error {error:.1e})"
        )


def _put_together(looped: Any, model: Any, tokens: Tensor) -> Tensor:
    """Logits [1, S, V] of all layers of the decoder, one after the other."""
    inner = looped.model
    context = inner.prepare(inner.like(tokens))
    layers = list(getattr(model.base_model, layer_name(model.base_model)))
    every = DecoderLayers(list(enumerate(layers)), model.config, inner.rotary)
    h = inner.embed(tokens, context)
    h = run_layers(layers, h, every.arguments(h, context.tokens))
    return looped.logits(inner.norm(h))


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Say of an error of another library's code what failed; errors about the model are left."""
    try:
        yield
    except Exception as error:
        if str(error).startswith("model: expected"):
            raise
        raise TypeError(f"{what} {type(error).__name__}: {error}") from error
