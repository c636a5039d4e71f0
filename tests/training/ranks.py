"""Processes as torchrun would start them, but forked from one that has imported torch and
transformers, which would cost each of them seconds."""

import os
import runpy
import sys
import tempfile
import time
from contextlib import suppress

import fresh


def begin(command, environment, log):
    """Becomes `python COMMAND` with its output in the file `log`."""
    written = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(written, stream)
    os.environ.update(environment)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, os.path.dirname(command[0]))
        runpy.run_path(command[0], run_name="__main__")


def run_ranks(command, processes=1, timeout=100):
    """Exit codes of `python COMMAND` as so many processes of one group; what they write to stdout
    and stderr is on stderr once they have ended. After `timeout` seconds those still at work are
    killed, with TimeoutError."""
    context, _ = fresh.server()
    started = []
    with tempfile.NamedTemporaryFile() as log:
        for place in fresh.places(processes):
            arguments = (command, os.environ | place, log.name)
            started.append(context.Process(target=begin, args=arguments))
        for process in started:
            process.start()
        end = time.monotonic() + timeout
        try:
            for process in started:
                process.join(max(end - time.monotonic(), 0))
            if any(process.is_alive() for process in started):
                raise TimeoutError(f"{command} was at work for {timeout} s")
            return [process.exitcode for process in started]
        finally:
            for process in started:
                with suppress(ValueError):
                    process.kill()
            print(log.read().decode(errors="replace"), file=sys.stderr)
