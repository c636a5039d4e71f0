"""Shared set-up: few threads, so that parallel runs of the suite do not fight for cores; Triton
interprets its kernels where there is no GPU, which has to be said before anything imports it."""

import os
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / folder) for folder in ("", "dual", "models")]  # shared helpers
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
