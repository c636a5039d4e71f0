"""The raw ops in plain PyTorch, which judge every other backend in 16 bits, against the spec."""

import pytest
import torch
from raw_ops import CASES, check_rows, plain


@pytest.mark.parametrize("dual", [True, False], ids=["dual", "ordinary"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("name", CASES)
def test_value_tangent_and_every_cotangent(name, dtype, dual):
    for shape in [(5, 33), (1, 8), (7,), (2, 3, 64), (0, 4)]:
        check_rows(plain, CASES[name], shape, dtype, dual)
