"""Shared set-up: few threads, so that parallel runs of the suite do not fight for cores; Triton
interprets its kernels where there is no GPU, which has to be said before anything imports it.

At the end of a session the tests are named whose cases take long together without being marked
`slow`.
"""

import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / folder) for folder in ("", "dual", "models")]  # shared helpers
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

SLOW = 5  # seconds of CPU time, which a busy machine changes less than the clock's
SPREAD = ("test_every_op", "test_fuzz")  # files whose tests share nothing
BEGAN = pytest.StashKey[float]()


def cpu_time():
    """Seconds of this process and of those that it waited for."""
    return sum(os.times()[:4])


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.stash[BEGAN] = cpu_time()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    report.cpu_time = cpu_time() - item.stash[BEGAN]
    return report


def pytest_terminal_summary(terminalreporter):
    seconds = Counter()
    for report in (each for reports in terminalreporter.stats.values() for each in reports):
        if getattr(report, "when", "") == "teardown" and "slow" not in report.keywords:
            seconds[report.nodeid.split("[")[0]] += report.cpu_time
    for name, spent in seconds.most_common():
        if spent > SLOW:
            terminalreporter.write_line(f"not marked slow, {spent:.0f} s of CPU time: {name}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file stays in one process, so that what its tests share is made once."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0]
            return nodeid if Path(file).stem in SPREAD else file

    return ByFile(config, log)
