"""docs/from-the-published-code.md names fields and recipes that exist."""

import re
from pathlib import Path

import pytest

from stars_fast.base import tree
from stars_fast.base.choices import TASKS
from stars_fast.training.config import config_class, load_config

PAGE = (Path(__file__).parents[2] / "docs" / "from-the-published-code.md").read_text()
FIELDS = {path for pair in TASKS.values() for path in tree.leaves(config_class(*pair))}
SECTIONS = {path.partition(".")[0] for path in FIELDS if "." in path}


def named_fields():
    """Paths in code quotes; `.field` is of the section named before it in the line."""
    for line in PAGE.splitlines():
        section = None
        for quoted in re.findall(r"`([a-z_]*\.[a-z_]+)(?:: [^`]*)?`", line):
            before, _, field = quoted.rpartition(".")
            section = before or section
            if section in SECTIONS and field != "py":
                yield f"{section}.{field}"


def test_fields_exist():
    named = set(named_fields())
    assert len(named) > 40
    assert named <= FIELDS, sorted(named - FIELDS)


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"\b(?:ouro|addition)(?:-[a-z]+)+\b", PAGE)))
)
def test_recipes_exist(name):
    assert load_config(name).name == name


def test_the_recipe_of_the_page_loads(tmp_path):
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "like-published.yaml"
    path.write_text(text)
    config = load_config(str(path))
    assert (config.precision, config.optim.schedule, config.seed) == ("bfloat16", "wsd", 74)
    assert (config.data.max_length, config.optim.min_lr_ratio) == (2049, 0.001)
