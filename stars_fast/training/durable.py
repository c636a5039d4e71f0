"""Files that are there whole or not at all, whenever the process dies."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Flush a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, under another name first."""
    temporary = path.with_name(f"{path.name}.writing")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    temporary.replace(path)
