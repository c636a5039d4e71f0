"""`generate` of looped models: how deep it thinks, its cache, and what drafts for it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, ClassVar, NoReturn, cast

from transformers import GenerationConfig, GenerationMixin, PretrainedConfig

from stars_fast.models.ouro.cache import CACHE, OuroCache

# What of the depth is said anew where one of them is said: a lower level's word on it is void.
_INSTEAD_OF = {
    "turns": ("num_steps", "exit_at_step"),
    "num_steps": ("turns",),
    "exit_at_step": ("exit_threshold",),
    "exit_threshold": ("exit_at_step",),
}
_OF_GENERATE = ("tokenizer", "assistant_tokenizer")  # which some of its ways hand on to the model
_WHERE = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


class LoopedGenerationMixin(GenerationMixin):
    """`generate` of a looped model; write it before the model's other bases. (transformers tells by
    the end of its name that the model generates.)

    A `GenerationConfig` may say how deep the model thinks, by the names that a call has for it
    (`depth_settings`). The call comes first, then the `generation_config` given with it, then the
    model's own, then the model's configuration, setting by setting; naming `turns` or an exit also
    voids what a later one in this order says of the exit. What a `GenerationConfig` holds that
    neither transformers nor the model reads is an error.

    With `assistant_early_exit=k` the model drafts for itself, at k turns. An assistant otherwise
    thinks as deep as its own settings say.
    """

    depth_settings: ClassVar[tuple[str, ...]] = ("turns", "tol", "tol_per")

    def empty_cache(self) -> OuroCache:
        """A cache for this model, of any number of turns."""
        raise NotImplementedError

    def adjust_generation_fn(  # type: ignore[override]
        self, generation_config: Any, auto: Any, pipeline: Any, path: Any, **kwargs: Any
    ) -> None:
        """Take the generation configuration that is given to `from_pretrained`, or the one beside
        the weights. transformers puts every argument of the load into it, but those that it has
        itself or that say where files lie are the model's; and a depth given there, or by the
        `config`, comes before that of the file.

        Args:
            generation_config: as it was given; None for that of the file.
            auto, pipeline: whether an auto class or a pipeline loads.
            path: of the checkpoint.
            kwargs: arguments of the load.
        """
        own = _known() | inspect.signature(GenerationMixin.adjust_generation_fn).parameters.keys()
        given = {name: value for name, value in kwargs.items() if name in own}
        cast(Any, super()).adjust_generation_fn(generation_config, auto, pipeline, path, **given)
        said = _said(self.generation_config, self.depth_settings)
        if said and generation_config is None:
            model: Any = self
            where = {name: kwargs[name] for name in _WHERE if name in kwargs}
            values = PretrainedConfig.get_config_dict(path, **where)[0]
            stored = type(model.config).from_dict(values)
            anew = [n for n in said if n in kwargs or _differ(model.config, stored, n)]
            drop_depth(self.generation_config, anew)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own; of a generation configuration that is said to be made from the
        model's, transformers would read no depth, be it saved or written into the file later."""
        self.generation_config._from_model_config = False
        return cast(Any, super()).save_pretrained(*args, **kwargs)

    def prepare_inputs_for_generation(
        self, input_ids: Any, *, inputs_embeds: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As transformers', without what is the business of `generate` alone. (It looks for
        `inputs_embeds` by name.)"""
        for name in _OF_GENERATE:
            kwargs.pop(name, None)
        return cast(Any, super()).prepare_inputs_for_generation(
            input_ids, inputs_embeds=inputs_embeds, **kwargs
        )

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError: the pages of transformers' continuous batching (of
        `generate_batch`, and of `cache_implementation="paged"`) hold one slot for each layer."""
        raise NotImplementedError(
            f"generate_batch: expected generate with {type(self).__name__}, which needs a slot for "
            "each layer of each turn, got continuous batching, which has one for each layer"
        )

    def _prepare_generation_config(
        self, generation_config: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Settle the depth, and hand it to the model as arguments of its calls."""
        names = self.depth_settings
        configs = [each for each in (generation_config, self.generation_config) if each is not None]
        for each in configs:
            check_known(each, names)
        said = {name: kwargs.pop(name) for name in names if name in kwargs}
        depth = settled_depth([said, *(_said(each, names) for each in configs)], names)
        prepared, others = cast(Any, super())._prepare_generation_config(
            generation_config, *args, **kwargs
        )
        drop_depth(prepared, names)
        vars(prepared).update(depth)  # some ways to generate come here twice
        return prepared, others | depth

    def _get_candidate_generator(  # type: ignore[override]
        self, generation_config: Any, *args: Any, model_kwargs: Any, **kwargs: Any
    ) -> Any:
        """Let an assistant think as deep as it says itself, or this model at fewer turns draft."""
        generation_config = copy.deepcopy(generation_config)
        drop_depth(generation_config, self.depth_settings)
        draft = {n: value for n, value in model_kwargs.items() if n not in self.depth_settings}
        turns, generation_config.assistant_early_exit = generation_config.assistant_early_exit, None
        if turns is not None:
            kwargs["assistant_model"] = self
            draft["turns"] = turns
        return cast(Any, super())._get_candidate_generator(
            generation_config, *args, model_kwargs=draft, **kwargs
        )

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Give `generate` a cache with a slot for each turn.

        Raises:
            ValueError: the generation is to have a cache of another kind.
        """
        for name in ("cache", "past_key_values"):  # by either name
            if model_kwargs.get(name) is not None:
                model_kwargs[CACHE] = model_kwargs.pop(name)
        if model_kwargs.get(CACHE) is None and generation_config.use_cache is not False:
            kind = generation_config.cache_implementation
            if kind not in (None, "dynamic", "dynamic_full"):
                raise ValueError(
                    "cache_implementation: expected None or 'dynamic' for a looped model, "
                    f"got {kind!r}"
                )
            model_kwargs[CACHE] = self.empty_cache()
            return None
        return cast(Any, super())._prepare_cache_for_generation(
            generation_config, model_kwargs, *args, **kwargs
        )


def settled_depth(levels: Iterable[Mapping[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """The settings of the depth from several levels, those that come first before the others.

    Args:
        levels: settings by name each; None is nothing said.
        names: of the settings.
    """
    found: dict[str, Any] = {}
    void: set[str] = set()
    for level in levels:
        fresh = {
            name: level[name]
            for name in names
            if level.get(name) is not None and name not in found and name not in void
        }
        found |= fresh
        void.update(rival for name in fresh for rival in _INSTEAD_OF.get(name, ()))
    return found


def drop_depth(generation_config: Any, names: Iterable[str]) -> None:
    """Let a generation configuration say nothing of these settings."""
    for name in names:
        vars(generation_config).pop(name, None)


def adopt_depth(model: Any, turns: int | None = None) -> None:
    """Move the depth that a model's generation configuration names into its configuration, so that
    it counts where others call or read the model, and not in `generate` alone.

    Args:
        model: one with `LoopedGenerationMixin`.
        turns: instead of those that it names.

    Raises:
        TypeError, ValueError: a value out of range, named.
    """
    config, names = model.config, type(model.config).attribute_map
    own = [name for name in model.depth_settings if name in names]
    said = settled_depth([{"turns": turns}, vars(model.generation_config)], own)
    fields = {names[name]: value for name, value in said.items()}
    rivals = {rival for name in said for rival in _INSTEAD_OF.get(name, ())}
    void = {names[name] for name in rivals & names.keys()} - fields.keys()
    settled = dict.fromkeys(void) | fields
    type(config).from_dict(config.to_dict() | settled)  # checks them
    for field, value in settled.items():
        setattr(config, field, value)
    drop_depth(model.generation_config, own)


def check_known(generation_config: Any, names: Iterable[str]) -> None:
    """Raise ValueError where a generation configuration holds settings that nobody reads.

    Args:
        names: those that the model reads.
    """
    given = {name for name in vars(generation_config) if not name.startswith("_")}
    if unknown := sorted(given - _known() - set(names)):
        raise ValueError(
            f"generation_config: expected settings of transformers or {', '.join(names)}, got "
            f"{', '.join(unknown)}"
        )


@cache
def _known() -> frozenset[str]:
    return frozenset(vars(GenerationConfig()))


def _said(generation_config: Any, names: Iterable[str]) -> dict[str, Any]:
    held = vars(generation_config)
    return {name: held[name] for name in names if held.get(name) is not None}


def _differ(config: Any, stored: Any, name: str) -> bool:
    return getattr(config, name, None) != getattr(stored, name, None)
