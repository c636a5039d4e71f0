"""A real byte-level BPE, small, trained on chats about arithmetic: for tests and small recipes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stars_fast.base.checks import check_integer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Tokens 0, 1 and 2. The first is begin, end, pad and unknown; the last ends a ChatML message."""

SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256
"""The special tokens and one token a byte."""

TINY_VOCABULARY = 320
"""Tokens at most of the tokenizer of tiny models."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
"""ChatML."""


def train_tokenizer(vocab_size: int, texts: Iterable[str] | None = None) -> Tokenizer:
    """A byte-level BPE with the special tokens of Ouro, one token a digit, and no normalisation:
    any text comes back from its tokens.

    Args:
        vocab_size: at most so many tokens, at least 259.
        texts: to train on, without special tokens; chats about arithmetic by default.

    Raises:
        ValueError: `vocab_size` is too small.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    check_integer("vocab_size", vocab_size, SMALLEST_VOCABULARY)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_arithmetic() if texts is None else texts, trainer)
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json to `folder`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    end = SPECIAL_TOKENS[0]
    roles = {f"{role}_token": end for role in ("bos", "eos", "pad", "unk")}
    listed = {
        str(i): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for i, token in enumerate(SPECIAL_TOKENS)
    }
    settings = {
        # The class that takes tokenizer.json as it is; others bring their own splitting of text.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": listed,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", settings | roles)
    extra = {"additional_special_tokens": list(SPECIAL_TOKENS[1:])}
    write_json(folder / "special_tokens_map.json", extra | roles)


def _arithmetic() -> Iterator[str]:
    """Messages of chats, always the same, without the special tokens: those are never split."""
    asked = (
        ("What is {a} plus {b}?", "The sum of {a} and {b} is {plus}."),
        ("Add {b} to {a}.", "{a} + {b} = {plus}"),
        ("What is {a} times {b}?", "The product of {a} and {b} is {times}."),
        ("Multiply {a} by {b}.", "{a} * {b} = {times}"),
        (
            "There are {a} apples in a basket and {b} pears on the table. How many fruits is that?",
            "We count the apples first, then the pears: {a} + {b} = {plus}. The answer is {plus}.",
        ),
        (
            "Each of {a} boxes holds {b} pencils. How many pencils are in all boxes together?",
            "Every box adds {b} pencils: {a} * {b} = {times}. The answer is {times}.",
        ),
        (
            "Which number is larger, {a} or {b}? Think step by step.",
            "Comparing both numbers digit by digit shows which one is larger: {larger}.",
        ),
    )
    for i in range(70):
        a, b = 3 + i * 37 % 89, 2 + i * 53 % 97
        values = {"a": a, "b": b, "plus": a + b, "times": a * b, "larger": max(a, b)}
        question, answer = (text.format(**values) for text in asked[i % len(asked)])
        yield f"user\n{question}"
        yield f"assistant\n{answer}"


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
