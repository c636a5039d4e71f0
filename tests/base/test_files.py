"""Files in other encodings are named, with the place and the way out."""

import codecs
import os
import re

import pytest

from stars_fast.base.errors import ConfigError
from stars_fast.base.files import check_utf8, read_text
from stars_fast.cli import main

TEXT = "one\ncafé\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("text", ["", TEXT, "a𝄞b" * 400_000])
def test_text_in_utf8_is_read_without_its_mark(tmp_path, encoding, text):
    (tmp_path / "a").write_bytes(text.encode(encoding))
    assert read_text(tmp_path / "a") == text


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (TEXT.encode("latin-1"), r"byte 0xe9 at position 7 \(line 2\)"),
        (b"x" * (1 << 20) + b"\n\xff\n", rf"byte 0xff at position {(1 << 20) + 1} \(line 2\)"),
        ("é".encode() * 600_000 + b"\xe9", r"byte 0xe9 at position 1200000 \(line 1\)"),
        (b"x" * ((1 << 20) - 1) + b"\xc3(", rf"byte 0xc3 at position {(1 << 20) - 1} \(line 1"),
        ("é".encode()[:1], r"byte 0xc3 at position 0 \(line 1\)"),
        (TEXT.encode("utf-16"), "a file that begins as UTF-16 does; .*-f UTF-16"),
        (codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"), "a file that begins as UTF-16 does"),
        (TEXT.encode("utf-16-le"), r"a zero byte at position 1 \(line 1\); .*-f UTF-16"),
    ],
)
def test_what_is_not_utf8_is_named_with_its_place(tmp_path, content, found):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    for read in (check_utf8, read_text):
        with pytest.raises(ValueError, match=rf"{path}: expected text in UTF-8, got {found}"):
            read(path)


def test_what_can_not_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match=rf"{tmp_path}: Is a directory"):
        read_text(tmp_path)
    with pytest.raises(ValueError, match=r"nothing: No such file"):
        read_text(tmp_path / "nothing")
    (tmp_path / "locked").write_text("x")
    (tmp_path / "locked").chmod(0)
    if not os.access(tmp_path / "locked", os.R_OK):  # root reads all
        with pytest.raises(ValueError, match="locked: Permission denied"):
            read_text(tmp_path / "locked")


# -- where files are given


LATIN, UTF16 = "latin-1", "utf-16"
SUM = '{"num1": 1, "num2": 2, "expression": "1 + 2", "answer": 3, "note": "é"}\n'
CHAT = '{"problem": "café?", "solution": "yes it is"}\n'
ROW = '{"text": "café"}\n'


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    pytest.importorskip("datasets")
    from stars_fast.models.ouro.tiny import write_tiny_ouro

    home = tmp_path_factory.mktemp("files")
    write_tiny_ouro(home / "model")
    return home


COMMANDS = {
    "recipe.yaml": ("method: sft\ndescription: é\n", "train {file}"),
    "base.yaml": ("description: é\n", "train {home}/over.yaml"),
    "sums.jsonl": (SUM, "train addition-quick --digits 1 --train_file {file} --out {home}/new"),
    "tests.jsonl": (SUM, "train addition-quick --digits 1 --test_file {file} --out {home}/new"),
    "chats.jsonl": (CHAT, "train ouro-tiny --data.source {file} --out {home}/new"),
    "folder/chats.jsonl": (CHAT, "train ouro-tiny --data.source {home}/folder --out {home}/new"),
    "a.txt": (TEXT, "eval {home}/model --text {file} --out {home}/out"),
    "text.jsonl": (ROW, "eval {home}/model --text {file} --out {home}/out"),
    "b.txt": (TEXT, "analyze {home}/model --text {file} --out {home}/out"),
    "b.md": (TEXT, "analyze {home}/model --text {file} --out {home}/out"),
    "text2.jsonl": (ROW, "analyze {home}/model --text {file} --out {home}/out"),
}


@pytest.mark.parametrize("encoding", [LATIN, UTF16])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_names_the_file(home, capsys, name, encoding):
    text, words = COMMANDS[name]
    file = home / encoding / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode(encoding))
    (home / encoding / "over.yaml").write_text("base: base.yaml\nmethod: sft\n")
    words = words.format(file=file, home=home / encoding).split()
    words = [word.replace(f"{encoding}/model", "model") for word in words]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"{file}: expected text in UTF-8, got" in said
    assert f"-f {'LATIN1' if encoding == LATIN else 'UTF-16'} -t UTF-8" in said
    assert "Traceback" not in said


def test_a_mark_is_no_part_of_the_text(home, tmp_path):
    from stars_fast.commands.eval_text import TextOptions, read_texts
    from stars_fast.data.addition import read_jsonl
    from stars_fast.training.recipes import read_recipe

    (tmp_path / "a.txt").write_bytes(TEXT.encode("utf-8-sig"))
    assert list(read_texts(TextOptions([], str(tmp_path / "a.txt"), [1]))) == [TEXT]
    (tmp_path / "s.jsonl").write_bytes(SUM.encode("utf-8-sig"))
    assert read_jsonl(tmp_path / "s.jsonl", 1).tolist() == [[1, 2]]
    (tmp_path / "r.yaml").write_bytes("description: é".encode("utf-8-sig"))
    assert read_recipe(str(tmp_path / "r.yaml")) == {"description": "é"}
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(ConfigError, match=re.escape("empty.yaml is empty: expected a mapping")):
        read_recipe(str(tmp_path / "empty.yaml"))
