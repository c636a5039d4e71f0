"""Shared set-up: few threads, so that parallel runs of the suite do not fight for cores."""

import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "dual")]
torch.set_num_threads(1)
