"""The backend switch."""

import os
import subprocess
import sys

import pytest
import torch

from stars_fast import ops
from stars_fast.ops import library


def run(backend):
    code = (
        "import torch; from stars_fast import ops; x = torch.randn(2, 3, 4)\n"
        "for _ in range(2):\n"
        "    try: ops.softmax(x); print(ops.library._forced)\n"
        "    except (ValueError, RuntimeError) as error: print(error)"
    )
    env = {**os.environ, "STARS_FAST_BACKEND": backend}
    run = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(run, capture_output=True, text=True, check=True, env=env).stdout


@pytest.mark.slow
def test_the_environment_is_checked_at_every_op_until_it_is_right():
    assert run("torch") == "torch\ntorch\n"
    assert run("typo").count("STARS_FAST_BACKEND: backend: expected one of") == 2
    if not torch.cuda.is_available():
        assert run("cuda").count("STARS_FAST_BACKEND: backend: 'cuda' can't be used here") == 2


def test_a_forced_backend_ends_with_its_block():
    x = torch.randn(2, 3, 4)
    default = library.implementation("softmax", x)
    with ops.backend("torch"):
        assert library.implementation("softmax", x) is library._plain["softmax"]
        with ops.backend(None):
            assert library.implementation("softmax", x) is default
        assert library.implementation("softmax", x) is library._plain["softmax"]
    assert library.implementation("softmax", x) is default
    with pytest.raises(ValueError, match="backend: expected one of"), ops.backend("typo"):
        pass


def test_what_a_backend_lacks_runs_in_plain_pytorch():
    x = torch.randn(2, 3, 4, dtype=torch.float16)
    assert library.implementation("softmax", x) is library._plain["softmax"]
    y = torch.randn(2, 3, 4)
    assert library.implementation("gated", y, "tanh") is library._plain["gated"]
    assert torch.isfinite(ops.gated(y, y, "tanh")).all()


def test_each_op_has_its_schema_in_every_backend():
    for name in library.SCHEMAS:
        for backend in library.BACKENDS[1:]:
            schema = getattr(getattr(torch.ops.stars_fast, name), backend)._schema
            assert str(schema).endswith(library.SCHEMAS[name])
