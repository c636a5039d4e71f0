"""Configuration of Ouro models, in the public format (`model_type` "ouro")."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PretrainedConfig

from stars_fast.base.checks import check_integer, check_number
from stars_fast.models.call_arguments import check_depth_settings

LAYER_TYPES = ("full_attention", "sliding_attention")
# Their names in transformers -> those of `ops.gated`.
OURO_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


class OuroConfig(PretrainedConfig):
    """Sizes and settings of an Ouro model; the defaults are those of Ouro-1.4B.

    Args:
        vocab_size, hidden_size, intermediate_size, num_hidden_layers: sizes.
        num_attention_heads, num_key_value_heads: heads of queries, and of keys and values (grouped
            heads where fewer).
        head_dim: width of a head; hidden_size / num_attention_heads by default.
        hidden_act: silu, gelu, gelu_pytorch_tanh or relu.
        max_position_embeddings: longest sequence, in tokens, that the model was made for.
        rms_norm_eps: of every norm.
        rope_parameters: of the rotary embedding, `{"rope_type": "default", "rope_theta": ...}`.
            `rope_theta` and `rope_scaling`, the older form, are read too, and written.
        layer_types: full_attention or sliding_attention, one a layer.
        use_sliding_window, sliding_window, max_window_layers: without `layer_types`, layers from
            the `max_window_layers`-th on see only the last `sliding_window` tokens.
        total_ut_steps: turns (also by the name `turns`).
        early_exit_step: turn (counted from 0) whose state gives the logits; None for the last.
        early_exit_threshold: exit probability from which on a token takes the state of a turn; 1
            for the last turn always.
        convergence_tol: a sequence whose states change by at most this (relative, in the L2
            norm, every token) takes no further turn; None or 0 for no such stop.
        gate: what becomes of the early-exit gate: "frozen" (kept as it is) or "ignored" (never
            evaluated, and may be missing from a checkpoint).

    Raises:
        ValueError, TypeError: a value out of range, named.
    """

    model_type = "ouro"
    auto_map: ClassVar[dict[str, str]] = {}  # read by TRL of a class outside of transformers
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache", "turns"]
    # What a call names, `from_pretrained(..., turns=8)` and lm-eval's model_args can name too.
    attribute_map: ClassVar[dict[str, str]] = {
        "turns": "total_ut_steps",
        "exit_at_step": "early_exit_step",
        "exit_threshold": "early_exit_threshold",
        "tol": "convergence_tol",
    }

    def __init__(
        self,
        vocab_size: int = 49152,
        hidden_size: int = 2048,
        intermediate_size: int = 5632,
        num_hidden_layers: int = 24,
        num_attention_heads: int = 16,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        hidden_act: str = "silu",
        max_position_embeddings: int = 65536,
        initializer_range: float = 0.02,
        rms_norm_eps: float = 1e-6,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        rope_parameters: dict[str, Any] | None = None,
        rope_theta: float | None = None,
        rope_scaling: dict[str, Any] | None = None,
        use_sliding_window: bool = False,
        sliding_window: int | None = None,
        max_window_layers: int | None = None,
        layer_types: list[str] | None = None,
        attention_dropout: float = 0.0,
        total_ut_steps: int = 4,
        early_exit_step: int | None = None,
        early_exit_threshold: float | None = 1.0,
        convergence_tol: float | None = None,
        gate: str = "frozen",
        bos_token_id: int | None = 0,
        eos_token_id: int | list[int] | None = 0,
        pad_token_id: int | None = 0,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.rms_norm_eps = rms_norm_eps
        self.use_cache = use_cache
        self.use_sliding_window = use_sliding_window
        self.sliding_window = sliding_window
        self.max_window_layers = (
            num_hidden_layers if max_window_layers is None else max_window_layers
        )
        self.layer_types = layer_types or [
            LAYER_TYPES[bool(use_sliding_window and sliding_window) and i >= self.max_window_layers]
            for i in range(num_hidden_layers)
        ]
        self.attention_dropout = attention_dropout
        self.total_ut_steps = total_ut_steps
        self.early_exit_step = early_exit_step
        self.early_exit_threshold = early_exit_threshold
        self.convergence_tol = convergence_tol
        check_depth_settings(kwargs, self.attribute_map)
        for alias in self.attribute_map:
            if alias in kwargs:
                setattr(self, alias, kwargs.pop(alias))
        self.gate = gate
        self.rope_parameters = rotary_settings(rope_parameters, rope_scaling, rope_theta)
        check_config(self)
        kwargs.pop("auto_map", None)  # code beside a checkpoint, which is never run
        shared: dict[str, Any] = {
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
            "tie_word_embeddings": tie_word_embeddings,
        }
        super().__init__(**shared, **kwargs)

    @property
    def rope_theta(self) -> float | None:
        """Base of the rotary frequencies."""
        return self.rope_parameters.get("rope_theta")

    @rope_theta.setter
    def rope_theta(self, theta: float) -> None:
        self.rope_parameters = {**self.rope_parameters, "rope_theta": float(theta)}

    @property
    def rope_scaling(self) -> dict[str, Any] | None:
        """The rotary settings in their older form: None unless scaled."""
        scaled = self.rope_parameters.get("rope_type") != "default"
        return dict(self.rope_parameters) if scaled else None

    @rope_scaling.setter
    def rope_scaling(self, scaling: dict[str, Any] | None) -> None:
        self.rope_parameters = rotary_settings(None, scaling, self.rope_theta)

    def set_depth(self, turns: int | None, tol: float | None) -> None:
        """Set how deep the model thinks; None leaves what is.

        Raises:
            TypeError, ValueError: a value out of range.
        """
        if turns is not None:
            self.total_ut_steps, self.early_exit_step = turns, None
        if tol is not None:
            self.convergence_tol = float(tol) or None
        check_config(self)

    def to_dict(self) -> dict[str, Any]:
        """With the rotary settings in both forms: `rope_parameters` for current readers,
        `rope_theta` and `rope_scaling` for older ones."""
        values = super().to_dict()
        values["rope_theta"] = self.rope_theta
        values["rope_scaling"] = self.rope_scaling
        return values


def rotary_settings(
    parameters: dict[str, Any] | None, scaling: dict[str, Any] | None, theta: float | None
) -> dict[str, Any]:
    """One form of the rotary settings, with rope_type and rope_theta; where `rope_parameters` and
    `rope_scaling` are given both, they must agree.

    Raises:
        ValueError: they don't.
    """
    forms = [dict(form) for form in (parameters, scaling) if form]
    for form in forms:
        form["rope_type"] = form.pop("type", None) or form.get("rope_type", "default")
        given = theta if theta is not None else 1_000_000.0
        form["rope_theta"] = float(given if form.get("rope_theta") is None else form["rope_theta"])
        if theta is not None and form["rope_theta"] != theta:
            raise ValueError(
                f"rope_theta: expected that of rope_parameters, {form['rope_theta']}, got {theta}"
            )
    if not forms:
        theta = 1_000_000.0 if theta is None else theta
        return {"rope_type": "default", "rope_theta": float(theta)}
    if forms[0] != forms[-1]:
        raise ValueError(f"rope_scaling: expected rope_parameters, {forms[0]}, got {forms[1]}")
    return forms[0]


def check_gate(gate: str) -> None:
    """Raise ValueError for what is no treatment of the gate."""
    if gate not in ("frozen", "ignored"):
        raise ValueError(f"gate: expected 'frozen' or 'ignored', got {gate!r}")


def check_config(config: OuroConfig) -> None:
    """Raise ValueError or TypeError that names a setting out of range."""
    sizes = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads head_dim total_ut_steps"
    )
    for name in sizes.split():
        check_integer(name, getattr(config, name), 1)
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            "num_key_value_heads must divide num_attention_heads, got "
            f"{config.num_key_value_heads} and {config.num_attention_heads}"
        )
    if config.head_dim % 2:
        raise ValueError(
            f"head_dim: expected an even number for rotary positions, got {config.head_dim}"
        )
    if config.hidden_act not in OURO_ACTIVATIONS:
        raise ValueError(
            f"hidden_act: expected one of {sorted(OURO_ACTIVATIONS)}, got {config.hidden_act!r}"
        )
    if config.attention_dropout:
        raise ValueError(f"attention_dropout: expected 0, got {config.attention_dropout!r}")
    check_gate(config.gate)
    types = config.layer_types
    if len(types) != config.num_hidden_layers or not set(types) <= set(LAYER_TYPES):
        raise ValueError(
            f"layer_types must name one of {LAYER_TYPES} for each of {config.num_hidden_layers} "
            f"layers, got {types}"
        )
    if "sliding_attention" in types:
        check_integer("sliding_window", config.sliding_window or 0, 1)
    if "rope_theta" not in config.rope_parameters or "rope_type" not in config.rope_parameters:
        raise ValueError(
            f"rope_parameters: expected rope_type and rope_theta, got {config.rope_parameters}"
        )
    step = config.early_exit_step
    if step is not None:
        check_integer("early_exit_step", step, 0)
        if step >= config.total_ut_steps:
            raise ValueError(
                f"early_exit_step: expected less than total_ut_steps={config.total_ut_steps}, "
                f"got {step}"
            )
    if config.early_exit_threshold is not None:
        check_number("early_exit_threshold", config.early_exit_threshold, 0.0, 1.0, open_low=True)
    if config.convergence_tol is not None:
        check_number("convergence_tol", config.convergence_tol, 0.0)
