import json
import re

import numpy as np
import pytest
from chat_helpers import CHATML_MARKED, assistant, system, tokenizer_in, user
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from stars_fast.data.chat import SYSTEM_PROMPT, ChatDataConfig, ChatEncoder

END = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_in(tmp_path_factory.mktemp("chat") / "tokenizer")


@pytest.fixture
def with_template(tokenizer, tmp_path):
    """A copy of the tokenizer with another chat template."""

    def make(template, **tokens):
        tokenizer.save_pretrained(tmp_path)
        copy = AutoTokenizer.from_pretrained(tmp_path, **tokens)
        copy.chat_template = template
        return copy

    return make


def encode(tokenizer, messages, **settings):
    (chat,) = ChatEncoder(tokenizer, **settings).encode([messages])
    return chat


def said(tokenizer, chat):
    """The runs of targets as text."""
    edges = np.flatnonzero(np.diff([False, *chat.targets, False]))
    return [tokenizer.decode(chat.tokens[a:b]) for a, b in edges.reshape(-1, 2)]


# fmt: off
GOLDEN = {
    "pieces": [
        "<|im_start|>", "s", "y", "s", "t", "e", "m", "Ċ", "H", "i", ".", "<|im_end|>", "Ċ",
        "<|im_start|>", "user", "Ċ", "A", "dd", "Ġ", "2", "Ġt", "o", "Ġ", "3", ".",
        "<|im_end|>", "Ċ",
        "<|im_start|>", "assistant", "Ċ", "3", "Ġ", "+", "Ġ", "2", "Ġ=", "Ġ", "5",
        "<|im_end|>", "Ċ",
    ],
    "tokens": [
        1, 85, 91, 85, 86, 71, 79, 201, 42, 75, 16, 2, 201,
        1, 273, 201, 35, 306, 223, 20, 262, 81, 223, 21, 16, 2, 201,
        1, 275, 201, 21, 223, 13, 223, 20, 283, 223, 23, 2, 201,
    ],
    "targets": [
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0,
    ],
}
# fmt: on


def test_golden(tokenizer):
    chat = encode(tokenizer, [user("Add 2 to 3."), assistant("3 + 2 = 5")], system="Hi.")
    assert tokenizer.convert_ids_to_tokens(chat.tokens.tolist()) == GOLDEN["pieces"]
    assert chat.tokens.tolist() == GOLDEN["tokens"]
    assert chat.targets.astype(int).tolist() == GOLDEN["targets"]
    assert said(tokenizer, chat) == ["3 + 2 = 5" + END]
    assert (chat.tokens.dtype, chat.targets.dtype, chat.truncated) == (np.int32, np.bool_, False)


def test_golden_of_two_answers(tokenizer):
    messages = [user("1"), assistant("a"), user("2"), assistant("")]
    chat = encode(tokenizer, messages)
    ids = tokenizer.get_vocab()
    end, start, line = ids[END], ids["<|im_start|>"], ids["Ċ"]
    ask = [start, ids["user"], line]
    answer = [start, ids["assistant"], line]
    expected = [*ask, ids["1"], end, line, *answer, ids["a"], end, line]
    expected += [*ask, ids["2"], end, line, *answer, end, line]
    assert chat.tokens.tolist() == expected
    assert np.flatnonzero(chat.targets).tolist() == [9, 10, 21]
    assert said(tokenizer, chat) == ["a" + END, END]


text = st.text(max_size=20) | st.sampled_from(
    [
        "\n",
        " ",
        "\n a \n",
        "é",
        "日本",
        "👩‍👧",
        "e\u0301",
        END,
        "<|im_start|>assistant\n",
        "\ufdd0",
        "\ufdd00\ufdd1",
    ]
)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(text, text), min_size=1, max_size=3), st.booleans())
def test_what_is_learned_is_what_the_assistant_says(tokenizer, turns, with_system):
    messages = [m for ask, answer in turns for m in (user(ask), assistant(answer))]
    chat = encode(tokenizer, messages, system=SYSTEM_PROMPT if with_system else None)
    rendered = tokenizer.apply_chat_template(
        ([system(SYSTEM_PROMPT)] if with_system else []) + messages, tokenize=False
    )
    whole = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert chat.tokens.tolist() == whole
    assert said(tokenizer, chat) == [answer + END for _, answer in turns]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(text, text), min_size=1, max_size=3))
def test_targets_are_those_of_a_template_with_generation_marks(tokenizer, turns):
    messages = [m for ask, answer in turns for m in (user(ask), assistant(answer))]
    theirs = tokenizer.apply_chat_template(
        messages,
        chat_template=CHATML_MARKED,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    chat = encode(tokenizer, messages)
    assert chat.tokens.tolist() == theirs["input_ids"]
    assert chat.targets.astype(int).tolist() == theirs["assistant_masks"]


def test_special_tokens_that_a_user_spells_are_no_targets(tokenizer):
    fake = f"1{END}\n<|im_start|>assistant\nfake{END}\n<|im_start|>user\nand"
    chat = encode(tokenizer, [system(fake), user(fake), assistant("true")])
    assert said(tokenizer, chat) == ["true" + END]


def test_system_message(tokenizer):
    default = ChatDataConfig("x").system
    assert default == "You are a helpful assistant that can assist users with reasoning."
    messages = [user("a"), assistant("b")]
    own = [system("mine"), *messages]
    assert tokenizer.decode(encode(tokenizer, messages, system=default).tokens).startswith(
        f"<|im_start|>system\n{default}{END}\n<|im_start|>user\na"
    )
    kept = encode(tokenizer, own, system=default)
    assert kept.tokens.tolist() == encode(tokenizer, own).tokens.tolist()
    assert said(tokenizer, kept) == ["b" + END]


def test_truncation_at_every_length(tokenizer):
    messages = [user("What is 3 plus 4?"), assistant("7"), user("é"), assistant("so\nbe it")]
    whole = encode(tokenizer, messages)
    first = int(np.flatnonzero(whole.targets)[0])
    for length in range(2, len(whole.tokens) + 2):
        chat = encode(tokenizer, messages, max_length=length)
        assert chat.tokens.tolist() == whole.tokens[:length].tolist()
        assert chat.targets.tolist() == whole.targets[:length].tolist()
        assert chat.truncated == (length < len(whole.tokens))
        assert chat.targets.any() == (length > first)


@pytest.mark.parametrize("shared", [END, "<|endoftext|>"])
def test_targets_do_not_depend_on_the_pad_token(tokenizer, with_template, shared):
    messages = [user("a<|endoftext|>"), assistant("b<|endoftext|>c")]
    other = with_template(tokenizer.chat_template, eos_token=shared, pad_token=shared)
    assert other.pad_token_id == other.eos_token_id == tokenizer.get_vocab()[shared]
    chat = encode(other, messages)
    assert said(other, chat) == ["b<|endoftext|>c" + END]
    assert chat.targets.tolist() == encode(tokenizer, messages).targets.tolist()


def test_all_tokens_but_the_first(tokenizer):
    chat = encode(tokenizer, [user("a"), assistant("b")], supervise="all")
    assert chat.targets.tolist() == [False] + [True] * (len(chat.tokens) - 1)


def test_first_token_is_no_target(with_template):
    bare = with_template("{{- messages[-1]['content'] + '<|im_end|>' -}}")
    chat = encode(bare, [user("?"), assistant("12")])
    assert bare.decode(chat.tokens) == "12" + END
    assert chat.targets.tolist() == [False, True, True]
    assert not encode(bare, [user("?"), assistant("")]).targets.any()


HEADER = "{%- for m in messages -%}{{- '<|im_start|>' + m['role'] + '\\n' -}}"
ROLE_COLON = (
    "{%- for m in messages -%}{{- m['role'] + ': ' + m['content'] + eos_token -}}{%- endfor -%}"
)
FOOTER = "{{- '<|im_end|>\\n' -}}{%- endfor -%}"


def test_template_that_strips(with_template):
    stripping = with_template(HEADER + "{{- m['content'] | trim -}}" + FOOTER)
    chat = encode(stripping, [user(" a "), assistant("\n b c\n\n")])
    assert said(stripping, chat) == ["b c" + END]
    assert stripping.decode(chat.tokens).endswith("assistant\nb c" + END + "\n")


def test_text_that_a_template_adds_is_no_target(with_template):
    thinking = with_template(
        HEADER + "{%- if m['role'] == 'assistant' and '</think>' not in m['content'] -%}"
        "{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}{{- m['content'] -}}" + FOOTER
    )
    chat = encode(thinking, [user("a"), assistant("b"), user("c"), assistant("d")])
    assert said(thinking, chat) == ["b" + END, "d" + END]
    with pytest.raises(ValueError, match="changes what the assistant says"):
        encode(thinking, [user("a"), assistant("<think>x</think>b")])


def test_template_may_end_messages_with_the_end_token(with_template):
    plain = with_template(ROLE_COLON)
    chat = encode(plain, [user("a"), assistant("3 + 4")])
    assert plain.decode(chat.tokens) == "user: a<|endoftext|>assistant: 3 + 4<|endoftext|>"
    assert said(plain, chat) == ["3 + 4<|endoftext|>"]
    # The header's blank and the first letter are one token here: no target.
    assert said(plain, encode(plain, [user("a"), assistant("to")])) == ["o<|endoftext|>"]


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ("{{- m['content'].split('</think>')[-1] -}}", "<think>hm</think>b"),
        ("{{- m['content'] | upper -}}", "b"),
        ("{{- m['content'] + m['content'] -}}", "b"),
        ("{{- m['content'] | tojson -}}", 'b"'),
        ("{{- m['content'][:3] -}}", "bbbb"),
        ("", "b"),
    ],
)
def test_template_that_changes_the_content(with_template, content, answer):
    changing = with_template(HEADER + content + FOOTER)
    with pytest.raises(ValueError, match=r"changes what the assistant says.*begins with 'hello'"):
        encode(changing, [user("hello"), assistant(answer)])


def test_template_that_changes_the_order(with_template):
    reverse = with_template(
        HEADER.replace("messages", "messages[::-1]") + "{{- m['content'] -}}" + FOOTER
    )
    with pytest.raises(ValueError, match="changes what the assistant says"):
        encode(reverse, [user("a"), assistant("b"), user("c"), assistant("d")])


@pytest.mark.parametrize(
    ("footer", "got"),
    [("", r"\[\]"), ("{{- '\\n<|im_end|>' -}}", "Ċ"), ("{{- '<|im_start|>' -}}", "im_start")],
)
def test_template_without_end_of_message(with_template, footer, got):
    endless = with_template(HEADER + "{{- m['content'] -}}" + footer + "{%- endfor -%}")
    with pytest.raises(ValueError, match=rf"must end .* one of the tokens .*im_end.*, got .*{got}"):
        encode(endless, [user("a"), assistant("b")])


def test_template_that_refuses(with_template):
    strict = with_template("{{- raise_exception('no system role') -}}")
    with pytest.raises(
        ValueError, match=r"refuses a conversation: no system role.*begins with 'q'"
    ):
        encode(strict, [user("q"), assistant("b")], system="s")


def test_token_across_the_border_of_header_and_content(tmp_path):
    merging = tokenizer_in(tmp_path / "t", 300, ["assistant\n\n\nyes\n\n"] * 50)
    chat = encode(merging, [user("a"), assistant("\n\nyes")])
    pieces = merging.convert_ids_to_tokens(chat.tokens.tolist())
    assert pieces[-6:] == ["assistant", "ĊĊ", "Ċ", "yes", END, "Ċ"]
    assert chat.targets[-6:].tolist() == [False, False, True, True, True, False]


def with_post_processor(tokenizer, folder, **changes):
    """A copy of the tokenizer with another post-processor, written to `folder`."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["post_processor"] |= changes
    path.write_text(json.dumps(content))
    return AutoTokenizer.from_pretrained(folder)


def test_offsets_that_leave_blanks_out(tokenizer, tmp_path):
    """GPT-2's setting: " a" has the offsets of "a", a token of blanks none."""
    trimming = with_post_processor(tokenizer, tmp_path, trim_offsets=True)
    for answer in ("a", " a", "  a  b  ", " ", "   ", "\n a", "é "):
        messages = [user(" q "), assistant(answer), user("  "), assistant(answer)]
        chat = encode(trimming, messages)
        assert chat.tokens.tolist() == encode(tokenizer, messages).tokens.tolist()
        assert said(trimming, chat) == [answer + END] * 2
    trimming.chat_template = ROLE_COLON
    chat = encode(trimming, [user("a"), assistant("3 + 4")])
    assert said(trimming, chat) == ["3 + 4<|endoftext|>"]


def test_a_tokenizer_adds_no_tokens_of_its_own(tokenizer, tmp_path):
    first = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    token = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    greeting = with_post_processor(
        tokenizer,
        tmp_path,
        type="TemplateProcessing",
        single=[first, text],
        pair=[first, text, {"Sequence": {"id": "B", "type_id": 1}}],
        special_tokens={"<|endoftext|>": token},
    )
    assert greeting("a")["input_ids"][0] == 0
    messages = [user("a"), assistant("b")]
    chat = encode(greeting, messages)
    assert chat.tokens.tolist() == encode(tokenizer, messages).tokens.tolist()
    assert said(greeting, chat) == ["b" + END]


def test_without_template_the_chat_is_chatml(tokenizer, with_template):
    messages = [user("a"), assistant("b")]
    bare = encode(with_template(None), messages)
    assert bare.tokens.tolist() == encode(tokenizer, messages).tokens.tolist()
    assert said(tokenizer, bare) == ["b" + END]


def test_tokenizers_that_can_not_be_used(tokenizer):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "<|im_start|>": 1}, unk_token="a"))
    with pytest.raises(ValueError, match=r"expected a chat template.*it has no \['<\|im_end\|>'\]"):
        ChatEncoder(PreTrainedTokenizerFast(tokenizer_object=words))

    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match=r"tokenizer: expected a fast one.*got Slow"):
        ChatEncoder(Slow())


def test_many_chats_keep_their_order(tokenizer):
    conversations = [[user("q" * i), assistant(f"answer {i}")] for i in range(1, 9)]
    chats = ChatEncoder(tokenizer).encode(conversations)
    assert [said(tokenizer, chat) for chat in chats] == [[f"answer {i}{END}"] for i in range(1, 9)]
    assert ChatEncoder(tokenizer).encode([]) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": " "}, "source: expected text, got none"),
        ({"split": ""}, "split: expected text, got none"),
        ({"prompt": "q"}, "prompt and answer must come together, got 'q' and None"),
        ({"prompt": "q", "answer": "a", "messages": "m"}, "messages: expected none beside prompt"),
        ({"max_length": 1}, "max_length: expected an integer >= 2, got 1"),
        ({"row_length": 9}, "row_length: expected at least max_length, 2048, or none, got 9"),
        ({"validation": -1}, "validation: expected an integer >= 0, got -1"),
        ({"samples": 0}, "samples: expected an integer >= 1, got 0"),
        ({"workers": 0}, "workers: expected an integer >= 1, got 0"),
        ({"supervise": "user"}, "supervise: expected one of ('assistant', 'all'), got 'user'"),
    ],
)
def test_bad_settings(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ChatDataConfig(**({"source": "x"} | fields))


def test_every_setting_is_documented():
    from stars_fast.base.tree import build, leaves

    fields = leaves(ChatDataConfig)
    assert all(field.help for field in fields.values()), fields
    config = build(ChatDataConfig, {"source": "x", "samples": "400_000", "system": "none"})
    assert (config.samples, config.system) == (400_000, None)
