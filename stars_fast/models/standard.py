"""Standard language models: those of transformers that run their layers once, beside which looped
ones are judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from stars_fast.base.errors import ConfigError
from stars_fast.base.optional import need
from stars_fast.models.adapter_folder import adapter_base, load_adapter
from stars_fast.models.cast import cast
from stars_fast.models.families import checkpoint_config, families
from stars_fast.models.folders import check_exists, check_folder, has_tokenizer
from stars_fast.models.loop_keys import refuse_unread_loop
from stars_fast.models.reading import read_tokenizer, reading
from stars_fast.models.saved import identity_of, label_of

_HEADS = ("forcausallm", "lmheadmodel", "withlmhead", "forconditionalgeneration")
"""How names of architectures end that have a language model's head."""


@dataclass(frozen=True)
class StandardModel:
    """A causal language model of transformers, or a PEFT adapter for one.

    path: as it was given. label: in tables. identity: as `ModelSource.identity`.
    base: folder or hub id of the model that an adapter's folder is for; none for what is no such.
    """

    path: str
    label: str
    identity: dict[str, Any]
    base: str | None = None

    @property
    def checkpoint(self) -> str:
        """Where `config.json` is."""
        return self.base or self.path

    def load(self, dtype: torch.dtype | None = None, device: str = "cpu") -> Any:
        """The model in evaluation mode, in `dtype` (its own by default). Code of the checkpoint is
        never run.

        Raises:
            ConfigError: it can't be loaded, or lacks weights.
        """
        from transformers import AutoModelForCausalLM

        given: Any = "auto" if dtype is None else dtype
        with reading(self.checkpoint):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self.checkpoint, dtype=given, trust_remote_code=False, output_loading_info=True
            )
        model, info = loaded
        if missing := sorted(info["missing_keys"]):  # which transformers fills with random numbers
            raise ConfigError(
                f"{self.checkpoint}: lacks {len(missing)} weights of {type(model).__name__}: "
                f"{', '.join(missing[:4])}"
            )
        if self.base is not None:
            with reading(self.path):
                load_adapter(self.path, model)
        return cast(model, dtype or model.dtype, device).eval()

    def tokenizer(self) -> Any:
        """Its tokenizer: beside an adapter if there is one, else beside the weights.

        Raises:
            ConfigError: it has none.
        """
        own = self.base is not None and has_tokenizer(self.path)
        place = self.path if own else self.checkpoint
        try:
            return read_tokenizer(place)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def find_standard(path: str) -> StandardModel | None:
    """The standard model of a folder or hub id; None for a looped model.

    Raises:
        ConfigError: there is no causal language model, its folder is not whole, or its
            configuration tells of a loop.
    """
    try:
        base = adapter_base(path)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    checkpoint = base or path
    try:
        check_exists(checkpoint)
    except ValueError as error:
        of = "" if base is None else f"{path}: the base model of the adapter: "
        raise ConfigError(f"{of}{error}") from error
    config = checkpoint_config(checkpoint)
    kind = str(config.get("model_type"))
    need("transformers", "language models")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if any(family.recognises(config) for family in families().values()):
        return None
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        looped = ", ".join(family.model_type for family in families().values())
        raise ConfigError(
            f"{path}: expected a looped model (model_type {looped}) or another causal language "
            f"model of transformers, got model_type {kind!r} in its config.json"
        )
    _check_causal(path, config)
    try:
        check_folder(checkpoint, (kind,))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _check_runs_once(checkpoint, config)
    identity = identity_of(path)
    if base is not None:
        identity["base"] = identity_of(base)
    return StandardModel(path, label_of(path), identity, base)


def _check_causal(path: str, config: dict[str, Any]) -> None:
    """Refuse what transformers would load as a causal language model without its being one: it
    takes the weights that fit, and reads a masked model as if it saw the past alone."""
    made_as = config.get("architectures") or []
    fits = [name for name in made_as if name.lower().endswith(_HEADS)]
    if config.get("is_encoder_decoder") or (made_as and not fits):
        what = "an encoder and a decoder" if config.get("is_encoder_decoder") else made_as
        raise ConfigError(
            f"{path}: expected a causal language model, with its head, got {what} by its "
            "config.json"
        )


def _check_runs_once(path: str, config: dict[str, Any]) -> None:
    from transformers import CONFIG_MAPPING

    try:
        refuse_unread_loop(config, CONFIG_MAPPING[config["model_type"]])
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
