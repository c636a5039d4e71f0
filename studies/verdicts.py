"""Verdict on a finding: its parts, and whether the numbers agree with them."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from stars_fast.base.files import finite

_BOUNDS: dict[str, Callable[[float, float], bool]] = {
    "at least": operator.ge,
    "at most": operator.le,
    "below": operator.lt,
}


class NotJudged(Exception):
    """A finding cannot be judged by these runs; the message says why."""


class Part(NamedTuple):
    """A quantity in words, its value, and what it should be: at least, at most or below `bound`."""

    what: str
    value: float
    how: str
    bound: float

    @property
    def agrees(self) -> bool:
        """Whether the value is within the bound."""
        return _BOUNDS[self.how](self.value, self.bound)

    def __str__(self) -> str:
        verdict = "agrees" if self.agrees else "does not agree"
        return f"{self.what}: {self.value:.4g}, {self.how} {self.bound:g} expected: {verdict}"


@dataclass(frozen=True)
class Verdict:
    """A finding held against numbers: it agrees if all its parts do; None if it is not judged."""

    name: str
    claim: str
    parts: list[Part]
    why_not: str = ""

    @property
    def agrees(self) -> bool | None:
        """Whether the numbers agree with the claim."""
        return None if self.why_not else all(part.agrees for part in self.parts)

    @property
    def words(self) -> str:
        """The verdict in a word or two."""
        return {None: "not judged", True: "agrees", False: "does not agree"}[self.agrees]

    def to_dict(self) -> dict[str, Any]:
        """As study.json has it; a value that is not finite is None."""
        parts = [
            {
                "what": part.what,
                "value": finite(part.value),
                "expected": f"{part.how} {part.bound:g}",
                "agrees": part.agrees,
            }
            for part in self.parts
        ]
        found = {"name": self.name, "claim": self.claim, "agrees": self.agrees, "parts": parts}
        return found | ({"why_not": self.why_not} if self.why_not else {})
