"""Every random stream of a run from its one seed: initial weights, depth, noise, dropout."""

import hashlib

import torch


def derive(seed: int, *stream: int | str) -> int:
    """A seed in [0, 2^63) for the stream that `stream` names, as a pure function of its arguments.

    Streams with different names are independent for all purposes here: the seed is a hash.
    """
    key = "/".join(str(part) for part in (seed, *stream)).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def seed_dropout(seed: int, step: int, micro: int, device: torch.device) -> None:
    """Seed what the model itself draws in micro-batch `micro` of `step`.

    As a function of its place rather than a stream through the run, so that resumption has no
    generator state to restore.
    """
    value = derive(seed, "dropout", step, micro)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)
    else:
        torch.default_generator.manual_seed(value)
