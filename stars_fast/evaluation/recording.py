"""Generations that are kept as they are made, so that none is made twice.

lm-eval's own cache keeps a response by its request, and its sample log is written at the end of a
task: neither holds what was measured beside a response (its tokens, whether the cap cut it, the
turns it took), which the report of a sweep that goes on needs too.
"""

from __future__ import annotations

import copy
import hashlib
import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stars_fast.base.errors import ConfigError


class Key(NamedTuple):
    """A generation of a setting.

    prompt: its SHA-256. doc: lm-eval's number of the document that asks. number: which of the
    generations for both, from 0.
    """

    prompt: str
    doc: int
    number: int

    @classmethod
    def of(cls, prompt: str, doc: int, number: int = 0) -> Key:
        """The key of a generation for the text of a prompt."""
        return cls(hashlib.sha256(prompt.encode()).hexdigest(), doc, number)

    @property
    def seed(self) -> int:
        """A seed for sampling it, the same on every machine and whatever else is generated."""
        return int.from_bytes(hashlib.sha256(repr(tuple(self)).encode()).digest()[:4], "big")


@dataclass(frozen=True)
class Sampling:
    """Several generations for a prompt, drawn from softmax(logits / temperature).

    count: generations. temperature: above 0.
    """

    count: int
    temperature: float


class Journal:
    """The finished generations of one setting: one line of JSON each, appended and never changed.

    A line holds the fields of its `Key`, `response`, and what was measured: `tokens` of the
    response without the token that stops it, `cut` (whether the cap ended it), `seconds` of its
    share of its batch, and, where the model tells, `turns` (executed, summed over tokens) and
    `read` (tokens that were read: the prompt, and the response without its last).

    Args:
        folder: of the setting. What other processes wrote there is read too.
        rank: of this process, which writes a file of its own.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.path = folder / ("generations.jsonl" if not rank else f"generations.{rank}.jsonl")
        self.records: dict[Key, dict[str, Any]] = {}
        for path in sorted(folder.glob("generations*.jsonl")):
            for record in _read(path, mend=path == self.path):
                self.records[Key(*(record[name] for name in Key._fields))] = record

    def __len__(self) -> int:
        return len(self.records)

    def find(self, key: Key) -> dict[str, Any] | None:
        """The record of a generation; None where there is none yet."""
        return self.records.get(key)

    def add(self, key: Key, response: str, measured: dict[str, Any]) -> None:
        """Keep a generation; it is with the operating system on return."""
        record = {**key._asdict(), "response": response, **measured}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.records[key] = record


class KeyedPrompt(str):
    """The text of a prompt, which lm-eval hands on as it is, with the key of its generation."""

    key: Key

    @classmethod
    def of(cls, text: str, key: Key) -> KeyedPrompt:
        """The text with a key."""
        prompt = cls(text)
        prompt.key = key
        return prompt


class Recording:
    """For a class of lm-eval's models: what its `generate_until` makes goes to a journal, batch by
    batch, and what the journal holds is not made again.

    Attributes:
        journal: of the setting; without one nothing is kept.
        sampling: of the setting; None for one greedy generation.
        sample: which of the generations of a prompt `generate_until` gives back. All of them are
            made in its first call.
    """

    journal: Journal | None = None
    sampling: Sampling | None = None
    sample: int = 0
    cache_hook: Any

    @abstractmethod
    def measured(self, response: str) -> dict[str, Any]:
        """Measurements to note beside a response; called once for each, in the order in which
        they are made."""

    def seeded(self, options: dict[str, Any], key: Key) -> dict[str, Any]:
        """The options of a request, with a seed where the model takes it from there."""
        return options

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """As lm-eval's."""
        make: Any = super()
        if self.journal is None:
            return make.generate_until(requests, disable_tqdm)
        count = 1 if self.sampling is None else self.sampling.count
        seen: Counter[tuple[str, int]] = Counter()
        wanted, missing = [], []
        for request in requests:
            prompt, doc = request.args[0], request.doc_id or 0
            first = count * seen[prompt, doc]
            seen[prompt, doc] += 1
            keys = [Key.of(prompt, doc, first + i) for i in range(count)]
            wanted.append(keys[self.sample])
            missing += [self._keyed(request, key) for key in keys if not self.journal.find(key)]
        before, self.cache_hook = self.cache_hook, _Hook(self)
        try:
            if missing:
                make.generate_until(missing, disable_tqdm)
        finally:
            self.cache_hook = before
        return [self.journal.records[key]["response"] for key in wanted]

    def _keyed(self, request: Any, key: Key) -> Any:
        """A request like another, for the generation of a key."""
        prompt, options = request.args
        keyed = copy.copy(request)
        keyed.arguments = (KeyedPrompt.of(prompt, key), self.seeded(options, key))
        return keyed


class _Hook:
    """lm-eval tells its cache of each response once the batch is done; this listens."""

    def __init__(self, model: Recording) -> None:
        self.model = model

    def add_partial(self, kind: str, arguments: Any, response: str) -> None:
        assert kind == "generate_until"
        assert self.model.journal is not None
        self.model.journal.add(arguments[0].key, response, self.model.measured(response))


def keys_of(prompts: Sequence[str]) -> list[Key | None]:
    """The keys of the prompts of a batch; None for those without."""
    return [getattr(prompt, "key", None) for prompt in prompts]


def check_room(tokens: int, room: int, length: int) -> None:
    """Raise ConfigError if the longest of some prompts would lose its beginning.

    Args:
        tokens: of the prompt. room: for it, of the `length` that a model has.
    """
    if tokens > room:
        raise ConfigError(
            f"--max-new-tokens must leave room for the prompts: one has {tokens} tokens, "
            f"and {room} of the model's {length} are left for it"
        )


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
    whole = isinstance(record, dict) and {*Key._fields, "response"} <= record.keys()
    return record if whole else None
