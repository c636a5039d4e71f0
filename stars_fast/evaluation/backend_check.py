"""Greedy generations of two backends, compared before results of both stand in one table."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stars_fast.evaluation.harness import prepare, seeded
from stars_fast.evaluation.recording import Journal
from stars_fast.evaluation.setting import Setting
from stars_fast.evaluation.sweep_options import SweepOptions

PROMPTS = 20
"""Prompts that both backends answer."""
TOKENS = 256
"""Tokens of an answer at most."""


@dataclass(frozen=True)
class Difference:
    """Two answers to a prompt, from the first token at which they part.

    prompt: its number. token: its place among the tokens of the answer. first, second: the text of
    that token, empty at an answer's end.
    """

    prompt: int
    token: int
    first: str
    second: str


@dataclass(frozen=True)
class Comparison:
    """backends: their names. prompts: that were compared. differences: one for each that
    differs."""

    backends: tuple[str, str]
    prompts: int
    differences: list[Difference]

    def __str__(self) -> str:
        one, other = self.backends
        if not self.differences:
            return f"{one} and {other} give the same greedy answers to {self.prompts} prompts"
        first = min(self.differences, key=lambda each: each.token)
        return (
            f"{one} and {other} differ in {len(self.differences)} of {self.prompts} greedy "
            f"answers, first at token {first.token} of prompt {first.prompt}: {first.first!r} "
            f"({one}) and {first.second!r} ({other}); their scores compare backends too"
        )


def compare_backends(one: Any, other: Any, setting: Setting, options: SweepOptions) -> Comparison:
    """Answer the first prompts of a setting by both backends, one after the other.

    Args:
        one, other: a `NativeModel` or `VllmModel` each, of the same model. The first is closed
            before the second is loaded.
        setting: it generates. Answers are greedy, whatever it says.
    """
    first = _answers(one.at(setting.turns, setting.tol), setting, options)
    one.close()
    second = _answers(other.at(setting.turns, setting.tol), setting, options)
    found = first_differences(first, second, one.tokenizer)
    return Comparison((one.backend, other.backend), len(first), found)


def _answers(model: Any, setting: Setting, options: SweepOptions) -> list[str]:
    """Greedy answers of a model of lm-eval to the first prompts."""
    task = setting.task.task
    prepare(task)
    with seeded():
        task.build_all_requests(
            limit=min(PROMPTS, options.limit or PROMPTS),
            apply_chat_template=options.chat,
            fewshot_as_multiturn=options.chat,
            chat_template=model.apply_chat_template if options.chat else None,
            system_instruction=options.system,
        )
    requests = task.instances
    for request in requests:
        prompt, given = request.args
        until, cap = given.get("until", []), min(options.cap, TOKENS)
        request.arguments = (prompt, {"until": until, "do_sample": False, "max_gen_toks": cap})
    with tempfile.TemporaryDirectory() as folder:  # for the checks that a journal brings
        model.journal, model.sampling, model.sample = Journal(Path(folder)), None, 0
        return model.generate_until(requests, disable_tqdm=True)


def first_differences(
    first: Sequence[str], second: Sequence[str], tokenizer: Any
) -> list[Difference]:
    """Where answers to the same prompts part, in the tokens of one tokenizer."""
    found = []
    for prompt, pair in enumerate(zip(first, second, strict=True)):
        if pair[0] == pair[1]:
            continue
        ids = [tokenizer(text, add_special_tokens=False).input_ids for text in pair]
        place = next(
            (i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b),
            min(map(len, ids)),
        )
        texts = (tokenizer.decode(each[place : place + 1]) for each in ids)
        found.append(Difference(prompt, place, *texts))
    return found
