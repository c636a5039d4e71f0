"""Other libraries' notices, kept from the user's terminal while they are imported."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_import() -> Iterator[None]:
    """Hold back what torchao's import logs below an error.

    transformers imports torchao with its first model class, where it is installed; that logs each
    kernel that its wheel has no build of for this machine, and enumerations that torch no longer
    wants registered. Both are of no use to who runs a command. Other loggers stay as they are.
    """
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    for logger in loggers:
        logger.addFilter(_is_error)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
