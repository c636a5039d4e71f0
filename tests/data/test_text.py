"""Plain text as data."""

from types import SimpleNamespace

import pytest

from stars_fast.data.kinds.text import KIND, TextSection


class Letters:
    """A tokenizer of letters."""

    bos_token_id, pad_token_id = 0, 1

    def __call__(self, text, **options):
        return SimpleNamespace(input_ids=[ord(letter) for letter in text])


@pytest.mark.parametrize("source", ["~/a.txt", "~/*.txt"])
def test_the_home_folder_is_found(source, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("abc")
    found = KIND.open(TextSection(source, length=3), Letters(), seed=0)
    assert found.notes == ("data: 2 windows of text, 5 tokens",)
