"""Messages of conversations as data sets write them, and which of them a chat can be trained on.

A chat is trained on what its messages say in `content`. A message that says something elsewhere (a
call of a tool, thoughts, an image) would be trained on without it, so that its conversation is left
out, for a reason with a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Message = dict[str, str]
"""{"role": ..., "content": ...}"""

ALIASES = {"human": "user", "gpt": "assistant"}
"""Roles of ShareGPT."""

NO_TEXT = "text"
"""Reason to leave out what is null or blank."""

_SPOKEN = (
    "tool_calls",
    "function_call",
    "reasoning_content",
    "reasoning",
    "thinking",
    "thought",
    "refusal",
    "audio",
    "images",
    "image",
    "videos",
)
"""Keys by which a message says something outside its content."""

_WEIGHTS = ("weight", "train", "trainable", "loss")
"""Keys that say how much a message counts in the loss; 1 or true as all do here."""

_CALLS = ("function_call", "tool_call")
"""Roles of what the assistant says to a tool."""

_KNOWN = ("role", "content", "from", "value")


class Conversation(NamedTuple):
    """A row of a data set, read.

    messages: none where it can't be trained on.
    reason: why it can't: `NO_TEXT`, or the name of what would go missing.
    unread: names of keys that nothing depends on.
    """

    messages: list[Message] | None
    reason: str = ""
    unread: frozenset[str] = frozenset()


def read_messages(value: Any, where: str) -> Conversation:
    """Read a list of messages with role and content, or ShareGPT's from and value.

    Args:
        value: of the row.
        where: its name in errors.

    Raises:
        ValueError: it is something else.
    """
    if value is None or (isinstance(value, Sequence) and not value):
        return Conversation(None, NO_TEXT)
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(_expected(where, value))
    messages, reasons = [], []
    unread: set[str] = set()
    for each in value:
        if not isinstance(each, Mapping):
            raise ValueError(_expected(where, value))
        message, reason = _read(each, where)
        messages.append(message)
        reasons.append(reason)
        given = {name for name, said in each.items() if said not in (None, "", [], {})}
        unread |= given - {*_KNOWN, *_SPOKEN, *_WEIGHTS}
    if found := [reason for reason in reasons if reason]:
        named = [reason for reason in found if reason != NO_TEXT]
        return Conversation(None, (named or found)[0])
    return Conversation(messages, unread=frozenset(unread))


def role_of(name: str) -> str:
    """A role by the name that templates know it by."""
    plain = name.strip().lower()
    return ALIASES.get(plain, plain)


def _read(message: Mapping[str, Any], where: str) -> tuple[Message, str]:
    """The message, and the reason why its conversation is left out, empty for none."""
    name, content = _either(message, "role", "from"), _either(message, "content", "value")
    if name is None and content is None and not {"role", "from"} & set(message):
        raise ValueError(_expected(where, [message]))
    if not isinstance(name, str | None):
        raise ValueError(f"data.messages: role in {where!r}: expected text, got {name!r:.200}")
    role = role_of(name or "")
    reason = ""
    if isinstance(content, Sequence) and not isinstance(content, str):
        content, reason = _joined(content, where)
    if not isinstance(content, str | None):
        raise ValueError(
            f"data.messages: content in {where!r}: expected text, got {content!r:.200}"
        )
    for key in _SPOKEN:
        if _says(message.get(key)):
            return {}, key
    for key in _WEIGHTS:
        if role == "assistant" and message.get(key) not in (None, 1, True):
            return {}, f"{key} {message[key]}"
    if role in _CALLS:
        return {}, f"role {role}"
    if reason:
        return {}, reason
    needed = role in ("user", "assistant")  # an empty one of the system is said by no one
    if not role or content is None or (needed and not content.strip()):
        return {}, NO_TEXT
    return {"role": role, "content": content}, ""


def _says(value: Any) -> bool:
    """Whether a value is more than nulls: columns of Parquet have all keys in all rows."""
    if isinstance(value, Mapping):
        return any(_says(each) for each in value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return any(_says(each) for each in value)
    return bool(value)


def _either(message: Mapping[str, Any], *names: str) -> Any:
    return next((message[name] for name in names if message.get(name) is not None), None)


def _joined(parts: Sequence[Any], where: str) -> tuple[str, str]:
    """The text of a content in parts, and the reason why it is not all text."""
    texts = []
    for part in parts:
        if isinstance(part, Mapping):
            kind = part.get("type") or "text"
            if kind != "text":
                return "", f"content of type {kind}"
            part = part.get("text")
        if not isinstance(part, str):
            raise ValueError(
                f"data.messages: content in {where!r}: expected text or parts of type text, got "
                f"{str(parts)[:200]}"
            )
        texts.append(part)
    return "".join(texts), ""


def _expected(where: str, value: Any) -> str:
    return (
        f"data.messages: {where!r}: expected a list of messages with role and content, or from and "
        f"value, got {str(value)[:200]}"
    )
