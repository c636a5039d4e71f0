"""Loops that the configuration of another's model tells of, and whether a norm closes each turn.

    Ouro        total_ut_steps turns of all layers, each closed by the norm
    Nanbeige    num_loops turns of all layers (of Llama's shape), each closed by the norm unless
                skip_loop_final_norm leaves it to the head. Nanbeige4.2-3B: 22 layers, 2 loops, norm

Nanbeige's keys as its configuration class documents them (configuration_nanbeige.py of
https://huggingface.co/Nanbeige/Nanbeige4.2-3B, revision b82e54b), and as
https://github.com/ggml-org/llama.cpp/pull/25994 and https://github.com/ml-explore/mlx-lm/pull/1599
read them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

_LOOP_WORDS = frozenset(
    "loop loops looped looping recur recurs recurrence recurrences recurrent recurse recursion "
    "recursions recursive ut universal ponder pondering cycles unroll unrolls unrolled".split()
)
# Of the words of a key these say by themselves that something runs more than once; those below do
# so only where the key is a count of them, of layers or not, and nothing else: `num_repeats`,
# `n_iterations`, `layer_repeats`, but not `no_repeat_ngram_size`, `sinkhorn_iterations` or
# `time_step_max`.
_COUNTED_WORDS = frozenset(
    "repeat repeats repeated repetition repetitions iter iters iteration iterations turns passes "
    "reuse reuses steps".split()
)
_COUNTS = frozenset("num n number of total mean count layer layers core".split())
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Settings of Nanbeige by which its layers are more than a map of one state.
_NO_PLAIN_TURN = (
    "enable_hyper_connection",
    "enable_depth_attention",
    "insert_ngram_layer_idx",
    "ngram_insert_all_layers",
)


def norm_closes_turn(config: Any) -> bool:
    """Whether the closing norm of a decoder stack is part of each of its turns, rather than of the
    head, to which it belongs where the stack runs once.

    Args:
        config: of the stack: what config.json says, as attributes; None where there is none.

    Raises:
        ValueError: it tells of a loop that is not known here; the keys are named.
    """
    kind = getattr(config, "model_type", None)
    if kind == "ouro" or config is None:
        return kind == "ouro"
    told = {name: value for name, value in vars(config).items() if _tells(name, value)}
    both = hasattr(config, "num_loops") and hasattr(config, "skip_loop_final_norm")
    looped = False
    if kind == "nanbeige" or both:
        looped = bool(told.pop("num_loops", None)) | bool(told.pop("loop_loss_weights", None))
        looped &= not told.pop("skip_loop_final_norm", False)
        odd = {name: getattr(config, name, None) for name in _NO_PLAIN_TURN}
        told |= {name: value for name, value in odd.items() if value}
    if told:
        raise ValueError(
            "model: expected a configuration whose loop is known (Ouro's, or Nanbeige's num_loops "
            f"and skip_loop_final_norm), got {_listed(told)}; say what one turn is by "
            "layers=slice(...) and norm=True or False"
        )
    return looped


def refuse_unread_loop(config: Mapping[str, Any], kind: type) -> None:
    """Refuse a configuration that tells of a loop which a model of its class does not run: by keys
    that the class does not have. (A class that has them loops by itself.)

    Args:
        config: what config.json says.
        kind: the class of the configuration.

    Raises:
        ValueError: the keys are named.
    """
    made = [each for each in kind.__mro__[:-1] if "__init__" in vars(each)]
    read = {name for each in made for name in inspect.signature(each).parameters}
    told = {n: value for n, value in config.items() if n not in read and _tells(n, value)}
    if told:
        raise ValueError(
            "model: expected a configuration whose loop is known and run by its class, got "
            f"{_listed(told)}, which {kind.__name__} does not read"
        )


def _listed(told: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in told.items())


def _tells(name: str, value: Any) -> bool:
    """Whether a key of a configuration says that something runs more than once."""
    if name.startswith("_"):
        return False
    words = [word.lower() for word in _WORD.findall(name)]
    nouns = [word for word in words if word not in _COUNTS]
    counts = len(nouns) == 1 and len(words) > 1 and nouns[0] in _COUNTED_WORDS
    if not counts and _LOOP_WORDS.isdisjoint(words):
        return False
    once = isinstance(value, (list, tuple)) and all(each == 1 for each in value)
    return bool(value) and not once and (value is True or value != 1)
