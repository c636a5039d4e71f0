"""Runs that are killed in every phase, and whose disk is full at a save, end as one left alone.

STARS_FAST_KILLS=40 kills each of them 40 times.
"""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.kill_resume import schedule_of

KILLS = int(os.environ.get("STARS_FAST_KILLS", "8"))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_runs_end_as_one_left_alone(processes):
    command = [sys.executable, "-m", "benchmarks.kill_resume", "--kills", str(KILLS)]
    done = subprocess.run(
        [*command, "--processes", str(processes)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert sum(result["kills"].values()) == KILLS
    assert result["full_disks"] >= 1
    assert result["identical"]
    assert result["left"] == []


@pytest.mark.parametrize("kills", [8, 10, 40])
def test_kills_are_of_all_phases(kills):
    schedule = schedule_of(kills)
    assert len(schedule) == kills
    assert {phase for phase, _ in schedule} == {"tokenising", "save", "step", "evaluation", "end"}
    assert sum(full for _, full in schedule) >= 1
