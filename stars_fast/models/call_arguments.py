"""Arguments that any looped model of transformers takes, whoever calls it: a user, a trainer,
`generate`, or its head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from stars_fast.tokens import check_counted, check_same_bounds

BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""transformers' names for the bounds of packed documents and the length of the longest."""

# What transformers passes along to any model, and has no meaning or no effect here.
_PASSED_ALONG = frozenset(
    ("cache_position", "is_first_iteration", "output_attentions", "return_dict", "token_type_ids")
)


def take_documents(
    given: dict[str, Any], position_ids: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Take what transformers' collators say of packed documents out of a call's other arguments.

    Args:
        given: they leave it: `cu_seq_lens_q` [n + 1], the bounds; `cu_seq_lens_k`, the same;
            `max_length_q` and `max_length_k`, which follow from them; `seq_idx` [1, S], the number
            of each token's document, which says nothing beside bounds or positions.
        position_ids: [B or 1, S] or None.
        cu_seqlens: [n + 1] or None, the bounds by the name that they have here.

    Returns:
        Positions, None where bounds say more; and bounds, None where there are none.

    Raises:
        TypeError, ValueError: the same is said twice, in part or differently.
    """
    numbers = given.pop("seq_idx", None)
    queries, keys, *longest = (given.pop(name, None) for name in BOUNDS)
    if queries is None:
        for name, value in zip(BOUNDS[1:], (keys, *longest), strict=True):
            if value is not None:
                raise ValueError(f"{name}: expected cu_seq_lens_q beside it, got None")
        if numbers is not None and position_ids is None and cu_seqlens is None:
            raise ValueError(
                "seq_idx: expected cu_seq_lens_q or position_ids beside it, which say where "
                "documents begin, got neither"
            )
        return position_ids, cu_seqlens
    if cu_seqlens is not None:
        raise ValueError("cu_seq_lens_q: expected None when cu_seqlens is given, got both")
    if keys is not None:
        check_same_bounds(queries, keys)
    if position_ids is not None:
        check_counted(position_ids, queries)
    return None, queries


def check_arguments(kwargs: dict[str, Any], config: Any, what: str) -> None:
    """Raise TypeError, ValueError for arguments of a call that have no meaning here.

    Args:
        kwargs: those that the call does not name.
        config: of the model, whose settings stand for arguments that are not given.
        what: the model, in words.
    """
    if unknown := sorted(set(kwargs) - _PASSED_ALONG):
        raise TypeError(f"{what}: unknown arguments {unknown}")
    wanted = kwargs.get("output_attentions")
    if getattr(config, "output_attentions", False) if wanted is None else wanted:
        raise ValueError("output_attentions: expected False; the kernels keep no weights")


_DEPTH = ("turns", "num_steps", "exit_at_step", "exit_threshold", "tol", "tol_per")
"""Names by which calls of one looped model or another say how deep it thinks."""


def check_depth_settings(given: dict[str, Any], known: Iterable[str]) -> None:
    """Raise ValueError where a configuration names a depth that it has no setting for.

    Args:
        given: by name, besides the configuration's own settings.
        known: other names of these.
    """
    if unread := [name for name in _DEPTH if name in given and name not in known]:
        raise ValueError(
            f"{unread[0]}: expected none in the configuration of this model, which reads "
            f"{', '.join(name for name in _DEPTH if name in known)}, got {given[unread[0]]!r}"
        )


def wants_dict(config: Any, return_dict: bool | None) -> bool:
    """Whether a call gives its output by name, rather than as a tuple."""
    return getattr(config, "return_dict", True) if return_dict is None else return_dict


def kept_states(h: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """The states [B, S', D] of h [B, S, D] whose logits are asked for."""
    if isinstance(logits_to_keep, Tensor):
        return h[:, logits_to_keep]
    return h[:, -logits_to_keep:] if logits_to_keep else h
