"""Changes of the loop in training: what the turns start from, and what the loss is taken after.

    noise         h <- h + sigma rms(h) n before every turn, n standard normal
    progressive   (1 - a) L(h^(t)) + a L(h^(t + n + k)), n drawn turns without a gradient, then k

State noise is after EqR (arXiv 2605.21488). For a small sigma and a random n the step that it makes
in what follows is a finite difference: E ||Phi(h + sigma n) - Phi(h)||^2 / sigma^2 -> ||J||_F^2.
The progressive loss is after Bansal et al. 2022 (arXiv 2202.05826), whose turns without a gradient
begin at the first state; here they go on from the last one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from stars_fast.base.checks import check_integer, check_number, check_types
from stars_fast.base.seeds import derive


@dataclass
class LoopChange:
    """Changes of the loop in training; none by default.

    noise: sigma of the normal noise on each token's state before every turn, over the root mean
        square of that state; 0 for none.
    progressive: weight in [0, 1] of the token loss after further turns, the first of them without a
        gradient; the loss at the state of the step has the rest. 0 for none.
    free_turns: of progressive, the most turns without a gradient; each number from 1 is as likely.
    graph_turns: of progressive, turns with a gradient that follow them.
    """

    noise: float = 0.0
    progressive: float = 0.0
    free_turns: int = 8
    graph_turns: int = 1

    def __post_init__(self) -> None:
        check_types(self)
        check_number("noise", self.noise, 0.0)
        check_number("progressive", self.progressive, 0.0, 1.0)
        check_integer("free_turns", self.free_turns, 1)
        check_integer("graph_turns", self.graph_turns, 1)

    def drawn_turns(self, seed: int, step: int, micro: int) -> int:
        """The turns without a gradient of micro-batch `micro` of `step`; a pure function."""
        return random.Random(derive(seed, "progressive", step, micro)).randint(1, self.free_turns)

    @property
    def more_turns(self) -> int:
        """Turns in the graph beyond those of the step."""
        return self.graph_turns if self.progressive > 0 else 0

    @property
    def free_mean(self) -> float:
        """Turns without a gradient beyond those of the step, on average."""
        return (1 + self.free_turns) / 2 if self.progressive > 0 else 0.0

    def cost(self, outside: float) -> float:
        """The expected cost for one micro-batch in turns, `outside` being what lies outside the
        block."""
        if self.progressive == 0:
            return 0.0
        return self.free_mean / 3 + self.more_turns + outside
