import pytest

from stars_fast.base.unique_keys import parse_json, parse_yaml


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {steps: 1}\nname: a\ntrain: {lr: 2}\n", "train is there twice, in line 1 and in"),
        ("o:\n  lr: 1\n  clip: 1\n  lr: 1\n", "o.lr is there twice, in line 2 and in line 4"),
        ('a: 1\n"a": 2\n', "a is there twice, in line 1 and in line 2"),
        ("a: [{b: 1}, {c: 1,\n c: 2}]", "a.c is there twice, in line 1 and in line 2"),
        ("x: &x {a: 1}\ny:\n  <<: *x\n  <<: *x\n", "y.<< is there twice, in line 3 and in line 4"),
        ("x: &x\n  a: *x\n", "holds itself, by an alias"),
        ("a: [", "not YAML"),
        ("a: 1\n---\na: 2\n", "not YAML"),
        ("{[1, 2]: 3}", "not YAML"),
        ("[" * 5000, "nested too deeply"),
    ],
)  # fmt: skip
def test_yaml_that_would_lose_a_value_is_refused(text, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        parse_yaml(text)


def test_what_comes_once_in_each_place_is_read():
    text = "a: &x {lr: 1, k: 2}\nb: {<<: *x, lr: 3}\nc: {lr: 1, '1': 1, 1: 2}\nd: *x\n"
    assert parse_yaml(text) == {
        "a": {"lr": 1, "k": 2},
        "b": {"lr": 3, "k": 2},
        "c": {"lr": 1, "1": 1, 1: 2},
        "d": {"lr": 1, "k": 2},
    }
    assert parse_yaml("") is None
    assert parse_yaml("# nothing\n") is None


def test_json_objects():
    assert parse_json('{"a": {"b": 1}, "c": [{"b": 1}, {"b": 2}]}') == {
        "a": {"b": 1},
        "c": [{"b": 1}, {"b": 2}],
    }
    with pytest.raises(ValueError, match="key 'b' is there twice"):
        parse_json('{"a": {"b": 1, "b": 2}}')
