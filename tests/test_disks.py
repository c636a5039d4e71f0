"""A disk that is full, or may not be written, ends a command in one line that names the path."""

import errno
import resource

import pytest
from mistakes import CHATS, RECIPE, write_models

from stars_fast.base.files import naming, write_text
from stars_fast.cli import main


@pytest.fixture
def full():
    """full(size): from now on the system refuses what goes beyond so many bytes in a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    (tmp_path / "chats.yaml").write_text(CHATS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(capsys):
    said = capsys.readouterr().err
    assert "Traceback" not in said
    (line,) = [line for line in said.split("\n") if line.startswith("stars-fast: ")]
    return line


def test_an_error_of_the_disk_names_the_path(tmp_path, full):
    full(10)
    with pytest.raises(OSError, match=r"File too large: .*a\.txt'") as caught:
        write_text(tmp_path / "a.txt", "x" * 100)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "a.txt"))
    with pytest.raises(FileNotFoundError, match="none"), naming("other"):
        (tmp_path / "none").read_text()


@pytest.mark.parametrize(
    ("size", "code", "words"),
    [
        (0, 2, "runs/tiny can't be written to: File too large"),
        (2100, 1, "the checkpoint of step 1 in runs/tiny/checkpoints could not be written"),
    ],
)
def test_a_run_on_a_full_disk(here, full, capsys, size, code, words):
    full(size)
    assert main(["train", "tiny.yaml"]) == code
    assert words in told(capsys)


def test_a_folder_that_may_not_be_written(here, capsys, monkeypatch):
    """The system's refusal is made here, since root may write everywhere."""
    from stars_fast.training.run import folder

    def refuse(path, *_):
        raise PermissionError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(folder, "save_config", lambda config, path: refuse(path))
    assert main(["train", "tiny.yaml"]) == 2
    assert told(capsys).endswith("runs/tiny can't be written to: Read-only file system")


@pytest.mark.slow
def test_a_cache_on_a_full_disk(here, full, capsys, monkeypatch):
    from stars_fast.data import tokenised

    real = tokenised._build
    monkeypatch.setattr(tokenised, "_build", lambda *arguments: full(200) or real(*arguments))
    assert main(["train", "chats.yaml"]) == 2
    assert "data.cache: can't write the tokens to cache/chats: " in told(capsys)
    assert not (here / "runs").exists()


def test_a_full_disk_for_temporary_files(here, full, capsys, monkeypatch):
    from stars_fast.models.families.ouro import OuroFamily

    real = OuroFamily.start
    monkeypatch.setattr("tempfile.tempdir", str(here))
    monkeypatch.setattr(OuroFamily, "start", lambda *given: full(100) or real(*given))
    assert main(["train", "chats.yaml"]) == 1
    assert told(capsys).startswith(f"stars-fast: {here}")


@pytest.mark.slow
def test_other_commands_on_a_full_disk(here, full, capsys):
    assert main(["train", "tiny.yaml"]) == 0
    write_models(here)
    (here / "wiki.txt").write_text("One and two are three. " * 20)
    capsys.readouterr()
    full(0)
    for words, code, path in (
        ("eval runs/tiny --turns 1 --limit 5 --out e", 1, "e/evaluation.json"),
        ("eval whole --text wiki.txt --turns 1 --out e", 1, "e/text-loss.json"),
        ("analyze runs/tiny --turns 2 --samples 2 --out e", 2, "--out: can't write to e"),
        ("export runs/tiny new", 2, "new: "),
        ("export whole new", 2, "new: "),
    ):
        assert main(words.split()) == code, words
        assert path in told(capsys)
        assert not (here / "new").exists()


def test_an_error_of_ours_has_its_traceback(here, monkeypatch):
    from stars_fast.commands import recipes

    def fail(number):
        def command(args):
            raise OSError(number, "it is so", "there")

        return command

    monkeypatch.setattr(recipes, "main", fail(errno.ENOENT))
    with pytest.raises(FileNotFoundError, match="it is so"):
        main(["recipes"])
    monkeypatch.setattr(recipes, "main", fail(errno.ENOSPC))
    assert main(["recipes"]) == 1
    monkeypatch.setenv("STARS_FAST_DEBUG", "1")
    with pytest.raises(OSError, match="it is so"):
        main(["recipes"])
    with pytest.raises(ValueError, match="no recipe"):
        main(["train", "nothing"])
