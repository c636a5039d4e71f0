"""Where the tests of this folder find the tiny models, and each other's helpers."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE / "scripts")]
