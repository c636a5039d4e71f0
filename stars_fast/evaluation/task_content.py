"""The content of a task of lm-eval, wherever its files lie: results of other content are no results
of it."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

from stars_fast.evaluation.harness import prepare, seeded


@dataclass(frozen=True)
class Content:
    """Hashes, the same in every process.

    rows: of the documents that are asked, answers included.
    prompts: of their prompts, with examples, before a chat template, and of answers to choose from.
    code: of the Python files that its functions are in, and of those beside them where they are no
        package.
    """

    rows: str
    prompts: str
    code: str


def content_of(task: Any) -> Content:
    """The content of a loaded task. It is read from what lm-eval makes of the task's files, so that
    it does not matter in which way they are named: data files, includes, lists of examples,
    functions that read files of their own."""
    prepare(task)
    with seeded():
        task.build_all_requests()
        docs = list(task.eval_docs)
    asked = [
        [argument for argument in instance.args if isinstance(argument, str)]
        for instance in task.instances
    ]
    return Content(rows=_hash(docs), prompts=_hash(asked), code=_code(task))


def _hash(values: list[Any]) -> str:
    found = hashlib.sha256()
    for value in values:
        found.update(json.dumps(value, sort_keys=True, default=str).encode() + b"\n")
    return found.hexdigest()[:16]


def _code(task: Any) -> str:
    files = set()
    for function in [type(task), *_functions(vars(task.config))]:
        try:
            file = Path(inspect.getsourcefile(inspect.unwrap(function)) or "")
        except TypeError:  # of a built-in
            continue
        if file.is_file():
            package = (file.parent / "__init__.py").exists()
            files |= {file} if package else set(file.parent.glob("*.py"))
    return _hash([[file.name, file.read_text(encoding="utf-8")] for file in sorted(files)])


def _functions(held: Any) -> Iterator[Any]:
    """Functions and classes anywhere in the settings of a task."""
    if callable(held):
        yield held
        return
    if is_dataclass(held):
        held = vars(held)
    inside = held.values() if isinstance(held, dict) else held
    for each in inside if isinstance(held, (dict, list, tuple)) else ():
        yield from _functions(each)
