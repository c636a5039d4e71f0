"""Whether a CUDA graph is being captured."""

import torch


def capturing() -> bool:
    """Whether what runs now is captured rather than done; False where CUDA is not in use."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
