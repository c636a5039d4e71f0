"""The exit codes that the command lines share."""

import errno
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import TextIO

_OF_THE_DISK = {
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EACCES", "EPERM", "EIO", "EMFILE")
    if hasattr(errno, name)
}
"""Errors that are the machine's."""


def exit_code(command: Callable[[], int], name: str) -> int:
    """Run a command: its own exit code, 2 for a mistake of the user's, 1 for a disk that is full or
    may not be written, 130 for an interruption. With $STARS_FAST_DEBUG errors are not caught.

    Where the reader of the output has left, as `head` does, it ends without a word, with 141 = 128
    + SIGPIPE.

    Args:
        command: gives its exit code.
        name: the command's, in front of what it says of a mistake.
    """
    try:
        try:
            return _told(command, name)
        finally:
            sys.stdout.flush()  # here, as at the exit of Python it can't be caught
    except BrokenPipeError:
        gone = [stream for stream in (sys.stdout, sys.stderr) if _reader_has_left(stream)]
        if not gone:  # it is another pipe
            raise
        for stream in gone:  # what is still to be written at the exit goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 128 + signal.SIGPIPE


def _told(command: Callable[[], int], name: str) -> int:
    from stars_fast.base.errors import ConfigError
    from stars_fast.base.optional import explained

    if os.environ.get("STARS_FAST_DEBUG"):
        return command()
    try:
        return command()
    except ConfigError as error:
        print(f"{name.split()[0]}: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        missing = explained(error, name)
        if missing is None:
            raise
        print(f"{name.split()[0]}: {missing}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in _OF_THE_DISK:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"{name.split()[0]}: {where}{error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name.split()[0]}: interrupted", file=sys.stderr)
        return 130


def _reader_has_left(stream: TextIO) -> bool:
    try:
        watched = select.poll()
        watched.register(stream.fileno(), select.POLLOUT)
    except (AttributeError, OSError):  # no such call on Windows; no file behind the stream
        return False
    return any(event & select.POLLERR for _, event in watched.poll(0))
