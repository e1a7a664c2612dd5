"""Recipes: TOML files, one per preset, with settings and the paper's results.

    task = "translation"                    # or: extends = "iwslt14-shen2020"
    norms = ["ln", "bn"]
    variants = [{ label = "a", norm = "pn", norm_options = { momentum = 0.05 } }]

    [about]                                 # what `powernorm recipes` lists; all optional
    summary = "De-En, small model"

    [optimizer]                             # and the other sections of the task's settings
    learning_rate = 1e-3

    [norm_options]
    pn = { groups = 4 }

    [[results]]                             # published results
    dataset = "IWSLT14 De-En"
    metric = "test_bleu"
    placement = "pre"
    source = "Shen et al. 2020, Table 1"
    values = { ln = 35.5, bn = "diverged" }

A recipe that extends another inherits its settings and results and may override them. TOML has
no null: write `"none"` if a setting is optional.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from pydantic import AllowInfNan

from powernorm.errors import InputError
from powernorm.files import package_folder
from powernorm.records import Placement
from powernorm_lab.recipes.paper_results import PaperResult
from powernorm_lab.runs import TASKS
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.overrides import build
from powernorm_lab.settings.section import Names, section
from powernorm_lab.tasks.registry import settings_of

EMBEDDED: Final = "embedded"
"""Value of `About.data` for a recipe that needs no files."""
_SIZES: Final = ("smoke", "demo", "full")
"""Presets that are listed first, in this order."""
_FOLDERS: Final = package_folder("powernorm_lab.tasks")
_NEITHER_SETTING: Final = ("task", "extends", "about", "results")


@section("about")
class About:
    """Description of a recipe for the list of recipes, and its relation to a paper."""

    summary: str = ""
    """Description in a few words."""
    data: str = EMBEDDED
    """`embedded`, or the official files and how to pass them to `--data`."""
    cost: str = ""
    """Rough cost of all its norms and seeds; says so if it is an estimate."""
    source: str = ""
    """Paper and table that it repeats."""
    stands_for: str | None = None
    """Full recipe that this one is a reduced version of."""
    note: str | None = None
    """Sentence about differences from the papers that do not depend on the data."""
    data_note: str | None = None
    """Sentence about the differences between its own data and the papers'."""
    results_of: Names | None = None
    """Recipes of the same task whose published results are shown with this one, too."""


@section("results")
class PrintedResults:
    """A row or column of a paper's table."""

    dataset: str
    """Name of the data set in the paper."""
    source: str
    """Paper and table."""
    values: Mapping[str, Annotated[float, AllowInfNan(True)] | Literal["diverged"]]
    """Values on the test split by short name or label of a variant; `inf` if the paper says so."""
    placement: Placement = "pre"
    """Placement of the norms."""
    metric: str = "test_perplexity"
    """Name of the run metric; perplexities are per word."""
    against: Names = ("ln",)
    """Rows that the paper compares these with."""

    def records(self) -> Iterator[PaperResult]:
        """Yield a result for each value."""
        for norm, value in self.values.items():
            yield PaperResult(
                norm,
                self.dataset,
                self.placement,
                None if isinstance(value, str) else float(value),
                self.source,
                self.metric,
                self.against,
            )


@dataclass(frozen=True)
class Recipe:
    """Settings, description and published results of a recipe."""

    name: str
    settings: ComparisonSettings
    about: About
    results: tuple[PaperResult, ...]
    """Published results for every placement."""
    path: Path


def _folder(task: str) -> Path:
    return _FOLDERS / task.replace("-", "_") / "recipes"


@cache
def paths_of(task: str) -> Mapping[str, Path]:
    """Return the files of a task's recipes by name, in the order of the list.

    Raises:
        InputError: unknown task; lists the known ones.
    """
    settings_of(task)
    found = {path.stem: path for path in sorted(_folder(task).glob("*.toml"))}
    first = [name for name in _SIZES if name in found]
    return MappingProxyType({name: found[name] for name in dict.fromkeys([*first, *found])})


def recipes_of(task: str) -> dict[str, Recipe]:
    """Return the recipes of a task by name.

    Raises:
        InputError: unknown task; lists the known ones.
    """
    return {name: named_recipe(task, name) for name in paths_of(task)}


def named_recipe(task: str, name: str) -> Recipe:
    """Return a recipe of powernorm.

    Raises:
        InputError: unknown task or recipe; lists the known ones.
    """
    paths = paths_of(task)
    if name not in paths:
        raise InputError(
            f"the task {task} has no preset {name!r}: choose one of {', '.join(paths)}"
        )
    return _read(paths[name])


def find_recipe(name: str, near: Path | None = None) -> Path:
    """Return the file of a recipe by `TASK/NAME`, by NAME if it is unique, or by its path.

    Args:
        name: name or path of the recipe.
        near: file whose folder relative paths start from; None means the working directory.

    Raises:
        InputError: no recipe has the name, or several have it.
    """
    if name.endswith(".toml"):
        path = Path(name) if near is None else near.parent / name
        if not path.is_file():
            raise InputError(f"{path} does not exist: give the path of a recipe")
        return path
    task, slash, stem = name.rpartition("/")
    found = [paths_of(one)[stem] for one in ([task] if slash else TASKS) if stem in paths_of(one)]
    if len(found) == 1:
        return found[0]
    if found:
        tasks = ", ".join(f"{task_of_path(path)}/{stem}" for path in found)
        raise InputError(f"there are several recipes {stem!r}: choose one of {tasks}")
    raise InputError(f"there is no recipe {name!r}: `powernorm recipes` lists them")


def task_of_path(path: Path) -> str:
    """Return the task of a recipe of powernorm by the path of its file."""
    return path.parents[1].name.replace("_", "-")


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from any file.

    Raises:
        InputError: the file cannot be read, extends a recipe that does not exist, or has a setting
            that its task does not know.
    """
    return _read(path)


@cache
def _read(path: Path) -> Recipe:
    try:
        return _recipe(path.stem, _merged(path, ()), path)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def changed_recipe(name: str, task: str, values: Mapping[str, Any], path: Path) -> Recipe:
    """Build a recipe from one of several tables in a file, with its base's description and results.

    Args:
        name: name of the new recipe.
        task: task of both recipes.
        values: table in the format of a recipe's file; `extends` names a recipe of the task.
        path: file with the table.

    Raises:
        InputError: a value cannot be used; the message names file and setting.
    """
    try:
        base = _merged(_extended(path, str(values["extends"]), task), ())
        said: dict[str, Any] = {key: base[key] for key in ("about", "results") if key in base}
        if "results" in values and "about" in said:
            said["about"] = {k: v for k, v in said["about"].items() if k != "results_of"}
        whole = {"task": task, **laid_over(said, values)}
        return _recipe(name, _completed(whole, path, ()), path)
    except InputError as error:
        raise InputError(f"{path}: {name}: {error}") from None


def _recipe(name: str, values: Mapping[str, Any], path: Path) -> Recipe:
    about = build(About, values.get("about", {}), "about.")
    settings = build(
        settings_of(str(values["task"])),
        {key: item for key, item in values.items() if key not in _NEITHER_SETTING}
        | {"preset": name},
    )
    results = [build(PrintedResults, item, "results.") for item in values.get("results", [])]
    printed = [number for rows in results for number in rows.records()]
    for other in about.results_of or ():
        printed += named_recipe(settings.task, other).results
    return Recipe(name, settings, about, tuple(printed), path)


def _merged(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """Return the values of a file merged over the recipe that it extends."""
    return _completed(load_toml(path), path, above)


def _completed(values: dict[str, Any], path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """Return the values of a table merged over the recipe that it extends."""
    if values.get("variants") and "norms" not in values:
        values["norms"] = _norms_of(values["variants"])
    base_name = values.get("extends")
    if base_name is None:
        if not isinstance(values.get("task"), str):
            raise InputError("it has neither a task nor a base: set task or extends")
        return values
    base_path = _extended(path, str(base_name), values.get("task"))
    if base_path in (path, *above):
        raise InputError(f"extends={base_name} is circular: remove one of the extends")
    base = _merged(base_path, (path, *above))
    task = values.get("task", base["task"])
    if task != base["task"]:
        raise InputError(f"task={task}: it extends {base_name}, a recipe of {base['task']}")
    kept = {key: item for key, item in base.items() if key != "about"}
    if "results" in values or "results_of" in values.get("about", {}):
        kept.pop("results", None)
    elif "results_of" in base.get("about", {}):
        values.setdefault("about", {})["results_of"] = base["about"]["results_of"]
    return laid_over(kept, values)


def _norms_of(variants: Any) -> list[str]:
    """Return the norms of variants, which are all trained if a file has no `norms`.

    The settings later refuse a value that is not a list of variants.
    """
    items = variants if isinstance(variants, list) else []
    named = [item.get("norm") for item in items if isinstance(item, dict)]
    return list(dict.fromkeys(norm for norm in named if isinstance(norm, str)))


def _extended(path: Path, name: str, task: object) -> Path:
    """Return the file that a recipe extends: next to it, of its own task, or any."""
    if "/" not in name and not name.endswith(".toml"):
        beside = path.with_name(f"{name}.toml")
        if beside.is_file() and beside != path:
            return beside
        if isinstance(task, str) and name in paths_of(task):
            return paths_of(task)[name]
    return find_recipe(name, path)


def laid_over(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested tables; values of `own` override those of `base`."""
    merged = dict(base)
    for key, value in own.items():
        below = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = laid_over(below, value) if both else value  # type: ignore[arg-type]
    return merged


def load_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        InputError: it cannot be read, or is not valid TOML.
    """
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror}): give the path of a recipe") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not valid TOML ({error})") from None
