"""The table of memory: what fits on which card, by tokens of a micro-batch and turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from stars_fast.models.families import family_named
from stars_fast.training.plan import memory
from stars_fast.training.plan.cards import cards
from stars_fast.training.plan.otherwise import otherwise
from stars_fast.training.plan.rows import DOCUMENT, rows_of
from stars_fast.training.scale.memory import GIB, choose
from stars_fast.training.scale.parallel import ParallelConfig
from stars_fast.training.step.methods import penalty_of
from stars_fast.training.step.penalties.base import Penalty

CARDS = ("A800-80GB", "L40S", "A100-40GB", "RTX-4090")
"""Cards of 80, 48, 40 and 24 GB."""

TOKENS = (2048, 4096, 8192)
TURNS = (4, 8, 16)

MEMORY_COLUMNS = ["tokens", "turns", "run", *CARDS]


class MemoryRow(NamedTuple):
    """One row: a run of so many turns on micro-batches of so many tokens; by card the GiB at the
    peak and what is recomputed, in a few words."""

    tokens: int
    turns: int
    run: str
    cards: dict[str, str]

    def cells(self) -> list[str]:
        return [f"{self.tokens:,}", str(self.turns), self.run, *self.cards.values()]


def memory_table(config: Any) -> list[MemoryRow]:
    """The rows for a recipe: all weights on every GPU, shared out among 4 and 8, and adapters.

    Whether and how the recipe itself is sharded, adapted or frozen in parts does not matter.
    Without those shared out where its penalty excludes `parallel.reshard`.
    """
    shape = family_named(config.model.family).shape(config.model)
    train = {"accumulation": 8, "micro_batch_size": None, "compile": False, "freeze": ()}
    plain = replace(
        config,
        parallel=ParallelConfig(),
        train=replace(config.train, **train),
        lora=replace(config.lora, rank=None),
    )
    kinds: list[tuple[str, Any, int]] = [("all weights", plain, 1)]
    if family_named(config.model.family).shards:
        shared = {"kind": "fsdp", "reshard": True, "offload": config.parallel.offload}
        sharded = otherwise(plain, {"parallel": shared})
        kinds += [(f"FSDP over {n}", sharded, n) for n in (4, 8) if sharded is not None]
    kinds.append(("LoRA 16", otherwise(plain, {"lora": {"rank": 16}}), 1))
    supervised = rows_of(config.data, DOCUMENT).supervised
    penalty = penalty_of(config)
    rows = []
    for tokens in TOKENS:
        for turns in TURNS:
            for name, changed, gpus in kinds:
                found = {
                    card: _cell(shape, changed, gpus, card, tokens, turns, supervised, penalty)
                    for card in CARDS
                }
                rows.append(MemoryRow(tokens, turns, name, found))
    return rows


def _cell(
    shape: Any,
    config: Any,
    gpus: int,
    card: str,
    tokens: int,
    turns: int,
    supervised: float,
    penalty: Penalty,
) -> str:
    kept = memory.activations(shape, tokens, supervised * tokens, config)
    dual = config.penalised and penalty.needs_dual
    in_graph = turns - (penalty.last_turns if dual else 0)
    held = memory.held(shape, config, gpus) + memory.CONTEXT + memory.LOGITS
    room = memory.budget(shape, config, gpus, cards()[card])
    choice = choose(config.memory, kept, room, in_graph, dual)
    if not choice.fits or held > cards()[card].memory:
        return "no"
    again = choice.recompute
    words = []
    if again.selective:
        words.append("norms")
    if again.turns:
        words.append(f"{again.turns} of {in_graph}" + (" by layer" * (again.per == "layer")))
    if again.dual:
        words.append("dual")
    return f"{(held + choice.peak) / GIB:.0f}: {' + '.join(words) or 'all kept'}"
