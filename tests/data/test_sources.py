import json

import datasets
import numpy as np
import pytest
from chat_helpers import assistant, system, user

from stars_fast.data.chat import ChatDataConfig
from stars_fast.data.sources import conversation, find_columns, find_source, usable_rows
from stars_fast.data.tiny_chat import MAX_SUMMANDS, tiny_chats, write_tiny_chats

pytestmark = pytest.mark.usefixtures("offline")

ROWS = [{"problem": f"p{i}", "solution": f"s{i}", "answer": i} for i in range(6)]


def jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_json(path, rows=ROWS):
    path.write_text(json.dumps(rows))


def parquet(path, rows=ROWS):
    datasets.Dataset.from_list(rows).to_parquet(path)


def saved(path, rows=ROWS):
    datasets.Dataset.from_list(rows).save_to_disk(path)


def saved_splits(path, rows=ROWS):
    whole = datasets.Dataset.from_list(rows)
    datasets.DatasetDict(train=whole, test=whole.select([1])).save_to_disk(path)


def load(source, **fields):
    return find_source(ChatDataConfig(str(source), **fields), seed=0).load()


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("rows.jsonl", jsonl),
        ("rows.json", as_json),
        ("rows.parquet", parquet),
        ("rows", saved),
        ("splits", saved_splits),
    ],
)
def test_rows_of_each_format(tmp_path, name, write):
    write(tmp_path / name)
    rows = load(tmp_path / name)
    assert rows.to_list() == ROWS
    config = ChatDataConfig(str(tmp_path / name))
    columns = find_columns(config, rows)
    assert columns == ("problem", "solution")
    assert conversation(rows[2], columns).messages == [user("p2"), assistant("s2")]


@pytest.mark.parametrize(("kind", "write"), [("jsonl", jsonl), ("parquet", parquet)])
def test_globs_and_folders(tmp_path, kind, write):
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / f"a.{kind}", ROWS[:2])
    write(folder / f"b.{kind}", ROWS[2:])
    assert load(folder).to_list() == ROWS
    assert load(folder / f"*.{kind}").to_list() == ROWS
    assert load(folder / f"*.{kind}", split="train[:3]").to_list() == ROWS[:3]


def test_splits(tmp_path):
    saved_splits(tmp_path / "saved")
    assert load(tmp_path / "saved", split="test").to_list() == ROWS[1:2]
    with pytest.raises(
        ValueError, match=r"data.split: expected one of \['test', 'train'\], got 'x'"
    ):
        load(tmp_path / "saved", split="x")
    jsonl(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match=r"data.source: can't load .* split x\): Unknown split"):
        load(tmp_path / "rows.jsonl", split="x")
    (tmp_path / "folder").mkdir()
    for split in ("train", "test"):
        jsonl(tmp_path / "folder" / f"{split}.jsonl", ROWS[: 1 + (split == "train")])
    assert len(load(tmp_path / "folder")) == 2
    assert len(load(tmp_path / "folder", split="test")) == 1


def test_hub_ids_go_to_the_hub(monkeypatch):
    calls = []

    def load_dataset(*arguments, **settings):
        calls.append((arguments, settings))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = ChatDataConfig("owner/some-data.v1", subset="all", split="validation")
    source = find_source(config, 0)
    assert source.load().to_list() == ROWS
    assert calls == [(("owner/some-data.v1", "all"), {"split": "validation"})]
    assert source.identity == ["hub", "owner/some-data.v1", source.load()._fingerprint]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "no/such.jsonl",
            "data.source: expected a hub id, an existing file or folder, or tiny-chat",
        ),
        ("./nothing", "data.source: expected a hub id, an existing file"),
        ("no/such/*.parquet", "data.source: no file fits 'no/such/\\*.parquet'"),
        ("stars-fast-tests/no-such-data", "data.source: can't load stars-fast-tests/no-such-data"),
    ],
)
def test_sources_that_are_not_there(source, message):
    with pytest.raises(ValueError, match=message):
        load(source)


def test_files_that_can_not_be_read(tmp_path):
    (tmp_path / "rows.xlsx").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"files of one kind among .parquet, .json, .jsonl, .csv"):
        load(tmp_path / "rows.xlsx")
    jsonl(tmp_path / "rows.jsonl")
    parquet(tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match="files of one kind"):
        load(tmp_path / "rows.[jp]*")
    (tmp_path / "rows.csv").write_text("a,b\n")
    (tmp_path / "rows.tsv").write_text("a\tb\n")
    with pytest.raises(ValueError, match="files of one kind"):
        load(tmp_path / "rows.[ct]*")
    with pytest.raises(ValueError, match=r"data.subset: expected none for files, got 'x'"):
        load(tmp_path / "rows.jsonl", subset="x")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(ValueError, match=r"data.source: can't load"):
        load(tmp_path / "bad.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"data.source: can't load"):
        load(tmp_path / "empty")


@pytest.mark.parametrize(("suffix", "sep"), [("csv", ","), ("tsv", "\t")])
def test_cells_of_tables_stay_as_they_are(tmp_path, suffix, sep):
    lines = [f"question{sep}answer", f"3 + 4 ={sep}007", f'"a{sep}b"{sep}NA', f"nothing{sep}"]
    (tmp_path / f"rows.{suffix}").write_text("\ufeff" + "\n".join(lines))
    rows = load(tmp_path / f"rows.{suffix}")
    assert rows["question"][:] == ["3 + 4 =", f"a{sep}b", "nothing"]
    assert rows["answer"][:] == ["007", "NA", ""]
    columns = find_columns(ChatDataConfig("x"), rows)
    assert usable_rows(rows, columns).rows.tolist() == [0, 1]


def test_cells_of_tables_in_a_folder_stay_too(tmp_path):
    (tmp_path / "a.csv").write_text("question,answer\n1 + 6 =,007\n")
    (tmp_path / "b.csv").write_text("question,answer\nnothing,NA\n")
    assert load(tmp_path)["answer"][:] == ["007", "NA"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (",question,answer\n0,q,a\n", ["Unnamed: 0", "question", "answer"]),  # pandas' own files
        ("\nquestion,answer,\r\nq,a,\r\n", ["question", "answer", "Unnamed: 2"]),
        ("question,answer,question\nq,a,x\n", ["question", "answer", "question.1"]),
        (f"question,answer,{'x' * 140_000}\nq,a,x\n", ["question", "answer", "x" * 140_000]),
    ],
    ids=["numbered", "ends in a comma", "a name twice", "a long name"],
)
def test_odd_names_of_columns(tmp_path, text, names):
    (tmp_path / "rows.csv").write_text(text)
    rows = load(tmp_path / "rows.csv")
    assert rows.column_names == names
    assert (rows["question"][:], rows["answer"][:]) == (["q"], ["a"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("question,answer\n1, 2 and 3?,6\nq,a\n", "Expected 2 fields in line 2, saw 3"),
        ("question,answer\nq,a\n1, 2 and 3?,6\n", "Expected 2 fields in line 3, saw 3"),
        ("", "can't read .*rows.csv: No columns to parse from file"),
    ],
)
def test_tables_that_can_not_be_read(tmp_path, text, message):
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(ValueError, match=rf"data.source: .*{message}"):
        load(tmp_path / "rows.csv")


@pytest.mark.parametrize("write", [jsonl, as_json, parquet, None])
def test_files_with_different_columns(tmp_path, write):
    suffix = {None: "csv", parquet: "parquet"}.get(write, "json")
    one, other = tmp_path / f"1.{suffix}", tmp_path / f"2.{suffix}"
    if write is None:
        one.write_text("question,answer\n1,2\n")
        other.write_text("prompt,reply\n1,2\n")
    else:
        write(one, [{"question": "1", "answer": "2"}])
        write(other, [{"prompt": "1", "reply": "2"}])
    expected = f"same columns, got question, answer in {one} and prompt, reply in {other}"
    with pytest.raises(ValueError, match=f"data.source: expected files with the {expected}"):
        load(tmp_path / f"*.{suffix}")


def test_columns_in_another_order_are_the_same(tmp_path):
    (tmp_path / "1.csv").write_text("question,answer\nq1,a1\n")
    (tmp_path / "2.csv").write_text("answer,question\na2,q2\n")
    assert load(tmp_path / "*.csv")["answer"][:] == ["a1", "a2"]


def test_a_name_with_brackets_is_no_pattern(tmp_path):
    jsonl(tmp_path / "rows[1] *.jsonl")
    assert load(tmp_path / "rows[1] *.jsonl").to_list() == ROWS


def columns_of(names, **fields):
    rows = datasets.Dataset.from_dict({name: ["x"] for name in names} | {"number": [1]})
    return find_columns(ChatDataConfig("x", **fields), rows)


def test_columns():
    assert columns_of(["question", "answer", "id"]) == ("question", "answer")
    assert columns_of(["problem", "solution", "answer"]) == ("problem", "solution")
    assert columns_of(["messages", "answer"]) == ("messages",)
    assert columns_of(["conversations", "id"]) == ("conversations",)
    assert columns_of(["conversations", "messages"]) == ("messages",)
    assert columns_of(["messages", "q", "a"], prompt="q", answer="a") == ("q", "a")
    assert columns_of(["messages", "chat"], messages="chat") == ("chat",)


@pytest.mark.parametrize(
    ("names", "fields", "message"),
    [
        (["text"], {}, r"it has none of them among \['text', 'number'\]"),
        (["messages", "problem", "solution"], {}, "it has messages, problem and solution among"),
        (["q"], {"prompt": "q", "answer": "x"}, r"data.answer: expected one of .*'q'.*, got 'x'"),
        (["q"], {"messages": "x"}, r"data.messages: expected one of the columns .*, got 'x'"),
        (["q"], {"prompt": "q", "answer": "number"}, "data.answer: expected a column of text, got"),
    ],
)
def test_columns_that_do_not_fit(names, fields, message):
    with pytest.raises(ValueError, match=message):
        columns_of(names, **fields)


def test_rows_without_text_are_left_out(tmp_path):
    texts = ["a", None, "", " \n", "b"]
    rows = [{"question": q, "answer": a} for q in texts for a in texts]
    parquet(tmp_path / "rows.parquet", rows)
    found = usable_rows(load(tmp_path / "rows.parquet"), ("question", "answer"))
    assert found.rows.tolist() == [0, 4, 20, 24]
    assert found.rows.dtype == np.int64
    assert found.dropped == {"text": 21}


def test_messages(tmp_path):
    good = [system(""), user("a"), assistant("b"), user("c"), assistant("d")]
    chats = [good, None, [], [user("a"), assistant(None)], [user("a") | {"name": "n"}]]
    jsonl(tmp_path / "rows.jsonl", [{"messages": chat} for chat in chats])
    rows = load(tmp_path / "rows.jsonl")
    found = usable_rows(rows, ("messages",))
    assert found.rows.tolist() == [0, 4]
    assert (found.dropped, found.unread) == ({"text": 3}, ["name"])
    assert conversation(rows[0], ("messages",)).messages == good
    assert conversation(rows[4], ("messages",)).messages == [user("a")]


def test_identity_of_files_follows_their_content(tmp_path):
    jsonl(tmp_path / "rows.jsonl")
    config = ChatDataConfig(str(tmp_path / "rows.jsonl"))
    first = find_source(config, 0).identity
    assert find_source(config, 1).identity == first
    jsonl(tmp_path / "rows.jsonl", ROWS[:-1])
    assert find_source(config, 0).identity != first


def test_tiny_chats(tmp_path):
    chats = list(tiny_chats(400, seed=1))
    assert chats == list(tiny_chats(400, seed=1)) != list(tiny_chats(400, seed=2))
    assert chats[:10] == list(tiny_chats(10, seed=1))
    for chat in chats:
        numbers = [int(n) for n in chat["problem"][len("What is ") : -1].split(" + ")]
        *steps, last = chat["solution"].split("\n")
        assert 2 <= len(numbers) <= MAX_SUMMANDS
        assert last == f"The answer is {sum(numbers)}."
        for i, step in enumerate(steps, 1):
            assert step == f"{sum(numbers[:i])} + {numbers[i]} = {sum(numbers[: i + 1])}"
        assert len(steps) == len(numbers) - 1
    sizes = [len(chat["problem"]) + len(chat["solution"]) for chat in chats]
    assert max(sizes) > 4 * min(sizes)
    write_tiny_chats(tmp_path / "tiny.jsonl", 400, seed=1)
    assert load(tmp_path / "tiny.jsonl").to_list() == chats


def test_tiny_chats_as_a_source():
    assert len(load("tiny-chat")) == 2_000
    assert load("tiny-chat", samples=5, validation=3).to_list() == list(tiny_chats(8, seed=0))
    with pytest.raises(ValueError, match="rows: expected an integer >= 0, got -1"):
        list(tiny_chats(-1, seed=0))
