"""The training methods by name: what the number of turns follows, and which penalty there is."""

from typing import NamedTuple


class Method(NamedTuple):
    """fixed_depth: True or False if the method says which, None if the recipe chooses.

    penalty: "jacobian", "l2" or None. summary: one line for messages and help.
    """

    fixed_depth: bool | None
    penalty: str | None
    summary: str


METHODS = {
    "sft": Method(True, None, "token loss at a fixed number of turns"),
    "random-loop": Method(False, None, "token loss, the number of turns drawn from a law"),
    "jsrr": Method(True, "jacobian", "fixed turns and the Jacobian penalty at the last state"),
    "stars": Method(False, "jacobian", "random turns and the Jacobian penalty: the paper's method"),
    "l2": Method(None, "l2", "the mean squared step between adjacent states as penalty"),
}
