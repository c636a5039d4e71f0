"""Processes in which nothing of stars_fast is imported, without the seconds that torch and
transformers take: each is forked off one that has imported those alone."""

import gc
import multiprocessing
import os
import runpy
import socket
import sys
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

IMPORTED = [
    "transformers.generation.utils",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.trainer",
]


@cache
def server():
    """What starts the processes, and the folder in which they keep the code of a checkpoint.

    A process has one such server, whoever starts it first.
    """
    folder = TemporaryDirectory()
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    # To ask whether there is a GPU must not start CUDA, which does not outlive a fork.
    offline["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with patch.dict(os.environ, offline | {"HF_MODULES_CACHE": folder.name}):
        forkserver.ensure_running()
    return context, folder


def execute(script, words, streams, environment):
    """In the new process: a script as Python runs it, a file or lines of code."""
    for number, file in zip((1, 2), streams, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    gc.freeze()  # what was imported before is no garbage: a collection need not look at it
    os.environ.update(environment)
    assert not [name for name in sys.modules if name.partition(".")[0] == "stars_fast"]
    if isinstance(script, Path):
        sys.argv = [str(script), *words]
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
    else:
        sys.argv = ["-c", *words]
        exec(script, {"__name__": "__main__"})


def start(script, words, streams, **environment):
    context, _ = server()
    words = [str(word) for word in words]
    process = context.Process(target=execute, args=(script, words, streams, environment))
    process.start()
    return process


def run(*started):
    """What processes printed, after all of them ended well: (script, words, environment) each."""
    with TemporaryDirectory() as folder:
        files = [
            [Path(folder, f"{i}.{name}") for name in ("out", "err")] for i in range(len(started))
        ]
        processes = [
            start(script, words, streams, **environment)
            for (script, words, environment), streams in zip(started, files, strict=True)
        ]
        try:
            for process in processes:
                process.join(240)
            said = [[file.read_text() if file.exists() else "" for file in pair] for pair in files]
            codes = [process.exitcode for process in processes]
            assert codes == [0] * len(codes), "\n".join(err[-4000:] for _, err in said)
        finally:
            for process in processes:
                process.kill()
    return [out for out, _ in said]


def said(script, *words):
    """What a script prints in a process of its own."""
    return run((script, words, {}))[0]


def places(processes):
    """The environment of each process of one group, as torchrun sets it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def two_ranks(script, *words, **environment):
    """What a script prints in each of two processes of one group."""
    return run(*((script, words, place | environment) for place in places(2)))
