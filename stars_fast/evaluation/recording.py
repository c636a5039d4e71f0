"""Generations that are kept as they are made, so that none is made twice.

lm-eval's own cache keeps a response by its request, and its sample log is written at the end of a
task: neither holds what was measured beside a response (its tokens, whether the cap cut it, the
turns it took), which the report of a sweep that goes on needs too.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Journal:
    """The finished generations of one setting: one line of JSON each, appended and never changed.

    A line holds `prompt` (its SHA-256), `response`, and what was measured: `tokens` of the response
    without the token that stops it, `cut` (whether the cap ended it), and, where the model tells,
    `turns` (executed, summed over tokens) and `read` (tokens that were read: the prompt, and the
    response without its last).

    Args:
        folder: of the setting. What other processes wrote there is read too.
        rank: of this process, which writes a file of its own.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.path = folder / ("generations.jsonl" if not rank else f"generations.{rank}.jsonl")
        self.records: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for path in sorted(folder.glob("generations*.jsonl")):
            for record in _read(path, mend=path == self.path):
                self.records[record["prompt"]].append(record)

    def __len__(self) -> int:
        return sum(map(len, self.records.values()))

    def find(self, prompts: Sequence[str]) -> list[dict[str, Any] | None]:
        """The record of each prompt, or None if there is none yet. A prompt that comes again takes
        its next record."""
        seen: Counter[str] = Counter()
        found = []
        for key in map(_key, prompts):
            held = self.records.get(key, [])
            found.append(held[seen[key]] if seen[key] < len(held) else None)
            seen[key] += 1
        return found

    def add(self, prompt: str, response: str, measured: dict[str, Any]) -> None:
        """Keep a generation; it is with the operating system on return."""
        record = {"prompt": _key(prompt), "response": response, **measured}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.records[record["prompt"]].append(record)


class Recording:
    """For a class of lm-eval's models: what its `generate_until` makes goes to a journal, batch by
    batch, and what the journal holds is not made again."""

    journal: Journal | None = None
    cache_hook: Any

    @abstractmethod
    def measured(self, response: str) -> dict[str, Any]:
        """Measurements to note beside a response; called once for each, in the order in which
        they are made."""

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """As lm-eval's."""
        make: Any = super()
        if self.journal is None:
            return make.generate_until(requests, disable_tqdm)
        held = self.journal.find([request.args[0] for request in requests])
        missing = [request for request, record in zip(requests, held, strict=True) if not record]
        before, self.cache_hook = self.cache_hook, _Hook(self)
        try:
            made = iter(make.generate_until(missing, disable_tqdm) if missing else ())
        finally:
            self.cache_hook = before
        return [next(made) if record is None else record["response"] for record in held]


class _Hook:
    """lm-eval tells its cache of each response once the batch is done; this listens."""

    def __init__(self, model: Recording) -> None:
        self.model = model

    def add_partial(self, kind: str, arguments: Any, response: str) -> None:
        assert kind == "generate_until"
        assert self.model.journal is not None
        self.model.journal.add(arguments[0], response, self.model.measured(response))


def _key(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()


def _read(path: Path, mend: bool) -> list[dict[str, Any]]:
    """The whole lines of a file. With `mend`, what a process that died left of its last is cut
    off, so that the next line begins one."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if mend and len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return [record for line in whole.splitlines() if (record := _parsed(line)) is not None]


def _parsed(line: bytes) -> dict[str, Any] | None:
    """None for a line that a crash of the machine has damaged: its generation is made again."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "prompt" in record else None
