"""Mutants of the product: small mistakes as somebody might make them, each caught by a test.

    python tests/mutate.py [NAME ...]      these, or all; prints which test caught each, and when
    python tests/mutate.py --try 'OLD' 'NEW' tests/ops/test_ops.py ...     one of your own

A mutant is a text of the package and what stands in its place. It is applied to a copy of the
tree, so that the tree itself and its tests can go on being used.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPS, TRITON = "tests/ops/", "tests/ops/triton_kernels/"


@dataclass(frozen=True)
class Mutant:
    """`old` stands once in the package, wherever; `tests` are what should see `new`."""

    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = {
    "sign of a term in a cotangent": Mutant(
        "dp.baddbmm_(b, v1.mT)", "dp.baddbmm_(b, v1.mT, alpha=-1)", (f"{OPS}test_attention.py",)
    ),
    "a mask that is dropped": Mutant(
        "full.masked_fill_(tile.mask.logical_not(), -torch.inf)",
        "pass",
        (f"{OPS}test_attention.py",),
    ),
    "eps added twice": Mutant(
        "primal.square().mean(-1, keepdim=True) + eps)",
        "primal.square().mean(-1, keepdim=True) + 2 * eps)",
        (f"{OPS}test_plain.py",),
    ),
    "a tangent that is detached": Mutant(
        "return Dual.join(a @ b, a_dot @ b + a @ b_dot)",
        "return Dual.join(a @ b, a_dot.detach() @ b + a @ b_dot)",
        ("tests/dual/test_blocks.py", "tests/dual/test_every_op.py"),
    ),
    "a span that ends one too early": Mutant(
        "torch.minimum(stop, start + place + 1), place",
        "torch.minimum(stop, start + place), place",
        (f"{OPS}test_attention.py",),
    ),
    "a norm's weight gradient in another scale": Mutant(
        "weight_bar = _row_sum(g * n) if weight_grad",
        "weight_bar = _row_sum(g * n) / 2 if weight_grad",
        (f"{OPS}test_plain.py",),
    ),
    "a law of depths that is shifted": Mutant(
        "np.log(k + 0.5) - self.mu",
        "np.log(k + 1) - self.mu",
        ("tests/training/step/test_depth.py",),
    ),
    "samples of a micro-batch weighed alike": Mutant(
        "value = value * (factor * batch.share)",
        "value = value * factor",
        ("tests/training/step", "tests/training/run/test_runs.py"),
    ),
    "an entry that a kernel leaves unwritten": Mutant(
        "tl.store(x + pair + offsets, tangent.to(x.dtype.element_ty), mask)",
        "tl.store(x + pair + offsets, tangent.to(x.dtype.element_ty), mask & (offsets != 7))",
        (f"{TRITON}test_rows_triton.py",),
    ),
    "a sum that a kernel leaves unwritten": Mutant(
        "tl.store(weight_parts + first * width + at, tl.sum(weight_sum, 0), at < width)",
        "tl.store(weight_parts + first * width + at, tl.sum(weight_sum, 0), at < width - 1)",
        (f"{TRITON}test_rows_triton.py",),
    ),
}


def apply(mutant, tree):
    """Put the mutant into a copy of the package; the place is told."""
    held = {path: path.read_text() for path in sorted((tree / "stars_fast").rglob("*.py"))}
    found = [path for path, text in held.items() if mutant.old in text]
    if len(found) != 1 or held[found[0]].count(mutant.old) != 1:
        places = ", ".join(str(path.relative_to(tree)) for path in found) or "nowhere"
        raise SystemExit(f"mutate: expected one place with {mutant.old!r}, got {places}")
    (path,) = found
    line = held[path][: held[path].index(mutant.old)].count("\n") + 1
    path.write_text(held[path].replace(mutant.old, mutant.new))
    return f"{path.relative_to(tree)}:{line}"


def attempt(name, mutant):
    """Whether a test caught it; one line says which."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        leave = shutil.ignore_patterns(
            ".*", "__pycache__", "build", "runs", "results", "*.egg-info"
        )
        shutil.copytree(ROOT, tree, ignore=leave)
        place = apply(mutant, tree)
        began = time.perf_counter()
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "--tb=no",
                "-p",
                "no:cacheprovider",
                *mutant.tests,
            ],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
        )
    caught = re.search(r"^FAILED (.+?)(?: - |$)", run.stdout, re.MULTILINE)
    if run.returncode not in (0, 1) or bool(caught) != (run.returncode == 1):
        raise SystemExit(f"mutate: the tests did not run:\n{run.stdout}{run.stderr}")
    seconds = time.perf_counter() - began
    what = f"caught by {caught[1]} in {seconds:.0f} s" if caught else f"SURVIVED {seconds:.0f} s"
    print(f"{name} ({place}): {what}", flush=True)
    return bool(caught)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of MUTANTS; by default all")
    parser.add_argument("--try", nargs="+", dest="own", metavar="TEXT", help="OLD NEW TEST ...")
    options = parser.parse_args()
    mutants = {name: MUTANTS[name] for name in options.names or MUTANTS}
    if options.own:
        old, new, *tests = options.own
        mutants = {"yours": Mutant(old, new, tuple(tests))}
    caught = [attempt(name, mutant) for name, mutant in mutants.items()]
    print(f"{sum(caught)} of {len(caught)} caught")
    return 0 if all(caught) else 1


if __name__ == "__main__":
    sys.exit(main())
