"""The op level: what is checked, what is timed, and what is found wrong."""

from dataclasses import replace

import pytest
import torch

from benchmarks import cases, op
from stars_fast.ops import library

PEAKS = {"gemm_flops": 1e11, "copy_bytes": 1e10}
ALL = op.op_cases("cpu", small=True)


def rows_of(case, names=("torch",), dtype=torch.float32):
    return op.op_rows(case, case, list(names), dtype, "cpu", 1, PEAKS)


@pytest.mark.parametrize("case", [timed for timed, _ in ALL], ids=lambda case: case.name)
def test_pytorchs_op_computes_the_reference(case):
    primals = [t[0].double() for t in case.stacks]
    plains = [t.double() for t in case.plains]
    torch.testing.assert_close(case.torch_op(*primals, *plains), case.ref(*primals, *plains))


def test_every_op_is_there_and_every_backend_answers_with_its_error():
    assert {timed.name.partition("-")[0] for timed, _ in ALL} == set(op.OPS)
    names = cases.backends("cpu", torch.float32)
    assert names[0] == "torch"
    assert "triton" not in names  # its interpreter is no backend to time
    rows = rows_of(ALL[0][0], names)
    assert set(rows) == {"plain", *names}
    for name in names:
        assert rows[name]["error"] < 2e-6
        assert len(rows[name]["errors"]) == 5  # y, y_dot, x_bar, x_dot_bar, w_bar


def test_figures_of_a_direction():
    case = cases.attention_case("attention", 2, 3, 3, 64, 16)
    times = {"dual forward": [6e-3, 3e-3, 9e-3], "plain forward": [2e-3, 1e-3, 3e-3]}
    row = op._figures(case, "dual", "forward", times, torch.float32, PEAKS, True)
    flops = 3 * 2 * 2 * (2 * 3 * 64 * 64 // 2 * 16)  # three times two products of half the square
    assert row["forward_us"] == 6000
    assert row["forward_ratio"] == 3
    assert row["forward_gflop"] == pytest.approx(flops / 1e9, abs=1e-5)
    assert row["forward_of_gemm"] == pytest.approx(flops / 6e-3 / 1e11, abs=1e-3)
    (norm, _), *_ = ALL
    row = op._figures(norm, "dual", "backward", _as_backward(times), torch.bfloat16, PEAKS, True)
    moved = 3 * norm.stacks[0].numel() * 2  # read x and the cotangent, write x's; 2 bytes each
    assert row["backward_gbyte"] == pytest.approx(moved / 1e9, abs=1e-5)


def _as_backward(times):
    return {name.replace("forward", "backward"): value for name, value in times.items()}


def test_an_op_that_drops_a_cotangent_is_wrong():
    case = ALL[0][0]

    def dropped(x, w):
        y = case.op(x, w)
        return torch.stack((y[0], y[1].detach() + 0 * y[1]))

    rows = rows_of(replace(case, op=dropped))
    assert rows["torch"]["wrong"]
    assert rows["torch"]["error"] > 0.1
    assert "wrong" not in rows_of(case)["torch"]


def test_an_op_that_raises_leaves_the_others():
    def broken(*inputs):
        raise ValueError("no such kernel")

    rows = rows_of(replace(ALL[0][0], op=broken))
    assert rows["torch"] == {"failed": "ValueError: no such kernel"}
    assert rows["plain"]["forward_ratio"] == 1


def test_a_backend_that_plain_pytorch_stands_in_for_has_no_row():
    if not library.has("cpp", "cpu"):
        pytest.skip("the extension is not built")
    assert "cpp" in rows_of(ALL[0][0], ["cpp"])
    # float16 is not among what cpp computes with.
    assert cases.errors(ALL[0][0], torch.float16, "cpu", "cpp") is None


def test_what_is_too_long_to_check_is_checked_shorter():
    for timed, checked in op.op_cases("cpu", small=False):
        assert timed.name == checked.name
        assert timed.stacks[0].shape[-1] == checked.stacks[0].shape[-1]
        if "attention" in timed.name:
            assert checked.stacks[0].shape[3] == min(timed.stacks[0].shape[3], 512)
