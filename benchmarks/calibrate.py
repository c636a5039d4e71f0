"""The rates of the cost model (`stars-fast plan`) from the run of `gpu_check` of 28 November 2026.

    python -m benchmarks.calibrate benchmarks/results/2026-11-28-h200.json [--write]

From ops alone: the copy, the row ops, attention. From blocks of one layer: products, and what a
pass costs beside its layers (the dual pass as a graph); ops that PyTorch runs one by one and its
products in fp32 (double backward); the host's time (2,048 tokens, run eagerly). The others enter
nothing: `CHECKS` are what the predictions are held against, within 15 % (`tests/training/plan`).
Runs since then have other sections, without blocks of one layer at 8,192 tokens, and are refused.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stars_fast.training.plan import rates as rates_module
from stars_fast.training.plan.cards import Card, cards
from stars_fast.training.plan.rates import PRODUCTS, TILE, Rates, attention_seconds, copy_rate

WIDTH, INNER, HEADS = 2048, 5632, 16
"""Sizes of the blocks of `gpu_stages`, those of Ouro-1.4B."""

LAYER = 4 * WIDTH**2 + 3 * WIDTH * INNER
"""Weights of the linear maps of a layer."""

NAMES = {"rms_norm": "norm", "sandwich": "sandwich", "swiglu": "gate", "rotary": "rotary"}

PLAIN_EAGER = 86 * WIDTH + 17 * INNER
"""Elements of 2 bytes a token that `SandwichLayer` reads and writes outside of products and
attention, forward and backward, its norms fused: rotary by halves, SiLU x mul, sums, copies."""

PLAIN_OPS = 169
"""Ops of `SandwichLayer` forward and backward (norms in plain operations, as on a CPU)."""

TWICE_TOKEN = 1158 * WIDTH + 93 * INNER
TWICE_WEIGHT = 4.15
TWICE_SQUARE = 39
TWICE_PRODUCTS = 18
"""The same of double backward: elements a token, times each weight is touched, values in fp32 and
products for each pair of tokens and head. Counted with a dispatch mode on a CPU, at two widths and
two lengths."""

HOST_COST = {"plain": 43.0 / 37.6, "dual": 64.4 / 99.8}
"""Host time of native Ouro layers over that of `SandwichLayer`, forward and backward
(`benchmarks.host_cost`, in `benchmarks/log/2026-11-28.md`)."""

SECTIONS = ("copy", "row ops", "attention", "blocks", "graphs")
"""Sections of a run that are read."""

Key = tuple[str, int, int]
"""A pass, layers and tokens; "dual graph" is one that was captured."""

CALIBRATES: tuple[Key, ...] = (
    ("dual graph", 1, 2048), ("dual graph", 1, 8192), ("double_backward", 1, 2048),
    ("double_backward", 1, 8192), ("plain", 1, 2048), ("dual", 1, 2048),
)  # fmt: skip
CHECKS: tuple[Key, ...] = (
    ("plain", 1, 8192), ("dual", 1, 8192), ("plain", 24, 2048), ("dual", 24, 2048),
    ("dual graph", 24, 2048), ("double_backward", 24, 2048), ("plain", 24, 8192),
    ("dual", 24, 8192), ("dual graph", 24, 8192),
)  # fmt: skip


def measured(results: dict[str, Any]) -> dict[Key, float]:
    """Seconds of every block of a run."""
    found: dict[Key, float] = {}
    for row in results["blocks"]:
        for way, entry in row["rows"].items():
            found[way, row["layers"], row["tokens"]] = entry["ms"] / 1e3
    for row in results["graphs"]:
        found["dual graph", row["layers"], row["tokens"]] = row["graph_ms"] / 1e3
    return found


def dual_rows(rates: Rates, copy: float) -> float:
    """Seconds a token and layer of the row ops of a dual pass through `SandwichLayer`."""
    elements = {
        "norm forward": 8 * WIDTH, "norm backward": 12 * WIDTH, "rotary forward": 4 * WIDTH,
        "rotary backward": 4 * WIDTH, "gate forward": 3 * INNER, "gate backward": 5 * INNER,
    }  # fmt: skip
    fused = sum(n / rates.rows[op] for op, n in elements.items())
    sums = 18 * WIDTH / rates.rows["gate forward"]  # residual sums, and the stack of q, k and v
    return 4 * (fused + sums) / copy


def predict(key: Key, card: Card, rates: Rates) -> float:
    """Seconds of a pass through so many layers of `SandwichLayer`."""
    way, layers, tokens = key
    copy = copy_rate(card, rates)
    product = 2 * LAYER * tokens / (rates.products * card.bf16)

    def attention(kind: str) -> float:
        return sum(
            attention_seconds(f"{kind} {each}", [tokens], WIDTH, card, rates)
            for each in ("forward", "backward")
        )

    if way == "plain":
        gpu = 3 * product + attention("plain") + 2 * PLAIN_EAGER * tokens / (rates.eager * copy)
    elif way == "double_backward":
        gpu = 6 * product + twice_traffic(tokens) / (rates.eager * copy)
        gpu += twice_products(tokens) / (rates.single * card.fp32)
    else:
        gpu = 6 * product + attention("dual") + dual_rows(rates, copy) * tokens
    host = 0.0 if way == "dual graph" else rates.host[f"{way}, generic"]
    return rates.call + layers * max(gpu, host)


def twice_traffic(tokens: int) -> float:
    """Bytes of a layer of double backward outside of its products in bf16."""
    square = 4 * TWICE_SQUARE * HEADS * tokens**2
    return 2 * TWICE_TOKEN * tokens + 2 * TWICE_WEIGHT * LAYER + square


def twice_products(tokens: int) -> float:
    """FLOPs in fp32 of attention in a layer of double backward."""
    return TWICE_PRODUCTS * 2 * tokens**2 * WIDTH


def calibrate(results: dict[str, Any], card: Card) -> Rates:
    """The rates that the rows of `CALIBRATES` and the ops alone give."""
    copy = results["copy"][0]["GB/s"] * 1e9
    rows = {
        f"{NAMES[row['case']]} {each}": row[f"{each}_of_copy"]
        for row in results["row ops"]
        for each in ("forward", "backward")
        if row["backend"] == "triton" and row["case"] in NAMES
    }
    attention, latency = {}, {}
    timed = {row["shape"][2]: row for row in results["attention"] if row["shape"][3] == 128}
    for kind in PRODUCTS:
        name, each = kind.split()
        column = "dual_ms" if name == "dual" else "sdpa_ms"
        at = {n: row[column][each == "backward"] / 1e3 for n, row in timed.items()}
        pairs = {n: n * (n + TILE) / 2 for n in timed}
        slope = (at[8192] - at[2048]) / (pairs[8192] - pairs[2048])
        attention[kind] = PRODUCTS[kind] * 2 * WIDTH / slope / card.bf16
        latency[kind] = at[2048] - slope * pairs[2048]
    found = Rates(copy / card.bandwidth, 1.0, 1.0, 1.0, rows, attention, latency, 0.0, {}, 0.0)
    seconds = measured(results)

    def rest(n: int) -> float:
        own = sum(
            attention_seconds(kind, [n], WIDTH, card, found) for kind in PRODUCTS if "dual" in kind
        )
        return seconds["dual graph", 1, n] - own - dual_rows(found, copy) * n

    slope = (rest(8192) - rest(2048)) / 6144
    found = found._replace(products=12 * LAYER / slope / card.bf16, call=rest(2048) - slope * 2048)
    lengths = (2048, 8192)
    system = [[twice_traffic(n) / copy, twice_products(n) / card.fp32] for n in lengths]
    left = [
        seconds["double_backward", 1, n]
        - found.call
        - 12 * LAYER * n / (found.products * card.bf16)
        for n in lengths
    ]
    eager, single = np.linalg.solve(np.array(system), np.array(left))
    host = {f"{way}, generic": seconds[way, 1, 2048] - found.call for way in ("plain", "dual")}
    op = host["plain, generic"] / PLAIN_OPS
    host |= {way: HOST_COST[way] * host[f"{way}, generic"] for way in HOST_COST}
    host["double_backward, generic"] = 496 * op
    return found._replace(eager=1 / eager, single=1 / single, host=host, op=op)


def rounded(value: Any) -> Any:
    """Four significant digits."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return float(f"{value:.4g}")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("results", type=Path, help="JSON of gpu_check as it was then")
    parser.add_argument("--write", action="store_true", help="write rates.json of the package")
    options = parser.parse_args(words)
    results = json.loads(options.results.read_text(encoding="utf-8"))
    if missing := [name for name in SECTIONS if name not in results]:
        parser.error(
            f"results: expected sections {', '.join(SECTIONS)}, as gpu_check wrote on 28 November "
            f"2026, got a file without {', '.join(missing)}"
        )
    card = cards()["H200"]
    found = Rates(**{k: rounded(v) for k, v in calibrate(results, card)._asdict().items()})
    if options.write:
        text = json.dumps({"source": options.results.name, "rates": found._asdict()}, indent=2)
        Path(rates_module.__file__).with_name("rates.json").write_text(text + "\n", "utf-8")
    print(json.dumps(found._asdict(), indent=2))
    print("| pass | layers | tokens | measured ms | predicted ms | off by | |")
    print("|---|---|---|---|---|---|---|")
    for key, seconds in measured(results).items():
        guess = predict(key, card, found)
        use = "calibrates" if key in CALIBRATES else "check" if key in CHECKS else ""
        print(
            f"| {key[0]} | {key[1]} | {key[2]} | {1e3 * seconds:.2f} | {1e3 * guess:.2f} | "
            f"{guess / seconds - 1:+.1%} | {use} |"
        )


if __name__ == "__main__":
    main()
