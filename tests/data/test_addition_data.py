import json

import numpy as np
import pytest
import torch

from stars_fast.data.addition import (
    IGNORE,
    AdditionConfig,
    AdditionData,
    AdditionTokenizer,
    encode_sums,
    read_jsonl,
    write_jsonl,
)

TOKENIZER = AdditionTokenizer()
GOOD = {"num1": 1750, "num2": 4733, "expression": "1750 + 4733", "answer": 6483}


def as_set(pairs):
    return set(map(tuple, pairs.tolist()))


def write_lines(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def test_tokenizer_round_trip():
    text = "0123456789+=$_"
    ids = TOKENIZER.encode(text)
    assert ids == list(range(TOKENIZER.vocab_size))
    assert TOKENIZER.decode(torch.tensor(ids)) == text
    specials = (TOKENIZER.plus_id, TOKENIZER.equals_id, TOKENIZER.end_id, TOKENIZER.pad_id)
    assert TOKENIZER.decode(specials) == "+=$_"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TOKENIZER.encode("1 + 2"), r"text must use only .* got \[' '\]"),
        (lambda: TOKENIZER.decode([3, 14]), r"ids: expected a value in 0..13, got \[14\]"),
        (lambda: TOKENIZER.decode([-1]), r"ids: expected a value in 0..13, got \[-1\]"),
    ],
)
def test_tokenizer_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (1750, 4733, "1750+4733=3846$_"),
        (7669, 4119, "7669+4119=88711$"),
        (9999, 9999, "9999+9999=89991$"),
        (1000, 1000, "1000+1000=0002$_"),
        (5000, 5000, "5000+5000=00001$"),
    ],
)
def test_encoding(a, b, text):
    assert TOKENIZER.decode(encode_sums(np.array([[a, b]]), 4)[0]) == text


@pytest.mark.parametrize("digits", [1, 2, 4, 9])
def test_encoding_says_the_sum(digits):
    data = AdditionData(AdditionConfig(digits, train_samples=60, test_samples=20))
    assert data.train.shape == (60, 3 * digits + 4)
    for sequence, (a, b) in zip(data.train, data.train_pairs.tolist(), strict=True):
        assert len(str(a)) == len(str(b)) == digits
        question, answer = TOKENIZER.decode(sequence).rstrip("_").split("=")
        assert question == f"{a}+{b}"
        assert answer == str(a + b)[::-1] + "$"


def test_batch_puts_the_loss_on_answer_and_end_only(tmp_path):
    write_jsonl(tmp_path / "test.jsonl", np.array([[12, 34], [99, 99]]))
    data = AdditionData(AdditionConfig(2, 10, 2, test_file=str(tmp_path / "test.jsonl")))
    tokens, targets, mask = data.batch("test", torch.tensor([1, 0, 1]))
    assert tokens.shape == targets.shape == mask.shape == (3, data.max_length)
    assert [TOKENIZER.decode(row) for row in tokens] == ["99+99=891", "12+34=64$", "99+99=891"]
    lost = [TOKENIZER.decode(row[row != IGNORE]) for row in targets]
    assert lost == ["891$", "64$", "891$"]
    assert (targets[:, :5] == IGNORE).all()
    assert (targets[:, 5] != IGNORE).all()
    assert (tokens.dtype, targets.dtype, mask.dtype) == (torch.int64, torch.int64, torch.bool)


def test_mask_is_false_on_pads():
    data = AdditionData(AdditionConfig(2, 10, 2))
    data.train[0] = torch.tensor(TOKENIZER.encode("12+34=6$__"))
    _, targets, mask = data.batch("train", torch.tensor([0]))
    assert mask[0].tolist() == [True] * 8 + [False]
    assert (targets[0] != IGNORE).tolist() == [False] * 5 + [True] * 2 + [False] * 2


def test_batch_error():
    with pytest.raises(ValueError, match="split: expected 'train' or 'test', got 'valid'"):
        AdditionData(AdditionConfig(2, 10, 2)).batch("valid", torch.tensor([0]))


def test_splits_are_seeded_distinct_and_disjoint():
    data = AdditionData(AdditionConfig(2, 7000, 1000, seed=3))
    train, test = as_set(data.train_pairs), as_set(data.test_pairs)
    assert (len(train), len(test), len(train & test)) == (7000, 1000, 0)
    again = AdditionData(AdditionConfig(2, 7000, 1000, seed=3))
    assert torch.equal(again.train, data.train)
    assert torch.equal(again.test, data.test)
    other = AdditionData(AdditionConfig(2, 7000, 1000, seed=4))
    assert not torch.equal(other.test, data.test)


def test_test_split_does_not_change_with_the_training_samples():
    few, many = (AdditionData(AdditionConfig(3, n, 100)) for n in (10, 5000))
    assert torch.equal(few.test, many.test)


def test_whole_space_can_be_used():
    data = AdditionData(AdditionConfig(1, 61, 20))
    everything = as_set(data.train_pairs) | as_set(data.test_pairs)
    assert everything == {(a, b) for a in range(1, 10) for b in range(1, 10)}


def test_operands_are_uniform():
    pairs = AdditionData(AdditionConfig(4, 20_000, 1)).train_pairs
    # 20,000 draws of a variable with std 2598: standard error 18.
    assert pairs.mean(0) == pytest.approx([5499.5, 5499.5], abs=80)
    assert pairs.min() < 1010
    assert pairs.max() > 9990


@pytest.mark.parametrize("counts", [(62, 20), (1, 82)])
def test_more_sums_than_exist(counts):
    with pytest.raises(ValueError, match="must fit into the 81 sums of 1-digit operands"):
        AdditionData(AdditionConfig(1, *counts))


def test_jsonl_round_trip(tmp_path):
    pairs = AdditionData(AdditionConfig(4, 500, 1)).train_pairs
    path = tmp_path / "sums.jsonl"
    write_jsonl(path, pairs)
    np.testing.assert_array_equal(read_jsonl(path, 4), pairs)


def test_jsonl_public_shape(tmp_path):
    path = tmp_path / "sums.jsonl"
    write_jsonl(path, np.array([[1750, 4733]]))
    assert path.read_text() == json.dumps(GOOD) + "\n"
    more_keys = write_lines(tmp_path / "more.jsonl", json.dumps(GOOD | {"sum": 6483}))
    np.testing.assert_array_equal(read_jsonl(more_keys, 4), [[1750, 4733]])


@pytest.mark.parametrize("split", ["train", "test"])
def test_generated_split_avoids_the_one_from_a_file(tmp_path, split):
    everything = AdditionData(AdditionConfig(1, 80, 1))
    pairs = np.concatenate([everything.train_pairs, everything.test_pairs])
    path = tmp_path / "sums.jsonl"
    write_jsonl(path, pairs[:50])
    counts = {f"{split}_samples": 50, f"{split}_file": str(path)}
    other = {"train": "test", "test": "train"}[split]
    data = AdditionData(AdditionConfig(1, **counts, **{f"{other}_samples": 31}))
    np.testing.assert_array_equal(getattr(data, f"{split}_pairs"), pairs[:50])
    assert as_set(getattr(data, f"{other}_pairs")) == as_set(pairs[50:])


def test_file_is_cut_at_the_number_of_samples(tmp_path):
    write_jsonl(tmp_path / "sums.jsonl", np.array([[1, 2], [3, 4], [5, 6]]))
    data = AdditionData(AdditionConfig(1, 5, 2, test_file=str(tmp_path / "sums.jsonl")))
    np.testing.assert_array_equal(data.test_pairs, [[1, 2], [3, 4]])


def test_files_that_share_sums(tmp_path):
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    write_jsonl(train, np.array([[1, 2], [3, 4], [5, 6]]))
    write_jsonl(test, np.array([[5, 6], [3, 4], [4, 3]]))
    with pytest.raises(ValueError, match=r"got 2 in both, such as 3 \+ 4"):
        AdditionData(AdditionConfig(1, 3, 3, train_file=str(train), test_file=str(test)))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not valid JSON"),
        ("", "the line is empty"),
        ("[1, 2]", "expected a JSON object, got list"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "num2"}), "missing key 'num2'"),
        (json.dumps(GOOD | {"num1": "1750"}), "num1: expected int, got '1750'"),
        (json.dumps(GOOD | {"answer": 6483.0}), "answer: expected int, got 6483.0"),
        (json.dumps(GOOD | {"num1": True}), "num1: expected int, got True"),
        (json.dumps(GOOD | {"expression": 3}), "expression: expected str, got 3"),
        (json.dumps(GOOD | {"num1": -1750}), "num1: expected 0 or more, got -1750"),
        (json.dumps(GOOD | {"num2": 473}), "num2: expected 4 digits, got 473"),
        (json.dumps(GOOD).replace("4733,", "9" * 5000 + ","), "not valid JSON"),
        (json.dumps(GOOD | {"num2": 10**30}), "num2: expected 4 digits, got 10"),
        (json.dumps(GOOD | {"answer": 6484}), r"answer: expected 1750 \+ 4733 = 6483, got 6484"),
        (json.dumps(GOOD | {"expression": "1750 - 4733"}), r"expression: expected '1750 \+ 4733'"),
    ],
)
def test_bad_line(tmp_path, line, reason):
    path = write_lines(tmp_path / "sums.jsonl", json.dumps(GOOD), line, json.dumps(GOOD))
    with pytest.raises(ValueError, match=rf"sums\.jsonl, line 2: .*({reason})"):
        read_jsonl(path, 4)


def test_line_that_is_not_text(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_bytes(b'{"num1": "\xff\xfe"}\n')
    with pytest.raises(ValueError, match=r"sums\.jsonl: .*UTF-8, got byte 0xff .*\(line 1\)"):
        read_jsonl(path, 4)


def test_empty_file(tmp_path):
    with pytest.raises(ValueError, match=r"sums\.jsonl: expected at least one sum"):
        read_jsonl(write_lines(tmp_path / "sums.jsonl"), 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"digits": 0}, "digits: expected an integer >= 1, got 0"),
        ({"digits": 10}, "digits: expected at most 9, got 10"),
        ({"train_samples": 1e5}, "train_samples: expected an integer >= 1, got 100000.0"),
        ({"test_samples": 0}, "test_samples: expected an integer >= 1, got 0"),
        ({"seed": -1}, "seed: expected an integer >= 0, got -1"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        AdditionConfig(**fields)
