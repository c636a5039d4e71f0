"""What the site takes from elsewhere in the repository, and its mathematics.

Pages that live elsewhere (changelog, benchmarks) join the site as they are; parts of the README
come in by their headings, and predicted costs from the cost model; formulas become MathML, which
browsers show without a script; dataclasses that list their fields as `name: text` get a table of
them.
"""

import html
import re
import sys
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ELSEWHERE = (
    "CHANGELOG.md",
    "benchmarks/README.md",
    "benchmarks/log/*.md",
    "benchmarks/results/**/*.*",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that live outside of docs/, under their own paths."""
    for pattern in ELSEWHERE:
        for path in sorted(ROOT.glob(pattern)):
            source = path.relative_to(ROOT).as_posix()
            if path.suffix != ".md" or not source.startswith("benchmarks/results"):
                files.append(File.generated(config, source, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put in parts of the README, and link the results that the benchmarks name."""
    if page.file.src_uri.startswith("benchmarks/log/"):
        return re.sub(r"`(results/[\w./-]+\.(?:jsonl?|png))`", r"[`\1`](../\1)", markdown)
    if "<!-- knobs -->" in markdown:
        markdown = markdown.replace("<!-- knobs -->", _knobs())
    up = "../" * page.file.src_uri.count("/")
    return re.sub(r"(?m)^<!-- README: (.+) -->$", lambda m: _part(m[1], up), markdown)


def _knobs() -> str:
    """The table of costs, counted anew by the cost model of this commit."""
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks.knobs import markdown
    finally:
        sys.path.pop(0)
    return markdown()


def _part(heading: str, up: str) -> str:
    """The text under a heading of the README, under its title for "top"; `up` leads from the page
    to the root of the site."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    top, *rest = re.split(r"^##? (.+)\n", text, flags=re.MULTILINE)[2:]
    parts = {"top": top, **dict(zip(rest[::2], rest[1::2], strict=True))}
    if heading not in parts:
        raise PluginError(f"README.md has no heading {heading!r}; it has {', '.join(parts)}")
    part = re.sub(r"`(benchmarks/README\.md)`", r"[benchmarks](\1)", parts[heading])
    return re.sub(r"\]\((?:docs/|(?=benchmarks/))", f"]({up}", part).strip()


def on_page_content(content: str, **_: Any) -> str:
    """LaTeX, as arithmatex marks it, to MathML."""
    content = re.sub(
        r'<div class="arithmatex">\\\[(.*?)\\\]</div>',
        lambda m: convert(html.unescape(m[1]), display="block"),
        content,
        flags=re.DOTALL,
    )
    return re.sub(
        r'<span class="arithmatex">\\\((.*?)\\\)</span>',
        lambda m: convert(html.unescape(m[1])),
        content,
        flags=re.DOTALL,
    )


class Fields(griffe.Extension):
    """Fields listed as `name: text` in the docstring of a class, as a section of attributes."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Put the lists under a title that the parser knows."""
        if cls.docstring is not None:
            names = set(cls.members)
            paragraphs = cls.docstring.value.split("\n\n")
            cls.docstring.value = "\n\n".join(_as_section(each, names) for each in paragraphs)


def _as_section(paragraph: str, names: set[str]) -> str:
    """A list of fields among `names` as a section of a docstring; other paragraphs as they are."""
    found = re.finditer(r"(?:^|(?<=[.;] ))(\w+(?:, \w+)*): ", paragraph, flags=re.MULTILINE)
    starts = [match.start() for match in found if names.issuperset(match[1].split(", "))]
    if not starts or starts[0] != 0:
        return paragraph
    fields = (paragraph[a:b].split() for a, b in zip(starts, [*starts[1:], None], strict=True))
    return "\n".join(["Attributes:", *("    " + " ".join(words) for words in fields)])
