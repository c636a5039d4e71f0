import json

import pytest
import torch

from benchmarks.report import FULL, reason, table, with_rates, write

COLUMNS = {"ms": ("ms", ".1f"), "ratio": ("ratio", ".2f"), "mib": ("MiB", ".0f")}


def test_a_failed_row_says_why_and_leaves_the_columns_alone():
    rows = {
        "plain": {"ms": 10.0, "ratio": 1.0},
        "a longer name": {"failed": "needs CUDA; or something else that is long"},
        "dual": {"ms": 123.456, "ratio": 2.0},
    }
    assert table(rows, COLUMNS).splitlines() == [
        "                  ms  ratio",
        "plain           10.0   1.00",
        "a longer name  needs CUDA; or something else that is long",
        "dual           123.5   2.00",
    ]


def test_a_failed_row_in_a_table_of_one_column():
    rows = {"plain": {"ms": 1.0}, "peer": {"failed": "not installed"}}
    assert table(rows, COLUMNS).splitlines()[-1] == "peer   not installed"


def test_a_wrong_row_is_marked():
    rows = {"dual": {"ms": 1.0, "wrong": True}, "plain": {"ms": 2.0}}
    assert [line.split() for line in table(rows, COLUMNS).splitlines()[1:]] == [
        ["dual", "(WRONG)", "1.0"],
        ["plain", "2.0"],
    ]


def test_a_cell_may_be_words_or_missing():
    rows = {"1024": {"mib": FULL}, "512": {"mib": 7.0}, "2048": {"mib": None}}
    assert [line.strip() for line in table(rows, COLUMNS).splitlines()] == [
        "MiB",
        "1024  out of memory",
        "512               7",
        "2048",
    ]


def test_rates_are_shares_of_the_peaks():
    peaks = {"gemm_flops": 1e12, "copy_bytes": 1e11}
    row = with_rates({"ms": 10.0, "gflop": 5.0, "gbyte": 0.2}, peaks)
    assert (row["of_gemm"], row["of_copy"]) == (0.5, 0.2)
    assert with_rates({"ms": 1.0}, peaks) == {"ms": 1.0}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        MemoryError(),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["cuda", "cpu", "python", "triton", "cublas"],
)
def test_what_runs_out_of_memory_says_so(error):
    assert reason(error) == FULL


def test_another_failure_is_its_first_line():
    assert reason(TypeError("no\nsecond line")) == "TypeError: no"


def test_write(tmp_path):
    write(tmp_path / "new" / "a.json", {"rows": [1]})
    assert json.loads((tmp_path / "new" / "a.json").read_text()) == {"rows": [1]}
    write(None, {})
    assert len(list(tmp_path.iterdir())) == 1
