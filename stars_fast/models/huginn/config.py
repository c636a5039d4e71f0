"""Configuration of Huginn models, in the public format (`model_type` "huginn_raven").

Names, defaults and formulas are those of recpre/raven_config_minimal.py in
https://github.com/seal-rg/recurrent-pretraining. Retrofitted models have the same fields with the
values of the decoder they were made from, and `rope_theta`, `rope_scaling` besides
(convert_pretrained_model/ in https://github.com/mcleish7/retrofitting-recurrence).
"""

from __future__ import annotations

from math import sqrt
from typing import Any, ClassVar

from transformers import PretrainedConfig

from stars_fast.base.checks import check_integer, check_number
from stars_fast.models.call_arguments import check_depth_settings
from stars_fast.models.ouro.config import rotary_settings

LAYOUTS = ("huginn", "llama", "olmo2")
"""The kinds of layers; see `layers`."""

STATES = ("random", "embed-init")
"""The states before the first turn: noise, or the injected input."""

_ONLY = {
    "block_class_name": "SandwichBlock",
    "norm_class_name": "RMSNorm_llama",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "injection_type": "linear",
    "state_init": "like-init",
}
"""Settings of which the public modelling code knows one value alone."""


class HuginnConfig(PretrainedConfig):
    """Sizes and settings of a Huginn model; the defaults are those of huginn-0125.

    Args:
        n_embd, n_heads, intermediate_size: width, heads, inner width of the MLP.
        num_key_value_heads: heads of keys and values; `n_heads` by default.
        head_dim: width of a head; n_embd / n_heads by default.
        n_layers: prelude, core and coda together; nothing reads it.
        n_layers_in_prelude, n_layers_in_recurrent_block, n_layers_in_coda: layers of each part.
        vocab_size, padded_vocab_size: tokens, and rows of embedding and head.
        block_size: longest sequence of the training, and rows of the rotary table in checkpoints.
        tie_embeddings: whether the head is the embedding.
        bias: whether the adapter has one.
        qk_bias: whether queries and keys have one.
        norm_eps: of every norm.
        rope_base: of the rotary frequencies, in the layout huginn.
        rope_theta, rope_scaling: the same in the other layouts, as Llama's; `rope_base` and no
            scaling by default.
        mean_recurrence: turns (also by the names `turns` and `num_steps`); the mean of those drawn
            in the public training.
        mean_backprop_depth: turns that carry a gradient there; a run's settings say it here.
        init_values: standard deviations std, out_proj, embedding, and embed_scale, the factor on
            embeddings and initial states; by default they follow from the sizes.
        initial_state_mode: random, or embed-init for the injected input.
        state_seed: of the random initial state outside training.
        layer_layout: huginn, llama or olmo2. The public format does not say it: where it is not
            given, loading tells it by the keys of the weights.
        convergence_tol: a sequence whose states change by at most this (relative, in the L2 norm,
            every token) takes no further turn; None or 0 for no such stop.

    Raises:
        ValueError, TypeError: a value out of range, named.
    """

    model_type = "huginn_raven"
    auto_map: ClassVar[dict[str, str]] = {}  # read by TRL of a class outside of transformers
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values", "cache", "turns", "real", "inputs", "last_hidden_state",
    ]  # fmt: skip
    attribute_map: ClassVar[dict[str, str]] = {
        "num_attention_heads": "n_heads",
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layers",
        "turns": "mean_recurrence",
        "num_steps": "mean_recurrence",
        "tol": "convergence_tol",
    }

    def __init__(
        self,
        n_embd: int = 5280,
        n_heads: int = 55,
        n_layers: int | None = None,
        block_size: int = 4096,
        vocab_size: int = 65536,
        padding_multiple: int = 4096,
        tie_embeddings: bool = True,
        intermediate_size: int = 17920,
        bias: bool = False,
        architecture_class_name: str = "RecurrentGPT",
        block_class_name: str = "SandwichBlock",
        norm_class_name: str = "RMSNorm_llama",
        norm_eps: float = 1e-6,
        mlp_class_name: str = "GatedMLP",
        nonlin_name: str = "SiLU",
        init_strategy: str = "takase",
        init_orthogonal: bool = False,
        state_init: str = "like-init",
        injection_type: str = "linear",
        initial_state_mode: str = "random",
        n_layers_in_recurrent_block: int = 4,
        mean_recurrence: int = 32,
        sampling_scheme: str = "poisson-lognormal-filling",
        mean_backprop_depth: int = 8,
        n_layers_in_prelude: int = 2,
        n_layers_in_coda: int = 2,
        qk_bias: bool = True,
        activation_checkpoint_impl: str = "per-iteration",
        rope_base: float = 50_000,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        padded_vocab_size: int | None = None,
        effective_expected_depth: int | None = None,
        init_values: dict[str, float] | None = None,
        test_time_noise: float = 0,
        test_time_noise_type: str = "fixed",
        rope_theta: float | None = None,
        rope_scaling: dict[str, Any] | None = None,
        rope_parameters: dict[str, Any] | None = None,
        max_position_embeddings: int | None = None,
        layer_layout: str | None = None,
        state_seed: int = 0,
        convergence_tol: float | None = None,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.n_embd, self.n_heads = n_embd, n_heads
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.padded_vocab_size = padded_vocab_size or vocab_size
        self.padding_multiple = padding_multiple
        self.tie_embeddings = tie_embeddings
        self.intermediate_size = intermediate_size
        self.bias = bias
        self.architecture_class_name = architecture_class_name
        self.block_class_name = block_class_name
        self.norm_class_name = norm_class_name
        self.norm_eps = norm_eps
        self.mlp_class_name = mlp_class_name
        self.nonlin_name = nonlin_name
        self.init_strategy = init_strategy
        self.init_orthogonal = init_orthogonal
        self.state_init = state_init
        self.injection_type = injection_type
        self.initial_state_mode = initial_state_mode
        self.n_layers_in_recurrent_block = n_layers_in_recurrent_block
        self.mean_recurrence = mean_recurrence
        self.sampling_scheme = sampling_scheme
        self.mean_backprop_depth = mean_backprop_depth
        self.n_layers_in_prelude = n_layers_in_prelude
        self.n_layers_in_coda = n_layers_in_coda
        self.qk_bias = qk_bias
        self.activation_checkpoint_impl = activation_checkpoint_impl
        self.rope_base = rope_base
        self.test_time_noise = test_time_noise
        self.test_time_noise_type = test_time_noise_type
        self.layer_layout = layer_layout
        self.state_seed = state_seed
        self.convergence_tol = convergence_tol
        self.use_cache = use_cache
        check_depth_settings(kwargs, self.attribute_map)
        for alias in self.attribute_map:
            if alias in kwargs:
                setattr(self, alias, kwargs.pop(alias))
        ends = self.n_layers_in_prelude + self.n_layers_in_coda
        self.n_layers = n_layers or ends + self.n_layers_in_recurrent_block
        for name in ("n_embd", "n_heads", "mean_recurrence"):
            check_integer(name, getattr(self, name), 1)
        self.num_key_value_heads = num_key_value_heads or self.n_heads
        self.head_dim = head_dim or self.n_embd // self.n_heads
        self.max_position_embeddings = max_position_embeddings or block_size
        self.effective_expected_depth = effective_expected_depth or (
            ends + self.n_layers_in_recurrent_block * self.mean_recurrence
        )
        self.init_values = init_values or _init_values(self.n_embd, self.effective_expected_depth)
        self.rope_parameters = rotary_settings(
            rope_parameters, rope_scaling, rope_base if rope_theta is None else rope_theta
        )
        check_config(self)
        kwargs.pop("auto_map", None)  # code beside a checkpoint, which is never run
        kwargs["tie_word_embeddings"] = self.tie_embeddings
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # read of any configuration
            kwargs.setdefault(name, None)
        super().__init__(**kwargs)

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies of retrofitted models."""
        return self.rope_parameters["rope_theta"]

    @property
    def rope_scaling(self) -> dict[str, Any] | None:
        """Scaling of these frequencies, without their base; None unless scaled."""
        if self.rope_parameters["rope_type"] == "default":
            return None
        return {name: value for name, value in self.rope_parameters.items() if name != "rope_theta"}

    @rope_scaling.setter
    def rope_scaling(self, scaling: dict[str, Any] | None) -> None:
        self.rope_parameters = rotary_settings(None, scaling, self.rope_theta)

    def set_depth(self, turns: int | None, tol: float | None) -> None:
        """Set how deep the model thinks; None leaves what is.

        Raises:
            TypeError, ValueError: a value out of range.
        """
        if turns is not None:
            self.mean_recurrence = turns
        if tol is not None:
            self.convergence_tol = float(tol) or None
        check_config(self)

    def to_dict(self) -> dict[str, Any]:
        """The public fields: the tie by its public name alone, since public readers take the other
        from it, and rotary settings where the layout reads them."""
        values = super().to_dict()
        for name in ("tie_word_embeddings", "rope_parameters"):
            values.pop(name, None)
        if self.layer_layout in ("llama", "olmo2"):
            values["rope_theta"] = self.rope_theta
            if self.rope_scaling:
                values["rope_scaling"] = self.rope_scaling
        return values


def _init_values(width: int, depth: int) -> dict[str, float]:
    """Scales of initial weights: std = sqrt(2 / 5D), over sqrt(2 depth) for what ends a branch;
    embeddings and initial states are multiplied by sqrt(D)."""
    std = sqrt(2 / (5 * width))
    return {
        "std": std,
        "out_proj": std / sqrt(2 * depth),
        "embedding": std,
        "embed_scale": sqrt(width),
    }


def check_config(config: HuginnConfig) -> None:
    """Raise ValueError or TypeError that names a setting out of range."""
    sizes = (
        "n_embd n_heads num_key_value_heads head_dim intermediate_size vocab_size "
        "padded_vocab_size block_size n_layers_in_recurrent_block mean_recurrence "
        "mean_backprop_depth"
    )
    for name in sizes.split():
        check_integer(name, getattr(config, name), 1)
    for name in ("n_layers_in_prelude", "n_layers_in_coda", "state_seed"):
        check_integer(name, getattr(config, name), 0)
    if config.n_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_key_value_heads: expected a divisor of n_heads={config.n_heads}, got "
            f"{config.num_key_value_heads}"
        )
    if config.head_dim % 2:
        raise ValueError(
            f"head_dim: expected an even number for rotary positions, got {config.head_dim}"
        )
    if config.padded_vocab_size < config.vocab_size:
        raise ValueError(
            f"padded_vocab_size: expected at least vocab_size={config.vocab_size}, got "
            f"{config.padded_vocab_size}"
        )
    for name, value in _ONLY.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name}: expected {value!r}, got {getattr(config, name)!r}")
    if config.test_time_noise:
        raise ValueError(
            "test_time_noise: expected 0 (a turn would be no map of the state), got "
            f"{config.test_time_noise!r}"
        )
    if config.layer_layout not in (None, *LAYOUTS):
        raise ValueError(f"layer_layout: expected one of {LAYOUTS}, got {config.layer_layout!r}")
    if config.initial_state_mode not in STATES:
        raise ValueError(
            f"initial_state_mode: expected one of {STATES}, got {config.initial_state_mode!r}"
        )
    if config.qk_bias and config.num_key_value_heads != config.n_heads:
        raise ValueError(
            f"qk_bias: expected False with num_key_value_heads={config.num_key_value_heads} and "
            f"n_heads={config.n_heads}, which it has no shape for, got True"
        )
    check_number("norm_eps", config.norm_eps, 0.0)
    for name in ("std", "out_proj", "embedding", "embed_scale"):
        if name not in config.init_values:
            raise ValueError(
                f"init_values: expected {name} among them, got {sorted(config.init_values)}"
            )
        check_number(f"init_values.{name}", config.init_values[name], 0.0)
    if config.convergence_tol is not None:
        check_number("convergence_tol", config.convergence_tol, 0.0)
