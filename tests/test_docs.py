"""The documentation site builds without a warning and without a network, and is complete."""

import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

import stars_fast

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for module in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(module)
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return out


def test_every_public_name_has_an_entry(site):
    *_, names = (site / "objects.inv").read_bytes().split(b"\n", 4)
    entries = {}
    for line in zlib.decompress(names).decode().splitlines():
        name, _, _, address, _ = line.split(" ", 4)
        entries[name] = address
    for name in stars_fast.__all__:
        page = entries[f"stars_fast.{name}"].partition("#")[0]
        assert page.startswith("api/")
        assert f'id="stars_fast.{name}"' in (site / page).read_text()


def test_every_page_is_in_the_navigation():
    yaml = pytest.importorskip("yaml")

    def leaves(entry):
        if isinstance(entry, str):
            return [entry]
        parts = entry.values() if isinstance(entry, dict) else entry
        return [leaf for part in parts for leaf in leaves(part)]

    nav = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    log = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("benchmarks/log/*.md")]
    assert sorted(nav) == sorted([*pages, *log, "CHANGELOG.md", "benchmarks/README.md"])


def test_the_reader_fetches_nothing(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(?:https?:)?//', text)
    for style in site.rglob("*.css"):
        assert not re.findall(r"url\(['\"]?(?:https?:)?//", style.read_text())


def test_the_search_works_from_a_disk(site):
    """There a page may fetch nothing and start no worker: the index is a script, and a frame of the
    page stands for the worker."""
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = {")
    shim = re.compile(r'<script src="((?:\.\./)*assets/iframe-worker\.js)"')
    for page in (site / "index.html", site / "guides" / "plan.html"):
        (address,) = shim.findall(page.read_text())
        assert (page.parent / address).exists()


def test_the_table_of_knobs_is_counted(site):
    page = (site / "guides" / "knobs.html").read_text()
    assert "<!-- knobs -->" not in page
    assert page.count("tensor cores") > 5
    assert "--train.backprop_turns 4" in page


def test_messages_on_the_page_of_errors_are_those_of_the_code():
    code = " ".join(path.read_text() for path in (ROOT / "stars_fast").rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # a message goes over several lines
    found = re.findall(r"(?m)^\| `([^`]+)`", (DOCS / "errors.md").read_text())
    assert len(found) > 25
    assert not [message for message in found if message not in code]


def test_formulas_are_mathml(site):
    assert (site / "mathematics.html").read_text().count("<math") > 100
    for page in site.rglob("*.html"):
        assert "arithmatex" not in page.read_text(), page


def test_parts_of_the_readme_are_in(site):
    home = (site / "index.html").read_text()
    assert "fused_jsrr" in home
    assert "over the plain block" in home
    for page in site.rglob("*.html"):
        assert "<!-- README" not in page.read_text(), page


def blocks(page, language):
    text = (DOCS / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


EXAMPLES = sorted(
    page
    for page in (path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    if blocks(page, "python")
)


@pytest.mark.parametrize("page", EXAMPLES)
def test_python_examples(page, tmp_path, monkeypatch):
    """The blocks of a page, one after the other; those that want the reader's data compile."""
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in blocks(page, "python"):
        if "ByteDance/Ouro-1.4B" in code:
            pytest.importorskip("transformers")
            from stars_fast.models.ouro.tiny import write_tiny_ouro

            tiny = tmp_path / "tiny"
            if not tiny.exists():
                write_tiny_ouro(tiny, remote_code=False)
            code = code.replace("ByteDance/Ouro-1.4B", str(tiny))
        if "tomg-group-umd/huginn-0125" in code:
            pytest.importorskip("transformers")
            from stars_fast.models.huginn.tiny import write_tiny_huginn

            tiny = write_tiny_huginn(tmp_path / "huginn")
            code = code.replace("tomg-group-umd/huginn-0125", str(tiny))
        if "HuggingFaceTB/SmolLM2-135M" in code:
            pytest.importorskip("transformers")
            from decoder_models import decoder

            from stars_fast.data.tiny_tokenizer import (
                TINY_VOCABULARY,
                train_tokenizer,
                write_tokenizer,
            )

            tiny = tmp_path / "smollm"
            decoder("llama", torch.float32, num_hidden_layers=30).save_pretrained(tiny)
            write_tokenizer(tiny, train_tokenizer(TINY_VOCABULARY), 256)
            code = code.replace("HuggingFaceTB/SmolLM2-135M", str(tiny))
        if "TinyLlama" in code:
            pytest.importorskip("transformers")
            from decoder_models import decoder

            tiny = tmp_path / "tinyllama"
            decoder("llama", torch.float32, num_hidden_layers=22).save_pretrained(tiny)
            code = re.sub(r"TinyLlama/[\w.-]+", str(tiny), code)
        if "ouro-stars" in code:
            pytest.importorskip("transformers")
            from stars_fast.models.export import export_run
            from stars_fast.models.ouro.tiny import write_tiny_ouro

            tiny = write_tiny_ouro(tmp_path / "whole")
            export_run(tiny, tmp_path / "ouro-stars", portable=True)
        if "huginn-stars" in code:
            pytest.importorskip("transformers")
            from stars_fast.models.export import export_run
            from stars_fast.models.huginn.tiny import write_tiny_huginn

            tiny = write_tiny_huginn(tmp_path / "whole")
            export_run(tiny, tmp_path / "huginn-stars", portable=True)
        if "smollm2-stars" in code:
            pytest.importorskip("transformers")
            from stars_fast.models.export import export_run
            from stars_fast.models.families.looped_decoder import FAMILY

            model, tokenizer = FAMILY.start(FAMILY.section(path="tiny"), torch.float32, 0)
            for part in (model, tokenizer):
                part.save_pretrained(tmp_path / "looped")
            export_run(tmp_path / "looped", tmp_path / "smollm2-stars", portable=True)
        compiled = compile(code, page, "exec")
        if "train_dataset" not in code:
            exec(compiled, names)


def test_the_recipe_of_the_page_loads(tmp_path):
    from stars_fast.training.config import load_config

    (text,) = blocks("guides/recipes.md", "yaml")
    path = tmp_path / "weak.yaml"
    path.write_text(text)
    config = load_config(str(path))
    assert (config.name, config.penalty.weight, config.depth.law) == ("weak", 0.05, "poisson")
    assert config.model.norm == "rmsnorm"
