"""Configuration of looped decoders: the decoder's own, and how its layers loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from transformers import AutoConfig, LlamaConfig, PretrainedConfig

from stars_fast.base.checks import check_integer, check_number
from stars_fast.models.call_arguments import check_depth_settings
from stars_fast.models.injection import INJECTIONS, adapter_keeps_state, check_injection

STATES = ("prelude", "noise", "learned")


def _of_decoder(name: str) -> Any:
    """A setting that is the decoder's, to be read and set; none where the decoder has none."""
    return property(
        lambda config: getattr(config.decoder, name),
        lambda config, value: setattr(config.decoder, name, value),
        doc="The decoder's.",
    )


class LoopedDecoderConfig(PretrainedConfig):
    """A decoder of transformers whose middle layers are repeated.

    Args:
        decoder: configuration of the decoder as it was before it was looped, or its `to_dict`.
        layers: the layers that are used, in the order in which they run, by their place in the
            decoder; all by default. Those not named are dropped.
        prelude, block, coda: how many of them come before the loop, make up its turn, and follow
            it; `block` None for those between. Together they are all of `layers`.
        injection: what a turn takes from the prelude besides the state: "none", "add" (the
            prelude's output is added to the state), "adapter" (a linear map of both).
        state: what the first turn starts from: "prelude" (its output), "noise" (normal, of standard
            deviation `state_std`), "learned" (one vector for all tokens).
        state_std: see `state`.
        norm_between: whether a turn ends with a norm of its own (RMSNorm).
        total_ut_steps: turns (also by the name `turns`).
        convergence_tol: a sequence whose states change by at most this (relative, in the L2 norm,
            every token) takes no further turn; None or 0 for no such stop (also by the name `tol`).
        adapter_start: what an adapter gives before training: "state" (a turn is what it would be
            without one), "inputs" (the prelude's output alone, so that the state is learned to be
            used); None for the state where the first one is the prelude's output, else the inputs.

    Raises:
        TypeError, ValueError: a value of the wrong type or out of range, named.
    """

    model_type = "looped_decoder"
    auto_map: ClassVar[dict[str, str]] = {}  # read by TRL of a class outside of transformers
    sub_configs: ClassVar[dict[str, Any]] = {"decoder": AutoConfig}
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values", "cache", "turns", "inputs",
    ]  # fmt: skip
    attribute_map: ClassVar[dict[str, str]] = {"turns": "total_ut_steps", "tol": "convergence_tol"}

    def __init__(
        self,
        decoder: PretrainedConfig | dict[str, Any] | None = None,
        layers: Sequence[int] | None = None,
        prelude: int = 1,
        block: int | None = None,
        coda: int = 1,
        injection: str = "none",
        state: str = "prelude",
        state_std: float = 0.02,
        norm_between: bool = False,
        total_ut_steps: int = 4,
        convergence_tol: float | None = None,
        use_cache: bool = True,
        adapter_start: str | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("auto_map", None)  # code beside a checkpoint, which is never run
        if decoder is None:  # transformers makes a configuration without arguments
            decoder = LlamaConfig()
        if isinstance(decoder, dict):
            decoder = AutoConfig.for_model(**decoder)
        self.decoder: Any = decoder
        every = range(self.decoder.num_hidden_layers)
        if isinstance(layers, str) or not isinstance(layers, (Sequence, type(None))):
            raise TypeError(f"layers: expected a list of integers or None, got {layers!r}")
        self.layers: list[int] = list(every if layers is None else layers)
        check_integer("prelude", prelude, 0)
        check_integer("coda", coda, 0)
        self.prelude = prelude
        self.block = len(self.layers) - prelude - coda if block is None else block
        self.coda = coda
        self.injection = injection
        self.state = state
        self.state_std = state_std
        self.norm_between = norm_between
        self.total_ut_steps = total_ut_steps
        self.convergence_tol = convergence_tol
        self.use_cache = use_cache
        self.adapter_start = adapter_start
        check_depth_settings(kwargs, self.attribute_map)
        for alias in self.attribute_map:
            if alias in kwargs:
                setattr(self, alias, kwargs.pop(alias))
        check_config(self)
        kwargs["tie_word_embeddings"] = getattr(decoder, "tie_word_embeddings", False)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            kwargs.setdefault(name, getattr(decoder, name, None))
        # transformers sets both for the parts of a configuration too, where they are not given to
        # None; experts are the decoder's alone.
        kwargs.setdefault("attn_implementation", getattr(decoder, "_attn_implementation", None))
        experts = getattr(decoder, "_experts_implementation", None)
        super().__init__(**kwargs)
        if experts is not None:
            self.decoder._experts_implementation = experts

    # No num_hidden_layers: weights, slots of a cache and layers that run are three numbers here.
    vocab_size = _of_decoder("vocab_size")
    hidden_size = _of_decoder("hidden_size")
    num_attention_heads = _of_decoder("num_attention_heads")
    num_key_value_heads = _of_decoder("num_key_value_heads")
    head_dim = _of_decoder("head_dim")
    max_position_embeddings = _of_decoder("max_position_embeddings")

    @property
    def adapter_keeps_state(self) -> bool:
        """Whether an adapter gives the state before training, and not the prelude's output."""
        return adapter_keeps_state(self.adapter_start, self.state)

    @property
    def parts(self) -> tuple[list[int], list[int], list[int]]:
        """The places in the decoder of the layers of prelude, block and coda."""
        ends = self.prelude, self.prelude + self.block
        return self.layers[: ends[0]], self.layers[ends[0] : ends[1]], self.layers[ends[1] :]

    def set_depth(self, turns: int | None, tol: float | None) -> None:
        """Set how deep the model thinks; None leaves what is.

        Raises:
            TypeError, ValueError: a value out of range.
        """
        if turns is not None:
            self.total_ut_steps = turns
        if tol is not None:
            self.convergence_tol = float(tol) or None
        check_config(self)

    def to_diff_dict(self) -> dict[str, Any]:
        """As transformers', with the decoder's configuration whole: defaults are its class's."""
        return super().to_diff_dict() | {"decoder": self.decoder.to_dict()}


def check_config(config: LoopedDecoderConfig) -> None:
    """Raise ValueError or TypeError that names a setting out of range."""
    _check_layers(config)
    for name, low in (("prelude", 0), ("block", 1), ("coda", 0), ("total_ut_steps", 1)):
        check_integer(name, getattr(config, name), low)
    if config.prelude + config.block + config.coda != len(config.layers):
        raise ValueError(
            f"prelude, block, coda: expected counts that make up the {len(config.layers)} layers "
            f"(`layers` says which are used), got {config.prelude} + {config.block} + {config.coda}"
        )
    for name, choices in (("injection", INJECTIONS), ("state", STATES)):
        if getattr(config, name) not in choices:
            raise ValueError(
                f"{name}: expected one of {', '.join(choices)}, got {getattr(config, name)!r}"
            )
    check_injection(config.injection, config.state, config.adapter_start)
    if not isinstance(config.norm_between, bool):
        raise TypeError(f"norm_between: expected True or False, got {config.norm_between!r}")
    check_number("state_std", config.state_std, 0.0)
    if config.convergence_tol is not None:
        check_number("convergence_tol", config.convergence_tol, 0.0)


def _check_layers(config: LoopedDecoderConfig) -> None:
    count = config.decoder.num_hidden_layers
    layers = config.layers
    integers = all(isinstance(i, int) and not isinstance(i, bool) for i in layers)
    if not integers or len(set(layers)) != len(layers) or not set(layers) <= set(range(count)):
        raise ValueError(
            f"layers: expected different layers among 0 to {count - 1}, got {list(layers)}"
        )
