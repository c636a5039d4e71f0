"""Checksums of the files of a folder, in a file that `sha256sum -c` reads too.

SHA-256 is in Python's standard library, with the processor's own instructions for it where it has
them, and lets other threads work meanwhile.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from stars_fast.base.files import sync

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\n]+)")
_CHUNK = 1 << 20


def checksum(path: Path) -> str:
    """The SHA-256 of a file, in hex.

    Raises:
        OSError: it can't be read.
    """
    found, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            found.update(buffer[:size])
    return found.hexdigest()


def write_checksums(folder: Path, sums: Mapping[str, str]) -> None:
    """Write the checksums of files in `folder`, by name, and flush them to the disk."""
    lines = (f"{value}  {name}\n" for name, value in sorted(sums.items()))
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")
    sync(folder / SUMS)


def read_checksums(folder: Path) -> dict[str, str] | None:
    """The checksums by name; None if the folder has none.

    Raises:
        ValueError: the file of the checksums is damaged.
        OSError: it can't be read.
    """
    try:
        lines = (folder / SUMS).read_bytes().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return None
    found = [_LINE.fullmatch(line) for line in lines]
    if not all(found):
        raise ValueError(f"{SUMS} is damaged")
    return {match[2]: match[1] for match in found if match}
