"""Reading the files of a model by other libraries, whose errors then name the model in a line."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stars_fast.base.errors import ConfigError
from stars_fast.models.folders import has_tokenizer, not_loaded


@contextmanager
def reading(path: str | Path, prefix: str = "") -> Iterator[None]:
    """Turn errors of a checkpoint that is missing, damaged or unfit into one that names it.

    Args:
        path: folder or hub id.
        prefix: of the message, such as the field that the path comes from.

    Raises:
        ConfigError: for them.
    """
    from safetensors import SafetensorError

    begin = f"{prefix}: " if prefix else ""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{begin}{error}") from error
    except (SafetensorError, pickle.UnpicklingError, EOFError) as error:
        file, why = _damaged(Path(path).expanduser(), error)
        raise ConfigError(
            f"{begin}{file}: the weights can't be read, the file is damaged or cut short ({why}): "
            "copy or download it again"
        ) from error
    except OSError as error:
        raise ConfigError(f"{begin}{not_loaded(path, error)}") from error
    except (ImportError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())
        named = said if str(path) in said else f"{path}: {said}"
        raise ConfigError(f"{begin}{named}") from error


def read_tokenizer(path: str | Path) -> Any:
    """The tokenizer, of transformers, of a folder or of the hub.

    Raises:
        ValueError: there is none, or its files can't be read.
    """
    from transformers import AutoTokenizer

    folder = Path(path).expanduser()
    if folder.is_dir() and not has_tokenizer(folder):
        raise ValueError(
            f"{path} has no tokenizer: expected tokenizer.json and tokenizer_config.json in it"
        )
    try:
        # Without a word on it a folder with `auto_map` makes transformers ask on the terminal.
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises Exception itself
        why = str(error).strip().split("\n")[0]
        if folder.is_dir() and not (folder / "tokenizer.json").exists():
            why = "tokenizer.json is missing"
        raise ValueError(f"{path}: can't load its tokenizer: {why}") from error


def _damaged(folder: Path, error: Exception) -> tuple[Path, str]:
    """The file of weights that can't be read, or else the folder, and why."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except (OSError, SafetensorError) as damage:
            return file, str(damage)
    others = sorted(folder.glob("*.bin"))
    return (others[0] if len(others) == 1 else folder), str(error).split(".")[0]
