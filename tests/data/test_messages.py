import pytest
from chat_helpers import assistant, system, tokenizer_in, user

from stars_fast.data.chat import ChatEncoder
from stars_fast.data.messages import read_messages

CALL = [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]


def read(*messages):
    return read_messages(list(messages), "chat")


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([system("s"), user("a"), assistant("b")], [system("s"), user("a"), assistant("b")]),
        ([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
         [user("a"), assistant("b")]),
        ([{"role": "User", "content": "a"}, {"role": "Assistant", "content": "b"}],
         [user("a"), assistant("b")]),
        # Arrow fills what some messages lack with null
        ([{"role": "user", "content": "a", "from": None, "tool_calls": None, "weight": None}],
         [user("a")]),
        ([user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])], [user("ab")]),
        ([user("a"), {"role": "tool", "content": "1"}, assistant("b") | {"tool_calls": []}],
         [user("a"), {"role": "tool", "content": "1"}, assistant("b")]),
        ([user("a"), assistant("b") | {"function_call": {"name": None, "arguments": None},
                                       "images": [None], "audio": {"bytes": None, "path": ""}}],
         [user("a"), assistant("b")]),
        ([{"role": "critic", "content": "a"}], [{"role": "critic", "content": "a"}]),
        ([system(""), user("a"), assistant("b") | {"weight": 1}],
         [system(""), user("a"), assistant("b")]),
    ],
)  # fmt: skip
def test_messages_that_are_text(messages, expected):
    assert read(*messages) == (expected, "", frozenset())


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (assistant("") | {"tool_calls": CALL}, "tool_calls"),
        (assistant(None) | {"tool_calls": CALL}, "tool_calls"),
        ({"role": "assistant", "tool_calls": CALL}, "tool_calls"),
        (assistant("x") | {"function_call": {"name": "f", "arguments": ""}}, "function_call"),
        (assistant("x") | {"reasoning_content": "hm"}, "reasoning_content"),
        (assistant("x") | {"reasoning": "hm"}, "reasoning"),
        (assistant("x") | {"thinking": "hm"}, "thinking"),
        (assistant(None) | {"refusal": "no"}, "refusal"),
        (assistant(None) | {"audio": {"id": "1"}}, "audio"),
        (user("x") | {"images": ["a.png"]}, "images"),
        (user([{"type": "image", "image": "a.png"}]), "content of type image"),
        (user([{"type": "text", "text": "a"}, {"type": "image_url", "text": None}]),
         "content of type image_url"),
        (assistant([{"type": "thinking", "thinking": "hm"}]), "content of type thinking"),
        ({"from": "function_call", "value": "{}"}, "role function_call"),
        (assistant("x") | {"weight": 0}, "weight 0"),
        (assistant("x") | {"weight": 0.5}, "weight 0.5"),
        (assistant("x") | {"train": False}, "train False"),
        (assistant(""), "text"),
        (assistant(" \n"), "text"),
        (assistant(None), "text"),
        (user(""), "text"),
        ({"role": None, "content": "x"}, "text"),
    ],
)  # fmt: skip
def test_messages_that_would_be_trained_on_in_part(message, reason):
    assert read(user("q"), message, assistant("a")) == (None, reason, frozenset())


def test_a_reason_goes_before_a_lack_of_text():
    assert read(assistant(""), assistant("x") | {"thinking": "hm"}).reason == "thinking"


def test_keys_that_are_not_read_are_named():
    found = read(user("a") | {"name": "n", "id": 0, "empty": ""}, assistant("b") | {"toxic": True})
    assert found.messages == [user("a"), assistant("b")]
    assert found.unread == {"name", "id", "toxic"}


@pytest.mark.parametrize("value", [None, [], ()])
def test_no_messages(value):
    assert read_messages(value, "chat") == (None, "text", frozenset())


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "'chat': expected a list of messages with role and content, or from and value, "
                  "got hello"),
        (5, "expected a list of messages"),
        (["hello"], "expected a list of messages"),
        ([{"speaker": "human", "text": "x"}], "expected a list of messages"),
        ([user(5)], "content in 'chat': expected text, got 5"),
        ([user({"text": "a"})], "content in 'chat': expected text, got {'text': 'a'}"),
        ([user([1])], "content in 'chat': expected text or parts of type text, got"),
        ([user([{"type": "text", "text": 1}])], "expected text or parts of type text"),
        ([{"role": 1, "content": "x"}], "role in 'chat': expected text, got 1"),
    ],
)  # fmt: skip
def test_what_is_no_message(messages, message):
    with pytest.raises(ValueError, match=rf"data\.messages: .*{message}"):
        read_messages(messages, "chat")


def test_the_encoder_takes_text_alone(tmp_path):
    encoder = ChatEncoder(tokenizer_in(tmp_path / "t"))
    with pytest.raises(ValueError, match="expected text alone in a message, got tool_calls"):
        encoder.encode([[user("a"), assistant("") | {"tool_calls": CALL}]])
    plain, named = encoder.encode(
        [
            [user("a"), assistant("b")],
            [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
        ]
    )
    assert plain.tokens.tolist() == named.tokens.tolist()
    assert plain.targets.tolist() == named.targets.tolist()
