"""Shared set-up: few threads, so that parallel runs of the suite do not fight for cores; Triton
interprets its kernels where there is no GPU, which has to be said before anything imports it.

At the end of a session the tests are named whose cases take long together without being marked
`slow`.
"""

import os
import resource
import sys
from collections import Counter
from pathlib import Path
from types import CodeType

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / folder) for folder in ("", "dual", "models")]  # shared helpers
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

SLOW = 4  # seconds of CPU time, which a busy machine changes less than the clock's
SPREAD = ("test_every_op", "test_fuzz")  # files whose tests share nothing
MODULES = {"torch", "F", "nn", "np", "functional", "special", "fft"}  # said in no id
FILE_SIZES = resource.getrlimit(resource.RLIMIT_FSIZE)
BEGAN = pytest.StashKey[float]()


def cpu_time():
    """Seconds of this process and of those that it waited for."""
    return sum(os.times()[:4])


@pytest.fixture(autouse=True)
def _same_draws():
    """What a test draws from torch does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture
def taken(monkeypatch):
    """The maps of which the tangent alone was computed."""
    from stars_fast.dual.recognition import last_map

    maps, compute = [], last_map.tangent_linear

    def noted(*args):
        maps.append(args)
        return compute(*args)

    monkeypatch.setattr(last_map, "tangent_linear", noted)
    return maps


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


def pytest_make_parametrize_id(val, argname):
    """Ids that read: what a lambda calls, what a mapping or a list holds, the name of a number."""
    if isinstance(val, (bool, int, float)):
        return f"{argname}={val}"
    if isinstance(val, (dict, list, tuple, set)) or getattr(val, "__name__", "") == "<lambda>":
        return f"{words(val)[:80] or 'none'}"
    return None


def words(x):
    """A value in words that are the same in every process."""
    if isinstance(x, dict):
        return ",".join(f"{words(key)}={words(value)}" for key, value in x.items())
    if isinstance(x, (list, tuple)):
        return "-".join(map(words, x))
    if isinstance(x, (set, frozenset)):
        return "-".join(sorted(map(words, x)))
    if hasattr(x, "__code__"):
        x = x.__code__
    if isinstance(x, CodeType):
        names = [name for name in (*x.co_freevars, *x.co_names) if name not in MODULES]
        return "-".join([*names, *(words(each) for each in x.co_consts if each is not None)])
    if x is None or isinstance(x, (str, bytes, bool, int, float, complex, torch.dtype)):
        return str(x).removeprefix("torch.")
    return getattr(x, "__name__", type(x).__name__)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.stash[BEGAN] = cpu_time()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    # What a test forbids itself to write to files, pytest still has to write.
    resource.setrlimit(resource.RLIMIT_FSIZE, FILE_SIZES)
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
