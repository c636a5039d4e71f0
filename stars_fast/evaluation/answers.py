"""Whether a response gives the right number, or the right mathematical object.

What counts of a response is what it puts in a box (`\\boxed{...}`), the last one; without a box, or
with no number in it, the response's last number. Numbers are compared by value, exactly: 18, 18.0,
$18, 18 cm^2 and 18. are one, and so are 1800 and 1,800, or 5/2 and 2 1/2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from stars_fast.base.optional import need

# A minus after a letter, a digit or a bracket is a difference, not a sign.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w).])-)?"
    r"(?P<value>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:/(?P<below>[1-9]\d*))?"
)
_THIN_SPACE = re.compile(r"(?<=\d)\\,(?=\d{3}(?!\d))")  # between thousands
# Of a unit or a name, as in cm^2, \text{ cm}^{2} and x_1: no number of the answer.
_SCRIPT = re.compile(
    r"((?<=[A-Za-z])|\\(?:text|textrm|mathrm|mbox)\s*\{[^{}\d]*\})\s*[\^_]\s*(?:\{[^{}]*\}|-?\d+)"
)
_BEFORE_FRACTION = re.compile(r"(?<=\d)(?: |\\[ ,;:])*(?=\\[dt]?frac)")
_FRACTION = re.compile(
    r"\\[dt]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))"  # \frac12 too
)
_MIXED = re.compile(r"(?<![\d.,/])(\d{1,99}) +(\d{1,99})/([1-9]\d{0,99})(?!\d)")
_IN_BRACKETS = re.compile(r"\([^)]*\)")
_WORDS_IN_BRACKETS = re.compile(r"\([^)]*[^\W\d_][^)]*\)")
_BOX = re.compile(r"\\boxed\s*\{")


def score_number(doc: Mapping[str, Any], responses: Sequence[str]) -> dict[str, int]:
    """lm-eval's `process_results` of ASDiv, SVAMP and GSM8K, whose answers are in `answer` or
    `Answer`, GSM8K's behind a solution and ####."""
    target = doc["answer"] if "answer" in doc else doc["Answer"]
    return {"exact_match": int(same_answer(responses[0], str(target).rpartition("####")[2]))}


def score_math(doc: Mapping[str, Any], responses: Sequence[str]) -> dict[str, int]:
    """lm-eval's `process_results` of AMC23: math-verify compares with `answer`."""
    checker = need("math_verify", "mathematical answers")
    gold = checker.parse(f"\\boxed{{{doc['answer']}}}")
    return {"math_verify": int(checker.verify(gold, checker.parse(responses[0])))}


def same_answer(response: str, target: str) -> bool:
    """Whether `response` ends in the answer `target`.

    A target may name units in brackets, "9 (apples)", and so may a box. Of a target with several
    numbers, "3:2", all are wanted, in their order; one without a number, "Jan (is taller)", has to
    stand in the box, or else in the last line.
    """
    target = _IN_BRACKETS.sub(" ", target)
    box = boxed(response)
    wanted = numbers_in(target)
    if wanted:
        inside = box or ""
        outside_brackets = _WORDS_IN_BRACKETS.sub(" ", inside)
        found = numbers_in(outside_brackets) or numbers_in(inside) or numbers_in(response)
        return found[-len(wanted) :] == wanted
    lines = response.strip().splitlines() or [""]
    said = lines[-1] if box is None else box
    return _words(target) != [] and _contains(_words(said), _words(target))


def boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} of a text; None without one that is closed."""
    boxes = [match.end() for match in _BOX.finditer(text)]
    if not boxes:
        return None
    depth, start = 1, boxes[-1]
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start:i]
    return None


def numbers_in(text: str) -> list[Fraction]:
    """The numbers in a text, in their order: integers, decimals, fractions, mixed numbers,
    thousands between commas, in LaTeX or not; without the powers and indices of letters and
    units."""
    text = text.replace("−", "-").replace("{,}", ",").replace("\\!", "")
    text = text.replace("\\$", "").replace("$", "")
    text = _SCRIPT.sub(r"\1", _THIN_SPACE.sub(",", text))
    text = _FRACTION.sub(r"\1\2/\3\4", _BEFORE_FRACTION.sub(" ", text))
    text = _MIXED.sub(_improper, text)
    found = []
    for match in _NUMBER.finditer(text):
        value = _exactly(match["value"].replace(",", "")) / _exactly(match["below"] or "1")
        found.append(-value if match["sign"] else value)
    return found


def _exactly(digits: str) -> Fraction:
    """A number however long, as a model that repeats itself writes it: Python refuses to make an
    integer of more than 4,300 digits."""
    return Fraction(Decimal(digits))


def _improper(mixed: re.Match[str]) -> str:
    """2 1/2 as 5/2. What is not less than one behind a whole number is a number of its own."""
    whole, above, below = map(int, mixed.groups())
    return f"{whole * below + above}/{below}" if above < below else mixed[0]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _contains(words: list[str], wanted: list[str]) -> bool:
    return any(words[i : i + len(wanted)] == wanted for i in range(len(words)))
