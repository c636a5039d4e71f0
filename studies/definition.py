"""Definition of a study: YAML read into runs with a label and a configuration each.

    title, asks         one line each
    panels              the factor that the figure has one panel for each level of; none for one
    findings            names of `findings.FINDINGS` that the numbers are held against
    judged              fields of `judging.Judged`, where runs on sums are asked for more
    reference           label of the runs whose cost those of the others are measured by; with it
                        the table has what holds at all turns, and the costs
    against             {factor: level}: the settings beside which the others with the same other
                        levels are put, seed by seed
    runs                products of factors: {factor: {level: fields of the configuration}}
    scales              quick, paper or both: a recipe (`base`), `settings` on top of it, and `runs`
                        in the place of the shared ones where they differ

A run of a product takes one level of each factor.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from stars_fast.base import tree
from stars_fast.base.choices import merge_settings
from stars_fast.base.errors import ConfigError
from stars_fast.base.unique_keys import parse_yaml
from stars_fast.training.config import RunConfig, config_from, parse_overrides
from stars_fast.training.recipes import read_recipe
from studies.findings import FINDINGS
from studies.judging import USUAL, Judged

SCALES = ("quick", "paper")
OWN = ("seed", "out", "name")
"""Fields that the study sets for each run."""


_OPTIONAL = {"panels", "findings", "runs", "judged", "reference", "against"}


class StudyCell(NamedTuple):
    """One of the compared settings: the level of each factor, and the fields they stand for."""

    levels: dict[str, str]
    fields: dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """A size of a study.

    base: the recipe that all runs start from.
    settings: fields that differ from it in all runs.
    """

    base: str
    settings: dict[str, Any]
    cells: list[StudyCell]


@dataclass(frozen=True)
class Study:
    """A study as its YAML says it; `asks` is the question, `panels` the figure's factor,
    `reference` the label of the runs that costs are measured by, None without, and `against` the
    levels of the settings that others are put beside, empty without."""

    name: str
    title: str
    asks: str
    panels: str | None
    findings: tuple[str, ...]
    scales: dict[str, Scale]
    judged: Judged = USUAL
    reference: str | None = None
    against: Mapping[str, str] = field(default_factory=dict)

    def at(self, scale: str) -> Scale:
        """The study at a scale.

        Raises:
            ConfigError: it has none of that name.
        """
        if scale not in self.scales:
            raise ConfigError(
                f"study {self.name}: scale: expected one of {', '.join(self.scales)}, got {scale}"
            )
        return self.scales[scale]


@dataclass(frozen=True)
class StudyRun:
    """A run of a study.

    levels: the level of each factor.
    overrides: the fields that set it apart from the other runs, by dotted path.
    judged: how it is judged.
    """

    levels: dict[str, str]
    seed: int
    overrides: dict[str, Any]
    config: RunConfig
    judged: Judged = USUAL

    @property
    def label(self) -> str:
        """The levels in a line."""
        return label_of(self.levels)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(str(self.config.out))


def label_of(levels: Mapping[str, str]) -> str:
    """The levels of a run in a line."""
    return ", ".join(levels.values())


def study_names() -> list[str]:
    """Names of the studies of the package, sorted."""
    files = Path(__file__).parent.iterdir()
    return sorted(file.name[:-5] for file in files if file.name.endswith(".yaml"))


def read_study(name: str) -> Study:
    """The study of that name.

    Raises:
        ConfigError: there is none, or if it is not well formed.
    """
    names = study_names()
    if name not in names:
        raise ConfigError(f"no study named {name!r}; studies: {', '.join(names)}")
    text = Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8")
    return parse_study(name, parse_yaml(text))


def parse_study(name: str, mapping: Mapping[str, Any]) -> Study:
    """A study from the mapping of its YAML.

    Raises:
        ConfigError: a key that is missing or unknown, an unknown finding, a factor of `panels` that
            not all runs have, levels of `against` that none has, or two runs with one label.
    """
    _check_keys(name, mapping, {"title", "asks", "scales"}, _OPTIONAL)
    scales = {}
    for scale, part in mapping["scales"].items():
        if scale not in SCALES:
            raise ConfigError(f"study {name}: scales: expected names of {SCALES}, got {scale!r}")
        _check_keys(f"{name}, {scale}", part, {"base"}, {"settings", "runs"})
        runs = part.get("runs", mapping.get("runs"))
        if not runs:
            raise ConfigError(f"study {name}: runs is missing at scale {scale}")
        scales[scale] = Scale(part["base"], part.get("settings", {}), _cells(runs))
    study = Study(
        name,
        mapping["title"],
        mapping["asks"],
        mapping.get("panels"),
        tuple(mapping.get("findings", ())),
        scales,
        _judged(name, mapping.get("judged", {})),
        mapping.get("reference"),
        mapping.get("against", {}),
    )
    if not isinstance(study.against, Mapping):
        raise ConfigError(
            f"study {name}: against: expected a mapping of factors to levels, got {study.against!r}"
        )
    for finding in study.findings:
        if finding not in FINDINGS:
            raise ConfigError(
                f"study {name}: findings: expected names of {', '.join(FINDINGS)}, got {finding!r}"
            )
    for scale, part in scales.items():
        if study.panels and not all(study.panels in cell.levels for cell in part.cells):
            raise ConfigError(
                f"study {name}: panels: expected a factor of all runs, got {study.panels}"
            )
        labels = [label_of(cell.levels) for cell in part.cells]
        if study.reference is not None and study.reference not in labels:
            raise ConfigError(
                f"study {name}: reference: expected the label of a run, got {study.reference!r}"
            )
        known = [cell.levels.items() for cell in part.cells]
        if not any(study.against.items() <= levels for levels in known):
            raise ConfigError(
                f"study {name}: against: expected levels of a run, got {dict(study.against)}"
            )
        slugs = [_slug(label_of(cell.levels)) for cell in part.cells]
        if len(set(slugs)) < len(slugs):
            raise ConfigError(f"study {name}: two runs have one label at scale {scale}")
    return study


def _judged(name: str, mapping: Mapping[str, Any]) -> Judged:
    _check_keys(f"{name}, judged", mapping, set(), set(Judged._fields))
    return Judged(**mapping)


def _cells(products: Sequence[Mapping[str, Mapping[str, Mapping[str, Any]]]]) -> list[StudyCell]:
    """Cells of the products under `runs` in a YAML."""
    cells = []
    for factors in products:
        for levels in product(*factors.values()):
            named = dict(zip(factors, levels, strict=True))
            fields: dict[str, Any] = {}
            for factor, level in named.items():
                fields = tree.merge(fields, factors[factor][level])
            cells.append(StudyCell(named, fields))
    return cells


def _check_keys(where: str, mapping: Any, needed: set[str], known: set[str]) -> None:
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"study {where}: expected a mapping, got {mapping!r}")
    missing, unknown = needed - mapping.keys(), mapping.keys() - needed - known
    if missing:
        raise ConfigError(f"study {where}: {', '.join(sorted(missing))} is missing")
    if unknown:
        raise ConfigError(f"study {where}: " + tree.unknown(min(unknown), needed | known))


def study_runs(
    study: Study,
    scale: str,
    out: str | Path,
    seeds: Sequence[int] = (0,),
    words: Sequence[str] = (),
) -> list[StudyRun]:
    """The runs of `study`, seed by seed, with their folders in `out`.

    `words` are command-line overrides ("--train.steps", "200") for all of them.

    Raises:
        ConfigError: the study has no such scale, a field in `words` that it sets for each run by
            itself, and as `config_from`, with the run's label.
    """
    part = study.at(scale)
    base = read_recipe(part.base)
    everywhere = parse_overrides(words, base)
    varied = {path for cell in part.cells for path in tree.flat_mapping(cell.fields)}
    for path in tree.flat_mapping(everywhere):
        if path in OWN:
            raise ConfigError(f"--{path} is set by the study; see --seeds and --out")
        if path in varied:
            raise ConfigError(f"--{path} is what the runs of the study {study.name} differ in")
    shared = merge_settings(merge_settings(base, part.settings), everywhere)
    shared.pop("description", None)
    runs = []
    for seed in seeds:
        for cell in part.cells:
            name = f"{_slug(label_of(cell.levels))}-{seed}"
            place = {"seed": seed, "name": name, "out": str(Path(out) / name)}
            try:
                config = config_from(merge_settings(shared, cell.fields) | place)
            except ConfigError as error:
                raise ConfigError(f"{study.name}, {label_of(cell.levels)}: {error}") from error
            flat = tree.flat_mapping(cell.fields)
            runs.append(StudyRun(cell.levels, seed, flat, config, study.judged))
    return runs


def _slug(label: str) -> str:
    """The label as a folder's name."""
    return re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-")
