"""`explain`: which path each op of a block takes in the dual pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stars_fast.dual.dual_pass import dual_pass
from stars_fast.dual.layout import stack_pair
from stars_fast.dual.recognition.module_names import Names
from stars_fast.dual.registry import observe
from stars_fast.ops.library import watch

_MEANING = {
    "fused": "one op with its own dual forward and backward",
    "stacked": "the ordinary op, once, on the stacked pair",
    "product": "product rule from ordinary ops",
    "in-place": "written into the stacked pair",
    "fallback": "exact through torch's forward derivative of this op alone: slower",
}


@dataclass(frozen=True)
class Explanation:
    """The findings of `explain`.

    Attributes:
        ops: (op, path) -> number of calls, in order of first appearance.
        backends: fused op -> what computed it: torch, cpp, triton or cuda; several joined by "+".
        recognised: (op, formula) -> number of its calls that stand for a formula, found in the ops
            that the block calls, such as ("LlamaRMSNorm", "RMSNorm").
        dropped: where a number was made from a tensor with a tangent, as "item at file.py:12".
    """

    ops: dict[tuple[str, str], int]
    backends: dict[str, str] = field(default_factory=dict)
    recognised: dict[tuple[str, str], int] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)

    def count(self, path: str) -> int:
        """How many calls took a path: fused, stacked, product, in-place or fallback."""
        return sum(n for (_, kind), n in self.ops.items() if kind == path)

    @property
    def fallbacks(self) -> list[str]:
        """Names of the ops that have no rule."""
        return [name for name, kind in self.ops if kind == "fallback"]

    def __str__(self) -> str:
        width = max((len(name) for name, _ in self.ops), default=2)
        lines = [f"{'op':<{width}}  {'path':<9} calls  backend"]
        for (name, kind), n in self.ops.items():
            backend = self.backends.get(name, "") if kind == "fused" else ""
            lines.append(f"{name:<{width}}  {kind:<9} {n:>5}  {backend}".rstrip())
        lines.append("")
        lines += [
            f"{kind}: {self.count(kind)} calls, {meaning}"
            for kind, meaning in _MEANING.items()
            if self.count(kind)
        ]
        lines += [
            f"{name}: recognised as {formula}, {n} of {self.ops[name, 'fused']} calls"
            for (name, formula), n in self.recognised.items()
        ]
        lines += [f"tangent dropped: {place}" for place in self.dropped]
        return "\n".join(lines)


def explain(
    block: Callable[..., Any],
    h: Tensor,
    *,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> Explanation:
    """Run one dual pass without gradients and say, op by op, which path it took.

    Args:
        block: module or callable `h -> h'`.
        h: [B, S, D], floating point.
        args, kwargs: further arguments of `block`.

    Returns:
        An `Explanation`; `print` it for a table, `.fallbacks` lists the ops without a rule,
        `.backends` says where the fused ops run.
    """
    seen: Counter[tuple[str, str]] = Counter()
    backends: dict[str, str] = {}
    recognised: Counter[tuple[str, str]] = Counter()
    picked: list[str] = []
    formulas: list[str] = []
    dropped: list[str] = []

    def rename(old: str, new: str, n: int) -> None:
        seen[old, "fused"] -= n
        seen[new, "fused"] += 1
        backends[new] = backends[old]
        for name, formula in [each for each in recognised if each[0] == old]:
            taken = min(n, recognised[name, formula])
            recognised[name, formula] -= taken
            recognised[new, formula] += taken > 0
        if not seen[old, "fused"]:
            del seen[old, "fused"], backends[old]

    names = Names(rename)

    def note(name: str, kind: str) -> None:
        if kind == "dropped" and name not in dropped:
            dropped.append(name)
        if kind == "recognised":
            formulas.append(name)
        if kind in ("primal", "dropped", "recognised"):
            return
        if kind == "fused":
            name = names.alias or name
        seen[name, kind] += 1
        if kind == "fused":
            recognised.update((name, formula) for formula in formulas)
            formulas.clear()
            known = backends.get(name, "").split("+")
            backends[name] = "+".join(sorted({*known, *picked} - {""}))
        picked.clear()

    stop = observe(note)
    watch(picked.append)
    try:
        with torch.no_grad(), names.watching():
            dual_pass(block, stack_pair(h, torch.ones_like(h)), args, kwargs or {})
    finally:
        watch(None)
        stop()
    return Explanation(dict(seen), backends, dict(+recognised), dropped)
