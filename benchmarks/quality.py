"""Worth of the cheaper penalties at the end of training: addition models, three seeds each.

    python -m benchmarks.quality [--out DIR] [--workers 2] [--settings NAME ...] [--seeds 0 1 2]
    python -m benchmarks.quality --steps 20 --start 10 --seeds 0 --out runs/try  # to try it

All settings of a seed continue one trunk, a run without a penalty up to the step at which it
begins; so they differ in the penalty alone. The recipe is `addition-quick-stars` with depths up to
20 and a constant learning rate (`--decay` lets it fall at the end), where the penalty matters. Each
run is judged at its last four checkpoints (`--judged`): exact match against turns on unseen sums,
and the spectral radius of the block at the states of some of them. Stopped, it goes on where it
was; runs of other lengths want another folder. Writes quality.json and quality.png.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stars_fast import spectral_radius
from stars_fast.base.files import write_text
from stars_fast.base.plots import accuracy_and_radius
from stars_fast.evaluation.addition import evaluate
from stars_fast.evaluation.run_data import open_data
from stars_fast.models.saved import find_model, load_model
from stars_fast.training.config import load_config, save_config
from stars_fast.training.run.trainer import train

JUDGED_TURNS = (1, 2, 4, 8, 16, 32, 64, 100)
RADIUS_TURNS = (4, 16, 64)
BASE = "--depth.mu 1.5 --depth.sigma 0.5 --depth.high 20 --decay_steps 0 --train.report_to none"
ATTACHED = "--penalty.detach false"
AT_LAST = f"--penalty.at last {ATTACHED}"
OF_A_QUARTER = "--penalty.fraction 0.25"
IN_FOUR = "--train.accumulation 4"
ALONG_STEP = "--penalty.direction step"
SETTINGS = {
    "no penalty": "--penalty.weight 0",
    "exact": "",
    "exact, attached": ATTACHED,
    "quarter": OF_A_QUARTER,
    "quarter, attached": f"{OF_A_QUARTER} {ATTACHED}",
    "last": AT_LAST,
    "last, quarter": f"{AT_LAST} {OF_A_QUARTER}",
    "exact, in four": IN_FOUR,
    "last, micro-batch": f"{IN_FOUR} {AT_LAST} {OF_A_QUARTER} --penalty.draw micro-batches",
    "exact, 0.03": "--penalty.weight 0.03",
    "step, 0.1": ALONG_STEP,
    "step, 0.03": f"{ALONG_STEP} --penalty.weight 0.03",
    "step, 0.01": f"{ALONG_STEP} --penalty.weight 0.01",
    "last, step, 0.03": f"{AT_LAST} {ALONG_STEP} --penalty.weight 0.03",
}
"""Options of the trainer; lambda is 0.1 unless it is said. "in four" has four micro-batches a step,
each with a depth of its own, and "micro-batch" the penalty on one of them."""


def hold_lengths(options: argparse.Namespace) -> None:
    """Keep the lengths of the runs of a folder in it; end where it has runs of others, whose
    results would be taken for these."""
    asked = {name: getattr(options, name) for name in ("steps", "start", "decay", "judged")}
    kept = options.out / "lengths.json"
    if not kept.exists() and any(options.out.glob("*/config.yaml")):
        sys.exit(f"--out: expected a new folder, or one with {kept.name}, got {options.out}")
    if not kept.exists():
        write_text(kept, json.dumps(asked) + "\n")
    elif (found := json.loads(kept.read_text())) != asked:
        sys.exit(f"--out: expected a folder with runs of {asked}, got {found} in {options.out}")


def trunk(out: Path, seed: int, start: int) -> Path:
    """The run without a penalty that the settings of a seed continue."""
    folder = out / f"trunk-{seed}"
    words = f"{BASE} --seed {seed} --steps {start} --save_every {start} --penalty.weight 0.1"
    words += f" --penalty.start_step {start} --out {folder}"
    if not (folder / "results.json").exists():
        train(load_config("addition-quick-stars", words.split()), resume=folder.exists())
    return folder


def branch(out: Path, name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train a setting of a seed, judge it and write what was found."""
    folder = out / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
    begun = trunk(out, seed, options.start)
    if not (folder / "config.yaml").exists():
        shutil.copytree(begun / "checkpoints", folder / "checkpoints", dirs_exist_ok=True)
        shutil.copy(begun / "metrics.jsonl", folder)
        every = max((options.steps - options.start) // 8, 1)
        words = f"{SETTINGS[name]} --steps {options.steps} --save_every {every} --keep 4"
        words += f" --decay_steps {options.decay} --eval.limit 100"
        words += f" --out {folder} --name {folder.name}"
        save_config(load_config(str(begun), words.split()), folder / "config.yaml")
    if not (folder / "results.json").exists():
        train(load_config(str(folder)), resume=True)
    found = folder / "quality.json"
    if not found.exists():
        found.write_text(json.dumps(judge(folder, options.judged), indent=1) + "\n")
    return json.loads(found.read_text())


def judge(folder: Path, last: int) -> dict[str, Any]:
    """Accuracy and spectral radii, averaged over the last so many checkpoints of a run."""
    steps = sorted(int(path.name.removeprefix("step-")) for path in folder.glob("checkpoints/*"))
    steps = steps[-last:]
    accuracies, radii = [], []
    for step in steps:
        source = find_model(folder, step)
        loop, sums = source.family.loop(load_model(source)), open_data(source).held_out
        assert sums is not None
        accuracies.append(evaluate(loop, sums, JUDGED_TURNS))
        radii.append(spectra(loop.model, sums.batch(np.arange(32)).tokens))
    return {
        "checkpoints": steps,
        "accuracy": {t: statistics.fmean(a[t] for a in accuracies) for t in JUDGED_TURNS},
        "radius": {t: statistics.fmean(r[t] for r in radii) for t in RADIUS_TURNS},
    }


@torch.no_grad()
def spectra(model: Any, tokens: torch.Tensor) -> dict[int, float]:
    """Mean over samples of the spectral radius at h^(t)."""
    h, found = model.prelude(tokens), {}
    for turn in range(1, max(RADIUS_TURNS) + 1):
        h = model.block(h)
        if turn in RADIUS_TURNS:
            generator = torch.Generator().manual_seed(turn)
            found[turn] = float(
                spectral_radius(model.block, h, generator=generator, tol=1e-3).mean()
            )
    return found


def gathered(found: dict[tuple[str, int], dict[str, Any]]) -> dict[str, Any]:
    """Mean, least and most over the seeds of each setting."""
    table: dict[str, Any] = {}
    for name in SETTINGS:
        runs = [entry for (setting, _), entry in found.items() if setting == name]
        if not runs:
            continue
        table[name] = {"seeds": len(runs)}
        for kind in ("accuracy", "radius"):
            keys = runs[0][kind]
            table[name][kind] = {
                t: [round(f(r[kind][t] for r in runs), 4) for f in (statistics.fmean, min, max)]
                for t in keys
            }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/quality"))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--decay", type=int, default=0, help="steps of decay at the end")
    parser.add_argument("--judged", type=int, default=4, help="checkpoints, the last so many")
    parser.add_argument("--start", type=int, default=1200, help="step at which the penalty begins")
    parser.add_argument("--workers", type=int, default=2, help="runs at once, one thread each")
    parser.add_argument("--one", nargs=2, metavar=("SETTING", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.one:
        torch.set_num_threads(1)
        name, seed = options.one[0], int(options.one[1])
        if name == "trunk":
            trunk(options.out, seed, options.start)
        else:
            branch(options.out, name, seed, options)
        return
    hold_lengths(options)

    def run(job: tuple[str, int]) -> None:
        words = ["--out", str(options.out), "--steps", str(options.steps)]
        words += ["--start", str(options.start), "--decay", str(options.decay)]
        words += ["--judged", str(options.judged)]
        words += ["--one", job[0], str(job[1])]
        log = options.out / "log.txt"
        with log.open("a") as file:
            subprocess.run([sys.executable, __file__, *words], stdout=file, stderr=file, check=True)
        print("done", *job, flush=True)

    jobs = [(name, seed) for seed in options.seeds for name in options.settings]
    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(run, [("trunk", seed) for seed in options.seeds]))
        list(pool.map(run, jobs))
    found = {job: branch(options.out, *job, options) for job in jobs}
    table = gathered(found)
    (options.out / "quality.json").write_text(json.dumps(table, indent=1) + "\n")
    means = {
        kind: {n: {int(t): v[0] for t, v in row[kind].items()} for n, row in table.items()}
        for kind in ("accuracy", "radius")
    }
    accuracy_and_radius(
        means["accuracy"],
        means["radius"],
        options.out / "quality.png",
        title="Exact match on unseen sums, mean of the seeds",
    )
    for name, row in table.items():
        curve = " / ".join(f"{100 * v[0]:.1f}" for v in row["accuracy"].values())
        print(f"{name:20} {curve}   radius {[v[0] for v in row['radius'].values()]}")


if __name__ == "__main__":
    main()
