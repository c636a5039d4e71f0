"""Many programs from the command line: python tests/dual/fuzz/run.py 0 10000 --jobs 2

Prints how many agree, are refused, crash or are wrong, refusals by their words, what nothing
judges, and each failure in its smallest form.
"""

import argparse
import re
import sys
import time
import warnings
from collections import Counter
from multiprocessing import Pool
from pathlib import Path

import torch

import stars_fast

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz import tools
from fuzz.check import check
from fuzz.programs import START, write


def shrink(program, outcome):
    """The smallest program found that fails in the same way: lines and outputs are taken out, and
    values replaced by plain ones, while it still does."""

    def still(candidate):
        return candidate.outputs and _way(check(candidate)) == _way(outcome)

    for _ in range(4):
        before = program
        for i in reversed(range(len(program.outputs))):
            candidate = program.without(outputs=(i,))
            program = candidate if still(candidate) else program
        for i in reversed(range(len(program.lines))):
            candidate = program.without(lines=(i,))
            program = candidate if still(candidate) else program
        for i, line in enumerate(program.lines):
            if line.op != START and re.match(r"x\d+ = ", line.text):
                candidate = program.plainer(i)
                program = candidate if still(candidate) else program
        if program == before:
            break
    return program


def _way(outcome):
    """How it fails: the kind, and the error or what is wrong, without its numbers."""
    detail = re.sub(r"[\d.]+", "", outcome.detail.split(" | ")[0])
    return outcome.kind, detail.split(":")[0] if outcome.kind == "silent" else detail[:60]


def try_seed(seed):
    torch.set_num_threads(1)
    program = write(seed)
    outcome = check(program)
    return program, outcome


def signature(program, outcome):
    """What makes two small failures the same: the kind and the ops."""
    return *_way(outcome), tuple(sorted(set(program.ops()) - {START}))


def report(outcomes, seconds):
    counts = Counter(outcome.kind for _, outcome in outcomes)
    total = len(outcomes)
    parts = ", ".join(f"{kind} {n} ({n / total:.2%})" for kind, n in counts.most_common())
    return f"{total} programs in {seconds:.0f} s: {parts}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--examples", type=int, default=60, help="failures to print, at most")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"stars_fast from {Path(stars_fast.__file__).parent}, torch {torch.__version__}")
    start = time.perf_counter()
    seeds = range(options.first, options.last)
    if options.jobs > 1:
        with Pool(options.jobs) as pool:
            outcomes = pool.map(try_seed, seeds, chunksize=20)
    else:
        outcomes = [try_seed(seed) for seed in seeds]
    print(report(outcomes, time.perf_counter() - start))
    lines = Counter(op for program, _ in outcomes for op in program.ops())
    print(f"{len(lines)} ops, {sum(lines.values()) / len(outcomes):.1f} lines a program")

    refusals = Counter(o.detail.split(" | ")[0] for _, o in outcomes if o.kind == "refused")
    for text, count in refusals.most_common():
        print(f"  refused {count}: {text}")

    for program, outcome in outcomes:
        if outcome.kind in ("illegal", "torch", "rough"):
            print(f"  {outcome.kind}, {program.title()}: {outcome.detail.splitlines()[0][:100]}")

    found, groups = {}, Counter()
    for program, outcome in outcomes:
        if not outcome.fails:
            continue
        small = program if options.no_shrink else shrink(program, outcome)
        outcome = check(small)
        key = signature(small, outcome)
        groups[key] += 1
        if key not in found or len(small.lines) < len(found[key][0].lines):
            found[key] = small, outcome
    print(f"{sum(groups.values())} failures of {len(groups)} kinds")
    for key, count in groups.most_common(options.examples):
        small, outcome = found[key]
        print(f"\n## {outcome.kind} x {count}, {small.title()}")
        print(f"{outcome.detail}\n{small.source()}")
    if found:
        print(f"\nAbove every program stands {tools.__file__}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
