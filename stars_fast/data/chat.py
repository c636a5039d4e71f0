"""Chats as tokens, and which of the tokens a model learns to say.

A conversation is rendered by the tokenizer's chat template and tokenised once, as a whole. The
targets follow from places in the rendered text: the assistant's content and the token that ends
its message, nothing else.

How the places are found: the conversation is rendered a second time with marks in the place of the
assistant's contents. The text between the marks is the template's; put together with the contents
it must be the first rendering, character by character. So no template is understood, and one that
changes what the assistant says (drops its thoughts, escapes it) is refused. Blanks around it may be
stripped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from stars_fast.base.checks import check_integer
from stars_fast.data.messages import NO_TEXT, Message, read_messages
from stars_fast.data.tiny_tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""First character and one past the last."""

MESSAGE_END = "<|im_end|>"
"""The token that ends a message of ChatML."""

SYSTEM_PROMPT = "You are a helpful assistant that can assist users with reasoning."


@dataclass
class ChatDataConfig:
    """Which conversations to train on.

    source: a hub id, a .parquet, .json, .jsonl, .csv or .tsv file, a glob or a folder of them, a
        folder written by save_to_disk, or tiny-chat for sums that the package makes.
    subset: the hub's name of a configuration.
    split: of the source; files have only train, a dataset saved without splits is taken whole.
    prompt: column of the user's text; together with answer.
    answer: column of the assistant's text.
    messages: column of lists of messages with role and content, or ShareGPT's from and value,
        instead of prompt and answer. By default the source must have one of messages, problem and
        solution, question and answer.
    system: message in front, where a conversation does not begin with one; none for none.
    samples: at most so many rows, a random subset; none for all.
    max_length: tokens of a sample, cut off on the right.
    packing: several samples in a row, each on its own.
    row_length: tokens of a row of packed samples; none for max_length.
    validation: rows held out.
    supervise: assistant (what it says and the end of its messages) or all (every token).
    workers: processes that tokenise; none for the number of cores.
    cache: folder for the tokens; by default $STARS_FAST_CACHE or ~/.cache/stars_fast.

    Raises:
        ValueError: it names the first field that is out of range.
    """

    source: str
    subset: str | None = None
    split: str = "train"
    prompt: str | None = None
    answer: str | None = None
    messages: str | None = None
    system: str | None = SYSTEM_PROMPT
    samples: int | None = None
    max_length: int = 2048
    packing: bool = True
    row_length: int | None = None
    validation: int = 0
    supervise: Literal["assistant", "all"] = "assistant"
    workers: int | None = None
    cache: str | None = None

    def __post_init__(self) -> None:
        for name in ("source", "split"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name}: expected text, got none")
        if (self.prompt is None) != (self.answer is None):
            raise ValueError(
                f"prompt and answer must come together, got {self.prompt!r} and {self.answer!r}"
            )
        if self.messages is not None and self.prompt is not None:
            raise ValueError(
                f"messages: expected none beside prompt and answer, got {self.messages!r}"
            )
        for name, low in (("max_length", 2), ("validation", 0)):
            check_integer(name, getattr(self, name), low)
        for name in ("samples", "workers"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        if self.row_length is not None and self.row_length < self.max_length:
            raise ValueError(
                f"row_length: expected at least max_length, {self.max_length}, or none, got "
                f"{self.row_length}"
            )
        if self.supervise not in ("assistant", "all"):
            raise ValueError(
                f"supervise: expected one of ('assistant', 'all'), got {self.supervise!r}"
            )


class EncodedChat(NamedTuple):
    """A conversation of S tokens."""

    tokens: np.ndarray
    """[S] int32."""
    targets: np.ndarray
    """[S] bool, True where the token is to be predicted from those before it; never the first."""
    truncated: bool
    """True if tokens were cut off on the right."""


class ChatEncoder:
    """Turns conversations into tokens and targets.

    Args:
        tokenizer: a fast one of transformers. Without a chat template of its own it gets ChatML.
        system: message in front of conversations that do not begin with a system message, or None.
        max_length: tokens kept, from the left.
        supervise: "assistant" or "all", as in `ChatDataConfig`.

    A token belongs to the assistant's content if all of it does: one that begins in the header
    and reaches into the content is no target, since a model that continues the header can't say it.
    Special tokens that a user spells out become special tokens, as the template renders them, but
    no targets.

    Raises:
        ValueError: a tokenizer that gives no character offsets, or that has no chat template and
            lacks the tokens of ChatML.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system: str | None = None,
        max_length: int = 2048,
        supervise: Literal["assistant", "all"] = "assistant",
    ) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                f"tokenizer: expected a fast one, for its character offsets, got "
                f"{type(tokenizer).__name__}"
            )
        self.tokenizer = tokenizer
        self.template = _template(tokenizer)
        self.system, self.max_length, self.supervise = system, max_length, supervise
        self.end_ids = end_ids(tokenizer)

    def encode(self, conversations: Iterable[Sequence[Message]]) -> list[EncodedChat]:
        """The chats of `conversations`, in their order.

        Raises:
            ValueError: a conversation says something outside its contents, the template refuses
                one, changes what the assistant says, or does not end its message with `<|im_end|>`
                or the tokenizer's end token.
        """
        chats = [self._with_system(_trainable(messages)) for messages in conversations]
        if not chats:
            return []
        texts = [self._render(messages) for messages in chats]
        encoded = self.tokenizer(
            texts,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            padding=False,
            truncation=False,
            verbose=False,
        )
        result = []
        for messages, text, ids, offsets in zip(
            chats, texts, encoded["input_ids"], encoded["offset_mapping"], strict=True
        ):
            tokens = np.array(ids, np.int32)
            if self.supervise == "all":
                targets = np.ones(len(tokens), bool)
            else:
                spans = self._content_spans(messages, text)
                targets = self._said(tokens, np.array(offsets, np.int64).reshape(-1, 2), spans)
            targets[:1] = False
            cut = slice(self.max_length)
            result.append(EncodedChat(tokens[cut], targets[cut], len(tokens) > self.max_length))
        return result

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        if self.system is None or (messages and messages[0]["role"] in ("system", "developer")):
            return list(messages)
        return [{"role": "system", "content": self.system}, *messages]

    def _render(self, messages: list[Message]) -> str:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                messages, chat_template=self.template, tokenize=False
            )
        except TemplateError as error:
            raise ValueError(
                f"the chat template refuses a conversation: {error}{_which(messages)}"
            ) from error
        assert isinstance(text, str)
        return text

    def _content_spans(self, messages: Sequence[Message], text: str) -> list[Span]:
        """Where in `text`, which is `messages` rendered, the assistant's contents are."""
        contents = [m["content"] for m in messages if m["role"] == "assistant"]
        sign = "\ufdd0"  # no character of any text, by the standard; longer if some has it
        while any(sign in message["content"] for message in messages):
            sign += "\ufdd0"
        marks = [f"{sign}{i}\ufdd1" for i in range(len(contents))]
        names = iter(marks)
        marked = [m | {"content": next(names)} if m["role"] == "assistant" else m for m in messages]
        rest, between = self._render(marked), []
        for mark in marks:
            before, _, rest = rest.partition(mark)
            between.append(before)
        for said in (contents, [content.strip() for content in contents]):
            parts = [part for pair in zip(between, said, strict=True) for part in pair]
            if "".join([*parts, rest]) == text:
                ends = np.cumsum([len(part) for part in parts]).reshape(-1, 2).tolist()
                return [(start, end) for start, end in ends]
        raise ValueError(
            f"the chat template changes what the assistant says, so that it can't be told from the "
            f"rest of the text{_which(messages)}"
        )

    def _said(self, tokens: np.ndarray, offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
        """The tokens within `spans` and the one that ends each message: [S] bool."""
        starts, ends = offsets.T
        said = np.zeros(len(tokens), bool)
        for start, end in spans:
            # Some tokenizers leave blanks out of the offsets: a token of blanks alone is then an
            # empty range at its end.
            said |= (starts >= start) & (ends > start) & (ends <= end)
            after = np.flatnonzero(ends > end)[:1].tolist()
            if not any(tokens[i] in self.end_ids for i in after):
                found = self.tokenizer.convert_ids_to_tokens(tokens[after].tolist())
                wanted = self.tokenizer.convert_ids_to_tokens(self.end_ids)
                raise ValueError(
                    f"the chat template must end what the assistant says with one of the tokens "
                    f"{wanted}, got {found}"
                )
            said[after] = True
        return said


def _trainable(messages: Sequence[Message]) -> list[Message]:
    """Refuse messages that say something outside their contents."""
    read = read_messages(messages, "conversations")
    if read.messages is None and read.reason != NO_TEXT:
        raise ValueError(f"conversations: expected text alone in a message, got {read.reason}")
    return read.messages or list(messages)


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.chat_template:
        template = tokenizer.get_chat_template()
        assert isinstance(template, str)
        return template
    if missing := sorted(set(SPECIAL_TOKENS[1:]) - set(tokenizer.get_vocab())):
        raise ValueError(
            f"tokenizer: expected a chat template, or the tokens of ChatML for the usual one; it "
            f"has no {missing}"
        )
    return CHAT_TEMPLATE


def end_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a message: ChatML's, where the vocabulary has it, and the tokenizer's own."""
    known = (tokenizer.get_vocab().get(MESSAGE_END), tokenizer.eos_token_id)
    return [i for i in dict.fromkeys(known) if i is not None]


def _which(messages: Sequence[Message]) -> str:
    first = next((m for m in messages if m["role"] != "system"), messages[0])
    return f" (the conversation that begins with {first['content'][:60]!r})"
