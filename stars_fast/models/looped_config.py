"""Sizes and layout of a `LoopedLM`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from stars_fast.base.checks import check_integer
from stars_fast.models.injection import INJECTIONS, adapter_keeps_state, check_injection

PLACEMENTS = ("pre", "post", "pre-sandwich", "post-sandwich")
NORMS = ("layernorm", "rmsnorm", "simplenorm")
STATES = ("prelude", "noise")
POSITIONS = ("learned", "none")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}


@dataclass
class LoopedConfig:
    """Sizes and layout of a `LoopedLM`; the defaults are the paper's addition model.

    vocab_size: number of token ids.
    max_length: longest sequence, in tokens.
    d_model: width of the states.
    n_heads: attention heads; must divide d_model.
    d_ff: width of the MLP.
    n_layers: layers in the shared block.
    n_prelude: layers with weights of their own before the first turn.
    n_coda: layers with weights of their own after the last turn.
    placement: of the norms: pre, post, pre-sandwich or post-sandwich.
    norm: layernorm, rmsnorm, or simplenorm (LayerNorm without scale and shift).
    activation: of the MLP: gelu, relu or silu.
    dropout: probability in [0, 1), on embeddings and each sub-layer's output.
    injection: what a turn takes from the prelude besides the state: none, add (the prelude's output
        is added to the state), or adapter (a linear map of both).
    state: what the first turn starts from: prelude (its output), or noise (standard normal: drawn
        anew in training, else a function of the token's place), for which there is an injection.
    adapter_start: what an adapter gives before training: state (a turn is what it would be without
        one), or inputs (the prelude's output alone, so that the state is learned to be used); none
        for state where the first state is the prelude's output, else inputs.
    positions: learned, a vector for each of max_length places; or none, where only causality and
        the window tell tokens apart, so that longer sequences hold no unknown place.
    window: tokens that attention sees, itself and those before it; none for all. What a token knows
        then moves window - 1 places a layer, and turns are what distant tokens take to meet.

    Raises:
        ValueError: it names the first field that is out of range.
    """

    vocab_size: int
    max_length: int
    d_model: int = 512
    n_heads: int = 8
    d_ff: int = 1024
    n_layers: int = 1
    n_prelude: int = 0
    n_coda: int = 0
    placement: str = "post-sandwich"
    norm: str = "layernorm"
    activation: str = "gelu"
    dropout: float = 0.0
    injection: str = "none"
    state: str = "prelude"
    adapter_start: str | None = None
    positions: str = "learned"
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_length", "d_model", "n_heads", "d_ff", "n_layers"):
            check_integer(name, getattr(self, name), 1)
        for name in ("n_prelude", "n_coda"):
            check_integer(name, getattr(self, name), 0)
        if self.d_model % self.n_heads:
            raise ValueError(
                f"n_heads must divide d_model, got n_heads={self.n_heads}, d_model={self.d_model}"
            )
        for name, choices in (
            ("placement", PLACEMENTS),
            ("norm", NORMS),
            ("activation", tuple(ACTIVATIONS)),
            ("injection", INJECTIONS),
            ("state", STATES),
            ("positions", POSITIONS),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: expected one of {choices}, got {getattr(self, name)!r}")
        check_injection(self.injection, self.state, self.adapter_start)
        if self.window is not None:
            check_integer("window", self.window, 2)
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout: expected a value in [0, 1), got {self.dropout!r}")

    @property
    def adapter_keeps_state(self) -> bool:
        """Whether an adapter gives the state before training, and not the prelude's output."""
        return adapter_keeps_state(self.adapter_start, self.state)
