"""A mistake in what the command line is given ends in one line that names it, and exit code 2."""

import datasets
import huggingface_hub
import pytest
from mistakes import COMMANDS, DATA, SETTINGS, write_files, write_models

from stars_fast.cli import main


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    write_files(folder)
    return folder


@pytest.fixture(scope="module")
def models(files):
    write_models(files)
    return files


@pytest.fixture
def refused(files, monkeypatch, capsys):
    """refused(words, message): the command says that and nothing else of a mistake."""
    monkeypatch.chdir(files)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", files / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def check(words, message):
        before = set(files.rglob("*"))
        try:
            code = main(words.split())
        except SystemExit as exit:  # of argparse
            code = exit.code
        said = capsys.readouterr().err.rstrip().split("\n")
        mistakes = [
            line for line in said if line.startswith("stars-fast") and "warning" not in line
        ]
        assert len(mistakes) == 1, said
        assert message in mistakes[0]
        assert mistakes[0] == said[-1]
        assert code == 2
        if words.startswith("train"):
            made = {path.relative_to(files).parts[0] for path in set(files.rglob("*")) - before}
            assert made <= {"cache", "datasets"}, "a run that did not begin leaves no folder"

    return check


@pytest.mark.parametrize("words", SETTINGS)
def test_settings(refused, words):
    refused(words, SETTINGS[words])


@pytest.mark.slow
@pytest.mark.parametrize("words", DATA)
def test_files(models, refused, words):
    refused(words, DATA[words])


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS)
def test_commands(models, refused, words):
    refused(words, COMMANDS[words])


def test_there_are_many():
    assert len({*SETTINGS, *DATA, *COMMANDS}) >= 200
