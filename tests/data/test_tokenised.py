import errno
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import datasets
import numpy as np
import pytest
from chat_helpers import assistant, tokenizer_in, user
from filelock import FileLock

from stars_fast.data import sources, tokenised
from stars_fast.data.chat import ChatDataConfig, ChatEncoder
from stars_fast.data.tokenised import load_chats

pytestmark = pytest.mark.usefixtures("offline")

END = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_in(tmp_path_factory.mktemp("chats") / "tokenizer")


@pytest.fixture
def rows(tmp_path):
    return [{"problem": f"Say {i}.", "solution": "so " * (i % 7) + str(i)} for i in range(60)]


@pytest.fixture
def config(tmp_path, rows):
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list(rows).to_parquet(path)

    def make(**fields):
        defaults = {"source": str(path), "cache": str(tmp_path / "cache"), "workers": 1}
        return ChatDataConfig(**(defaults | fields))

    return make


def load(config, tokenizer, seed=0):
    return load_chats(config, tokenizer, seed, quiet=True)


def answers(tokenizer, chats):
    found = []
    for i in range(len(chats)):
        tokens, targets = chats.document(i)
        found.append(tokenizer.decode(tokens[targets]).removesuffix(END))
    return found


def no_building(monkeypatch):
    def load(*_, **__):
        raise AssertionError("the source was loaded")

    monkeypatch.setattr(sources, "_load", load)


def test_documents_are_those_of_the_encoder(config, tokenizer, rows):
    chats, validation = load(config(), tokenizer)
    assert validation is None
    encoder = ChatEncoder(tokenizer, system=config().system)
    expected = encoder.encode([user(row["problem"]), assistant(row["solution"])] for row in rows)
    assert len(chats) == len(rows)
    for i, chat in enumerate(expected):
        tokens, targets = chats.document(i)
        assert np.array_equal(tokens, chat.tokens)
        assert np.array_equal(targets, chat.targets)
    assert (chats.tokens.dtype, chats.targets.dtype) == (np.int32, np.bool_)
    assert (chats.offsets.dtype, chats.target_counts.dtype) == (np.int64, np.int64)
    assert chats.lengths.tolist() == [len(chat.tokens) for chat in expected]
    assert chats.target_counts.tolist() == [chat.targets.sum() for chat in expected]
    assert chats.info == tokenised.ChatInfo(
        source_rows=60,
        null_rows=0,
        dropped={},
        unread=[],
        rows=60,
        without_target=0,
        truncated=0,
        documents=60,
        tokens=chats.lengths.sum(),
        targets=chats.target_counts.sum(),
    )
    with pytest.raises(IndexError, match=r"index: expected a value in 0..59, got 60"):
        chats.document(60)
    with pytest.raises(ValueError, match="read-only"):
        chats.tokens[0] = 1


def test_several_processes_give_the_same_files(config, tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr(tokenised, "ROWS_PER_WORKER", 10)
    one, _ = load(config(), tokenizer)
    two, _ = load(config(workers=3, cache=str(tmp_path / "other")), tokenizer)
    assert one.folder.parent.name == two.folder.parent.name
    assert one.folder != two.folder
    files = sorted(path.name for path in one.folder.iterdir())
    assert files == ["info.json", "offsets.bin", "target_counts.bin", "targets.bin", "tokens.bin"]
    for name in files:
        assert (one.folder / name).read_bytes() == (two.folder / name).read_bytes()
    # Nothing else is left behind but the lock.
    left = sorted(path.suffix for path in (tmp_path / "other" / "chats").iterdir())
    assert left == ["", ".lock"]


def test_what_is_dropped_is_counted(config, tokenizer, tmp_path):
    long = "why " * 40
    texts = [("q", "a"), ("q", None), (" ", "a"), (long, "a"), ("q", "very " * 40), ("q", "")]
    path = tmp_path / "nulls.jsonl"
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in texts))
    chats, _ = load(config(source=str(path), max_length=60, system=None), tokenizer)
    info = chats.info
    assert (info.source_rows, info.null_rows, info.rows) == (6, 3, 3)
    assert (info.without_target, info.truncated, info.documents) == (1, 1, 2)
    assert answers(tokenizer, chats)[0] == "a"
    assert answers(tokenizer, chats)[1].startswith("very very")
    assert chats.lengths.max() == 60
    assert str(info) == (
        f"2 chats, {info.tokens} tokens, {info.targets} of them targets; 1 truncated, 1 of 3 rows "
        "dropped without target, 3 of the source's 6 without text"
    )


def test_what_would_go_missing_is_counted_by_name(config, tokenizer, tmp_path):
    call = [{"name": "add", "arguments": "{}"}]
    chats = [
        [user("q"), assistant("a")],
        [user("q"), assistant("") | {"tool_calls": call}],
        [user("q"), assistant("x") | {"tool_calls": call}, {"role": "tool", "content": "1"}],
        [user("q"), assistant("a") | {"reasoning_content": "well"}],
        [user("q"), assistant("")],
        [user("q") | {"name": "bob"}, {"role": "Assistant", "content": "b"}],
    ]
    path = tmp_path / "calls.jsonl"
    rows = [{"id": i, "messages": chat} for i, chat in enumerate(chats)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, _ = load(config(source=str(path)), tokenizer)
    assert answers(tokenizer, found) == ["a", "b"]
    assert found.info.dropped == {"tool_calls": 2, "reasoning_content": 1}
    assert str(found.info).endswith(
        "1 of the source's 6 without text, 2 for tool_calls, 1 for reasoning_content (what is "
        "outside the contents of messages is not trained on); not read: id, name"
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[1:5]))
    message = "data.source: expected a conversation at least, got none: 1 of the source's 4 without"
    with pytest.raises(ValueError, match=f"{message} text, 2 for tool_calls, 1 for reasoning_cont"):
        load(config(source=str(path)), tokenizer)


@pytest.mark.parametrize("validation", [0, 3])
def test_data_without_a_target_stops(config, tokenizer, tmp_path, validation):
    settings = config(max_length=10, validation=validation)
    name = "validation" if validation else "train"
    message = (
        rf"data.source: no row for {name} has a token to predict: 0 chats, 0 tokens, 0 of them "
        rf"targets; 0 truncated, {validation or 60} of {validation or 60} rows dropped"
    )
    with pytest.raises(ValueError, match=message):
        load(settings, tokenizer)
    # Nothing of the attempt is left but the lock.
    assert [path.suffix for path in (tmp_path / "cache" / "chats").iterdir()] == [".lock"]


def test_too_many_validation_rows(config, tokenizer):
    with pytest.raises(ValueError, match=r"data.validation must leave rows.*got 60 of 60 usable"):
        load(config(validation=60), tokenizer)


def test_splits_are_seeded_and_disjoint(config, tokenizer, rows):
    some = config(samples=20, validation=10)
    train, validation = (answers(tokenizer, chats) for chats in load(some, tokenizer))
    assert (len(train), len(validation)) == (20, 10)
    everything = [row["solution"] for row in rows]
    assert set(train) | set(validation) <= set(everything)
    assert not set(train) & set(validation)
    assert train == sorted(train, key=everything.index)
    other_train, other = (answers(tokenizer, c) for c in load(some, tokenizer, seed=1))
    assert set(other) != set(validation)
    assert set(other_train) != set(train)
    # More training rows, the same validation rows.
    more_train, same = (
        answers(tokenizer, c) for c in load(config(validation=10, samples=100), tokenizer)
    )
    assert same == validation
    assert set(more_train) == set(everything) - set(validation)


def test_second_call_only_opens_the_cache(config, tokenizer, monkeypatch):
    first, held = load(config(validation=5), tokenizer)
    no_building(monkeypatch)
    # Used as it is and in training, a tokenizer notes padding and truncation.
    tokenizer(["a", "bb"], padding=True, truncation=True, max_length=9)
    changes = {"packing": False, "row_length": 4096, "workers": 2}
    again, held_again = load(config(validation=5, **changes), tokenizer)
    assert again.folder == first.folder
    assert np.array_equal(again.tokens, first.tokens)
    assert np.array_equal(held_again.targets, held.targets)


def test_files_that_changed_are_tokenised_again(config, tokenizer, rows):
    first, _ = load(config(), tokenizer)
    datasets.Dataset.from_list(rows[:-1]).to_parquet(config().source)
    again, _ = load(config(), tokenizer)
    assert (len(first), len(again)) == (60, 59)


@pytest.mark.parametrize(
    "fields",
    [
        {"system": None},
        {"max_length": 70},
        {"supervise": "all"},
        {"samples": 5},
        {"validation": 5},
        {"split": "train[:7]"},
        {"prompt": "solution", "answer": "problem"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_every_setting_that_matters_has_files_of_its_own(config, tokenizer, fields):
    plain, _ = load(config(), tokenizer)
    other, _ = load(config(**fields), tokenizer)
    assert other.folder.parent != plain.folder.parent
    assert not np.array_equal(other.tokens, plain.tokens) or fields == {"supervise": "all"}


def test_another_tokenizer_or_template_has_files_of_its_own(config, tokenizer, tmp_path):
    folders = {load(config(), tokenizer)[0].folder}
    small = tokenizer_in(tmp_path / "small", 280)
    folders.add(load(config(), small)[0].folder)
    small.chat_template = small.chat_template.replace("'\\n'", "'\\n\\n'")
    folders.add(load(config(), small)[0].folder)
    assert len(folders) == 3


def cut(folder):
    path = folder / "tokens.bin"
    path.write_bytes(path.read_bytes()[:-4])


def lose(folder):
    (folder / "targets.bin").unlink()


def shift(folder):
    path = folder / "offsets.bin"
    offsets = np.fromfile(path, np.int64)
    offsets[3] = offsets[2]
    offsets.tofile(path)


def miscount(folder):
    (folder / "target_counts.bin").write_bytes(
        b"\1" * (folder / "target_counts.bin").stat().st_size
    )


def garble(folder):
    (folder / "info.json").write_text("{")


def rename(folder):
    (folder / "info.json").write_text('{"rows": 3}')


@pytest.mark.parametrize("damage", [cut, lose, shift, miscount, garble, rename])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_damaged_cache_is_made_anew(config, tokenizer, damage, split):
    settings = config(validation=5)
    first = [np.array(chats.tokens) for chats in load(settings, tokenizer)]
    folder = load(settings, tokenizer)[0].folder.parent
    damage(folder / split)
    with pytest.warns(UserWarning, match="cached chats are damaged and made anew"):
        again = load(settings, tokenizer)
    assert all(np.array_equal(a, b.tokens) for a, b in zip(first, again, strict=True))
    assert again[0].folder.parent == folder


def mapped_or_open(folder):
    """The files below `folder` that this process has open or mapped."""
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    found = {line[5].strip() for line in lines if len(line) == 6}
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.add(os.readlink(descriptor))
    return [path for path in found if path.startswith(f"{folder}{os.sep}")]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_what_is_removed_is_neither_open_nor_mapped(config, tokenizer, monkeypatch):
    """NFS keeps a file that is, under another name, and does not remove its folder."""
    removed = []

    def like_nfs(path, *args, **options):
        held = mapped_or_open(Path(path).resolve())
        removed.append(str(path))
        if held:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        return rmtree(path, *args, **options)

    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", like_nfs)
    train, _ = load(config(validation=5), tokenizer)
    assert len(train) == 55
    assert removed  # the rows on the way


def test_an_attempt_that_fails_leaves_nothing(config, tokenizer, tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tokenised, "write_text", fail)
        with pytest.raises(KeyboardInterrupt):
            load(config(), tokenizer)
    assert [path.suffix for path in (tmp_path / "cache" / "chats").iterdir()] == [".lock"]
    assert len(load(config(), tokenizer)[0]) == 60


@pytest.mark.parametrize("next_run", ["same", "other", "none"])
def test_what_a_kill_left_is_removed_by_the_next_run(config, tokenizer, tmp_path, next_run):
    """Of the same chats or others; also where the kill came once they were in place."""
    chats = tmp_path / "cache" / "chats"

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def killed():
        tokenised.write_text = die
        load(config(), tokenizer)

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    (left,) = (path for path in chats.iterdir() if path.is_dir())
    folder = chats / left.name.partition(".")[0]
    assert list(left.rglob("tokens.bin"))
    if next_run == "none":
        another = config(cache=str(tmp_path / "another"))
        load(another, tokenizer)[0].folder.parent.rename(folder)
    load(config(max_length=100) if next_run == "other" else config(), tokenizer)
    assert not left.exists()
    assert len(load(config(), tokenizer)[0]) == 60


def test_what_another_process_is_building_is_left_alone(config, tokenizer, tmp_path):
    chats = tmp_path / "cache" / "chats"
    key = "0123456789abcdef" * 2
    left = chats / f"{key}.a_b0c1d2"
    left.mkdir(parents=True)
    with FileLock(chats / f"{key}.lock"):
        load(config(), tokenizer)
        assert left.exists()
    load(config(), tokenizer)
    assert not left.exists()


def test_what_users_keep_in_the_folder_of_the_cache_stays(config, tokenizer, tmp_path):
    """`data.cache` may be the folder of their data, with chats of their own in it."""
    chats = tmp_path / "cache" / "chats"
    for name in (".git", "OpenHermes-2.5", "v1.0", "deadbeef.12345678"):
        (chats / name).mkdir(parents=True)
        (chats / name / "rows.jsonl").write_text("{}")
    before = set(chats.rglob("*"))
    built = load(config(), tokenizer)[0].folder.parent
    own = {built, *built.rglob("*"), chats / f"{built.name}.lock"}
    assert set(chats.rglob("*")) - own == before


def build(config, tokenizer, start, results):
    start.wait()
    built = []
    original = tokenised._write_splits
    tokenised._write_splits = lambda *arguments: built.append(1) or original(*arguments)
    chats, _ = load(config, tokenizer)
    results.put((len(built), len(chats), int(chats.tokens.sum())))


def test_processes_that_load_at_once_build_once(config, tokenizer):
    fork = multiprocessing.get_context("fork")
    start, results = fork.Barrier(3), fork.Queue()
    workers = [
        fork.Process(target=build, args=(config(), tokenizer, start, results)) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
    assert sorted(built for built, _, _ in found) == [0, 0, 1]
    chats, _ = load(config(), tokenizer)
    assert {tuple(read) for _, *read in found} == {(60, int(chats.tokens.sum()))}


def test_pickled_chats_map_the_files_again(config, tokenizer):
    chats, _ = load(config(), tokenizer)
    text = pickle.dumps(chats)
    assert len(text) < 1000
    assert np.array_equal(pickle.loads(text).tokens, chats.tokens)


def test_errors_of_a_template_come_out_of_the_workers(config, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenised, "ROWS_PER_WORKER", 10)
    shouting = tokenizer_in(tmp_path / "t")
    shouting.chat_template = shouting.chat_template.replace(
        "message['content']", "(message['content'] | upper)"
    )
    message = re.escape("the chat template changes what the assistant says")
    with pytest.raises(ValueError, match=message):
        load(config(workers=2), shouting)


def test_progress_bars(config, tokenizer, capfd):
    load(config(), tokenizer)
    assert "tokenise" not in capfd.readouterr().err
    assert not datasets.are_progress_bars_disabled()
    load_chats(config(samples=9), tokenizer, 0)
    assert "tokenise" in capfd.readouterr().err


def test_cache_folder(config, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("STARS_FAST_CACHE", str(tmp_path / "env"))
    assert (tmp_path / "env") in load(config(cache=None), tokenizer)[0].folder.parents
    monkeypatch.delenv("STARS_FAST_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = load(config(cache=None), tokenizer)[0].folder
    assert (tmp_path / "home" / ".cache" / "stars_fast") in folder.parents
