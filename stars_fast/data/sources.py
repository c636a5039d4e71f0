"""Where chats come from: anything that `datasets` reads, and sums that the package makes."""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stars_fast.base.files import check_utf8
from stars_fast.base.optional import need
from stars_fast.data.chat import ChatDataConfig
from stars_fast.data.messages import NO_TEXT, Conversation, read_messages
from stars_fast.data.tiny_chat import DEFAULT_ROWS, tiny_chats

if TYPE_CHECKING:
    from datasets import Dataset

TINY_CHAT = "tiny-chat"

COLUMNS = (("messages",), ("problem", "solution"), ("question", "answer"))
"""Columns that are taken where the configuration names none."""

SHAREGPT = ("conversations",)
"""The same of ShareGPT, where there are none of those."""

READERS = {
    ".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv",
}  # fmt: skip
"""How files are read, by their suffix."""

_TABLES = {".csv": ",", ".tsv": "\t"}
"""The sign between the cells of a table, by its suffix."""

_TEXTS = (".json", ".jsonl", *_TABLES)


class Source(NamedTuple):
    """Rows that can be loaded, and what tells them from others."""

    identity: list[Any]
    """Plain values, equal for equal rows. Of files: their paths, sizes and times of change."""
    load: Callable[[], Dataset]
    """Raise ValueError that names `data.source` for rows that can't be loaded."""


def find_source(config: ChatDataConfig, seed: int) -> Source:
    """The rows of `config`. Those of the hub are loaded here, others only by `Source.load`.

    `seed` is that of the chats of tiny-chat.

    Raises:
        ValueError: it names the field for a source that does not exist or can't be loaded.
    """
    if config.source == TINY_CHAT:
        return _made(config, seed)
    path = Path(config.source).expanduser()
    if path.exists():
        return _folder(path, config) if path.is_dir() else _files([path], config)
    if any(sign in config.source for sign in "*?["):
        found = sorted(map(Path, glob.glob(str(path), recursive=True)))
        if not found:
            raise ValueError(f"data.source: no file fits {config.source!r}")
        return _files(found, config)
    if path.suffix in READERS or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", config.source):
        raise ValueError(
            f"data.source: expected a hub id, an existing file or folder, or {TINY_CHAT}, got "
            f"{config.source!r}"
        )
    rows = _load(config, config.source, config.subset)
    return Source(["hub", config.source, rows._fingerprint], lambda: rows)


def find_columns(config: ChatDataConfig, rows: Dataset) -> tuple[str, ...]:
    """The column of messages, or those of prompt and answer.

    Raises:
        ValueError: it names the field and lists the columns: a column that is not there or holds no
            text, or none named and none or several of `COLUMNS` there.
    """
    names = rows.column_names
    if config.messages is not None:
        given = {"messages": config.messages}
    elif config.prompt is not None and config.answer is not None:
        given = {"prompt": config.prompt, "answer": config.answer}
    else:
        fitting = [columns for columns in COLUMNS if set(columns) <= set(names)]
        if not fitting and set(SHAREGPT) <= set(names):
            fitting = [SHAREGPT]
        if len(fitting) != 1:
            raise ValueError(
                f"data.source: expected one of the columns {_listed((*COLUMNS, SHAREGPT))}, or "
                f"name its own with data.messages, or data.prompt and data.answer; it has "
                f"{_listed(fitting) if fitting else 'none of them'} among {names}"
            )
        fields = ("prompt", "answer") if len(fitting[0]) == 2 else ("messages",)
        given = dict(zip(fields, fitting[0], strict=True))
    for field, name in given.items():
        if name not in names:
            raise ValueError(f"data.{field}: expected one of the columns {names}, got {name!r}")
        kind = rows.features[name]
        if field != "messages" and getattr(kind, "dtype", "") not in ("string", "large_string"):
            raise ValueError(f"data.{field}: expected a column of text, got {name!r} of {kind}")
    return tuple(given.values())


class Usable(NamedTuple):
    """Rows of a source that have a conversation to train on, and why the others have none."""

    rows: np.ndarray
    """Indices [N] int64, ascending."""
    dropped: dict[str, int]
    """Number of the other rows, by `Conversation.reason`."""
    unread: list[str]
    """Keys of messages that nothing depends on."""


def conversation(row: Mapping[str, Any], columns: Sequence[str]) -> Conversation:
    """The conversation of `row`: a list of messages, or a prompt and an answer.

    Raises:
        ValueError: as `read_messages`.
    """
    if len(columns) == 1:
        return read_messages(row[columns[0]], columns[0])
    texts = [row[column] for column in columns]
    if not all(text and text.strip() for text in texts):
        return Conversation(None, NO_TEXT)
    roles = zip(("user", "assistant"), texts, strict=True)
    return Conversation([{"role": role, "content": text} for role, text in roles])


def conversations(
    batch: Mapping[str, Sequence[Any]], columns: Sequence[str]
) -> Iterable[Conversation]:
    """`conversation` of each row of a batch, which maps columns to lists."""
    for values in zip(*(batch[column] for column in columns), strict=True):
        yield conversation(dict(zip(columns, values, strict=True)), columns)


def usable_rows(rows: Dataset, columns: Sequence[str]) -> Usable:
    """Find the rows that have a conversation to train on."""
    found, dropped, unread = [], Counter[str](), set[str]()
    batches = rows.select_columns(list(columns)).iter(batch_size=1000)
    for index, chat in enumerate(
        each for batch in batches for each in conversations(batch, columns)
    ):
        if chat.messages is None:
            dropped[chat.reason] += 1
        else:
            found.append(index)
            unread |= chat.unread
    return Usable(np.array(found, np.int64), dict(dropped.most_common()), sorted(unread))


def _made(config: ChatDataConfig, seed: int) -> Source:
    count = DEFAULT_ROWS if config.samples is None else config.samples + config.validation
    chats = list(tiny_chats(count, seed))
    content = hashlib.sha256(json.dumps(chats).encode()).hexdigest()
    return Source([TINY_CHAT, content], lambda: _datasets().Dataset.from_list(chats))


def _files(paths: Sequence[Path], config: ChatDataConfig) -> Source:
    kinds = {path.suffix for path in paths}
    readers = {READERS.get(kind) for kind in kinds}
    if None in readers or len(readers) > 1 or set(_TABLES) <= kinds:
        raise ValueError(
            f"data.source: expected files of one kind among {', '.join(READERS)}, got "
            f"{', '.join(map(str, paths[:10]))}"
        )
    _no_subset(config)
    files = [glob.escape(str(path.resolve())) for path in paths]  # datasets takes patterns
    reader = str(readers.pop())
    return Source(
        ["files", *map(_stamp, paths)],
        lambda: _load(config, reader, None, paths, data_files=files),
    )


def _of_tables(paths: Sequence[Path]) -> dict[str, Any]:
    """How `datasets` reads tables of one kind with all cells as text: an answer 007 or NA stays
    what it is.

    Raises:
        ValueError: a table has no names of columns, or its first row more cells than them, which
            pandas would take for names of rows and move all others.
    """
    datasets, pandas = _datasets(), need("pandas", "tables")
    sep = _TABLES[paths[0].suffix]
    for path in paths:
        try:
            pandas.read_csv(path, sep=sep, header=None, nrows=2, dtype=str)
        except (OSError, ValueError) as error:
            raise ValueError(f"data.source: can't read {path}: {str(error).strip()}") from error
    names = pandas.read_csv(paths[0], sep=sep, nrows=0).columns  # a name for those without one
    columns = datasets.Features({name: datasets.Value("string") for name in names})
    return {"features": columns, "sep": sep, "keep_default_na": False}


def _folder(path: Path, config: ChatDataConfig) -> Source:
    identity = ["folder", *(_stamp(file) for file in sorted(path.rglob("*")) if file.is_file())]
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        _no_subset(config)
        return Source(identity, lambda: _saved(path, config))
    files = [file for file in sorted(path.rglob("*")) if file.suffix in READERS and file.is_file()]
    return Source(identity, lambda: _load(config, str(path), config.subset, files))


def _saved(path: Path, config: ChatDataConfig) -> Dataset:
    datasets = _datasets()
    try:
        saved = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"data.source: can't load {config.source}: {error}") from error
    if isinstance(saved, datasets.Dataset):
        return saved
    if config.split not in saved:
        raise ValueError(f"data.split: expected one of {sorted(saved)}, got {config.split!r}")
    return saved[config.split]


def _load(
    config: ChatDataConfig, path: str, subset: str | None, paths: Sequence[Path] = (), **files: Any
) -> Dataset:
    """`paths`: files that are read. `datasets` takes what is not UTF-8 in them, and names no file
    when it can't read it later."""
    for file in paths:
        if file.suffix in _TEXTS:
            try:
                check_utf8(file)
            except ValueError as error:
                raise ValueError(f"data.source: {error}") from error
    datasets = _datasets()
    if len(kinds := {file.suffix for file in paths}) == 1 and kinds <= set(_TABLES):
        files |= _of_tables(paths)
    try:
        return datasets.load_dataset(path, subset, split=config.split, **files)
    except StopIteration as error:  # a file without a byte
        raise ValueError(f"data.source: {config.source} is empty") from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        if unlike := _unlike(paths):
            raise ValueError(f"data.source: {unlike}") from error
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        raise ValueError(
            f"data.source: can't load {config.source} (subset {config.subset}, split "
            f"{config.split}): {error}{cause}"
        ) from error


def _unlike(paths: Sequence[Path]) -> str | None:
    """The first two files with different columns, in words; None if there are none."""
    first: list[str] = []
    for path in paths:
        try:
            columns = _columns_of(path)
        except (OSError, ValueError, AttributeError, IndexError):
            return None  # it can't be read, or its rows have no names
        first = first or columns
        if set(columns) != set(first):
            return (
                f"expected files with the same columns, got {', '.join(first)} in {paths[0]} and "
                f"{', '.join(columns)} in {path}"
            )
    return None


def _columns_of(path: Path) -> list[str]:
    """The columns of a file, of JSON those of its first row."""
    if path.suffix in _TABLES:
        return list(need("pandas", "tables").read_csv(path, sep=_TABLES[path.suffix], nrows=0))
    if path.suffix == ".parquet":
        return need("pyarrow.parquet", "tables").read_schema(path).names
    with path.open(encoding="utf-8") as file:
        line = next((line for line in file if line.strip()), "")
    if line.lstrip().startswith("["):  # all rows in one list
        return list(json.loads(path.read_text(encoding="utf-8"))[0].keys())
    return list(json.loads(line).keys())


def _no_subset(config: ChatDataConfig) -> None:
    if config.subset is not None:
        raise ValueError(f"data.subset: expected none for files, got {config.subset!r}")


def _stamp(path: Path) -> list[Any]:
    facts = path.stat()
    return [str(path.resolve()), facts.st_size, facts.st_mtime_ns]


def _listed(groups: Iterable[Sequence[str]]) -> str:
    return ", ".join(" and ".join(columns) for columns in groups)


def _datasets() -> Any:
    return need("datasets", "chats")
