"""A folder has one owner: among threads of one process, processes, and machines that are told
apart by what their claims say."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from stars_fast.base import claim
from stars_fast.base.claim import Claim, newest_claim
from stars_fast.base.errors import ConfigError

HOLD = """
import sys, time
from pathlib import Path
from stars_fast.base.claim import Claim
from stars_fast.base.errors import ConfigError
while time.time() < float(sys.argv[2]): time.sleep(0.001)
try:
    Claim(Path(sys.argv[1]), print)
except ConfigError as error:
    print(error, flush=True)
else:
    print("mine", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(claim, "BEAT", 0.02)
    monkeypatch.setattr(claim, "LAPSE", 1.0)
    monkeypatch.setattr(claim, "_POLL", 0.01)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / "one"


def take(folder):
    told = []
    return Claim(folder, told.append), told


def claims(folder):
    return sorted(path.name for path in (folder / claim.FOLDER).iterdir())


def rewrite(held, **changes):
    """The claim as another owner would have written it."""
    path = held._path
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def left_by(folder, **changes):
    """A claim that an owner has left who beats no more."""
    held, _ = take(folder)
    held._stop.set()
    held._thread.join()
    rewrite(held, **changes)
    return held


def test_the_second_is_told_who_the_first_is(folder):
    first, _ = take(folder)
    with pytest.raises(
        ConfigError, match=f"{folder} belongs to process {os.getpid()} on .* since 20"
    ):
        take(folder)
    assert first.check()
    first.release()
    second, told = take(folder)
    assert claims(folder) == ["2"]
    assert not told
    second.release()
    assert claims(folder) == ["2.released"]


@pytest.mark.parametrize("link", ["runs", "runs/one"])
def test_a_link_to_a_folder_that_is_gone_is_named(tmp_path, folder, link):
    """As scratch space is once it has been swept."""
    (tmp_path / link).parent.mkdir(exist_ok=True)
    (tmp_path / link).symlink_to(tmp_path / "scratch")
    with pytest.raises(
        ConfigError, match=f"{tmp_path / link} is a link to {tmp_path / 'scratch'}, which is not"
    ):
        take(folder)
    (tmp_path / "scratch").mkdir()
    held, _ = take(folder)
    held.withdraw()
    assert not list((tmp_path / "scratch").iterdir())


def test_of_processes_that_start_together_one_has_it(folder):
    folder.mkdir(parents=True)
    start = str(time.time() + 2)
    command = [sys.executable, "-c", HOLD, str(folder), start]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    try:
        lines = [process.stdout.readline() for process in processes]
        assert sum(line == "mine\n" for line in lines) == 1
        owner = processes[lines.index("mine\n")]
        others = [line for line in lines if line != "mine\n"]
        assert all(f"belongs to process {owner.pid} on " in line for line in others)
        owner.kill()
        time.sleep(0.1)  # not waited for: a process that has ended and that nobody asked how
        began = time.monotonic()
        held, told = take(folder)
        assert time.monotonic() - began < 0.9  # not by waiting for a lapse
        assert not told
        held.release()
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.skipif(not claim._machine(), reason="no /proc")
def test_the_owner_is_not_a_later_process_with_its_number(folder):
    left_by(folder, pid=os.getpid(), started="1")
    held, told = take(folder)
    assert not told
    held.release()


def test_another_users_process_that_is_hidden_is_told_by_its_touches(folder, monkeypatch):
    held = left_by(folder, pid=2**22 + 1)
    held._owner = claim._read(held._path)
    held._stop.clear()
    held._thread = threading.Thread(target=held._beat, daemon=True)
    held._thread.start()
    monkeypatch.setattr(os, "kill", lambda pid, number: (_ for _ in ()).throw(PermissionError()))
    with pytest.raises(ConfigError, match="belongs to process 4194305"):
        take(folder)
    held.release()


@pytest.mark.parametrize("content", ["far", "empty"])
def test_an_owner_elsewhere_lives_while_it_touches_its_claim(folder, content):
    """Also one that has not come to say who it is, and one whose clock is two minutes late."""
    held = left_by(folder, machine="another", host="far", pid=1)
    if content == "empty":
        held._path.write_text("")
    stop = threading.Event()

    def touch():
        while not stop.wait(0.02):
            now = time.time() - 120
            os.utime(held._path, (now, now))

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        who = "process 1 on far" if content == "far" else "another process"
        with pytest.raises(ConfigError, match=f"belongs to {who}"):
            take(folder)
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("age", [-90, 0, 90, 7200])
def test_a_dead_owner_elsewhere_is_succeeded(folder, age):
    held = left_by(folder, machine="another", host="far", pid=1)
    now = time.time()
    os.utime(held._path, (now - age, now - age))
    began = time.monotonic()
    second, told = take(folder)
    assert (time.monotonic() - began > 0.5) == (age < 3600)
    assert second.check()
    if age > 3600:
        assert not told
    else:
        (line,) = told
        assert line.startswith(f"{folder} was claimed by process 1 on far since ")
    assert not held.check()
    assert held.successor.startswith(f"process {os.getpid()} on ")
    second.release()
    held.successor = None
    assert not held.check()  # also once that one has gone


def test_a_copy_of_the_folder_is_not_owned(folder, tmp_path):
    held, _ = take(folder)
    copy = tmp_path / "copy"
    (copy / claim.FOLDER).mkdir(parents=True)
    (copy / claim.FOLDER / "1").write_bytes(held._path.read_bytes())
    other, _ = take(copy)
    assert held.check()
    other.release()
    held.release()


def test_an_owner_that_beats_late_leaves_the_claim_of_its_successor_alone(folder):
    held, _ = take(folder)
    (folder / claim.FOLDER / "2").write_text("{}")
    before = os.stat(folder / claim.FOLDER / "1").st_mtime_ns
    held._thread.join(5)
    assert not held._thread.is_alive()
    assert os.stat(folder / claim.FOLDER / "1").st_mtime_ns - before < 1e9
    assert held.successor == "another process"


def test_one_that_comes_late_gives_way(folder, monkeypatch):
    """Between its look and its claim others have come and gone, and one has stayed."""
    first, _ = take(folder)
    first.release()
    place = folder / claim.FOLDER
    real, others = claim._write, []

    def late(path):
        monkeypatch.setattr(claim, "_write", real)
        for _ in range(2):
            if others:
                others[-1].release()
            others.append(Claim(folder, print))
        assert path.name == "2"
        assert newest_claim(place)[0] == 3
        return real(path)

    monkeypatch.setattr(claim, "_write", late)
    with pytest.raises(ConfigError, match="belongs to process"):
        take(folder)
    assert claims(folder) == ["3"]
    assert others[-1].check()
    others[-1].release()


def test_withdrawing_leaves_what_was_there(folder):
    held, _ = take(folder)
    held.withdraw()
    assert not folder.parent.exists()
    folder.mkdir(parents=True)
    (folder / "file").touch()
    held, _ = take(folder)
    held.withdraw()
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_giving_back_twice_takes_nothing_from_the_next(folder):
    held, _ = take(folder)
    held.withdraw()
    second, _ = take(folder)
    assert claims(folder) == ["1"]
    held.release()
    held.withdraw()
    assert claims(folder) == ["1"]
    assert second.check()
    second.release()


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/run can't be written to: Not a directory"):
        take(tmp_path / "file" / "run")
