"""`powernorm verify`: whether the files of runs, saved models and caches are as they were written.

Checkpoints, averaged weights, saved models and what the cache keeps are compared with the
checksums in them. JSON, CSV and tables of translations have none; they are read, as the commands
that need them would do.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from powernorm.errors import InputError, printable
from powernorm.files import check_regular
from powernorm.runs import MODEL_FILE, RESULTS_FILE
from powernorm.zip_reading import DAMAGES, open_zip

DAMAGED: Final = 1
"""Exit code where a file is damaged."""
_CACHE_ENTRY: Final = re.compile(r"[0-9a-f]{32}\.(tokens\.pt|tokenizer\.json)")
_STORE_SUFFIX: Final = ".pairs"
_RESUME: Final = "remove the line, or go on with `powernorm compare … --resume`, which does that"
_RESTORE: Final = "restore the file, or delete it and make it again"
_RETRAIN: Final = "remove the run's folder to train it anew"
_RENEWED: Final = "remove it, it is made anew when it is needed"


@dataclass
class Findings:
    """What became of the files."""

    num_checked: int = 0
    without_checksum: list[str] = field(default_factory=list)
    """Those that could have one, but were written before there were any."""
    damaged: dict[str, str] = field(default_factory=dict)
    """What is wrong and what to do, by file."""


def verify(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER…",
            help="Runs, comparisons, saved models, single files, or the cache (~/.cache/powernorm "
            "or POWERNORM_CACHE).",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Say it as one JSON object.")] = False,
) -> None:
    """Check files against their checksums, and whether what has none can be read.

    Ends with exit code 1 where a file is damaged.
    """
    findings = check_files(paths)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "checked": findings.num_checked,
                    "without_checksum": findings.without_checksum,
                    "damaged": findings.damaged,
                },
                indent=2,
            )
        )
    else:
        _print(findings)
    if findings.damaged:
        raise typer.Exit(DAMAGED)


def check_files(paths: Sequence[Path]) -> Findings:
    """Check files, and what is in folders.

    Raises:
        InputError: there is nothing to check in one of them.
    """
    findings = Findings()
    for path in paths:
        before = findings.num_checked
        _verify(path, findings)
        if findings.num_checked == before:
            raise InputError(
                f"{path} holds nothing to verify: give a run, a comparison, a checkpoint, a saved "
                "model or the cache"
            )
    return findings


def _print(findings: Findings) -> None:
    for problem in findings.damaged.values():
        typer.echo(f"damaged: {printable(' '.join(problem.split()))}")
    count, older = findings.num_checked, len(findings.without_checksum)
    parts = [f"{count} {'file' if count == 1 else 'files'} checked"]
    parts.append(f"{len(findings.damaged)} damaged")
    if older:
        parts.append(f"{older} without a checksum, from before files had one")
    typer.echo(", ".join(parts))


def _verify(path: Path, findings: Findings) -> None:
    if path.is_file():
        _verify_file(path, findings)
        return
    if not path.is_dir():
        raise InputError(f"{path} does not exist: give a folder or a file")
    comparisons = []
    for place, folders, names in os.walk(path):
        folder = Path(place)
        # Hidden: what a process is writing, or was when it was killed.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if folder.suffix == _STORE_SUFFIX:
            folders.clear()
            findings.num_checked += len(names)
            _note(folder, findings, partial(_check_store, folder))
            continue
        for name in sorted(names):
            if not name.startswith("."):
                _verify_file(folder / name, findings)
        if RESULTS_FILE in names:
            comparisons.append(folder)
    for folder in comparisons:
        _verify_together(folder, findings)
    if not (path / MODEL_FILE).is_file():  # a saved model is checked without the extra `train`
        _verify_sets(path, findings)


def _verify_file(path: Path, findings: Findings) -> None:
    check = _check_of(path)
    if check is not None:
        findings.num_checked += 1
        _note(path, findings, partial(_checked, check, path))


def _checked(check: Callable[[Path], str | None], path: Path) -> str | None:
    check_regular(path)
    return check(path)


def _note(path: Path, findings: Findings, check: Callable[[], str | None]) -> None:
    """Write down what a check says: an error, or `unsealed`."""
    try:
        if check() == "unsealed":
            findings.without_checksum.append(str(path))
    except InputError as error:
        findings.damaged[str(path)] = str(error)
    except OSError as error:
        findings.damaged[str(path)] = f"{path} cannot be read ({error.strerror})"


def _check_of(path: Path) -> Callable[[Path], str | None] | None:
    """Return what checks a file; None for a kind that is none of ours."""
    if _CACHE_ENTRY.fullmatch(path.name):
        return _check_entry
    by_name = {
        "metrics.csv": _check_log,
        "norms.csv": _check_log,
        "translations.tsv": _check_translations,
        "diagnosis.json": _check_diagnosis,
        "config.json": _check_config,
        "result.json": _check_result,
        "subwords.json": _check_subwords,
    }
    by_suffix = {
        ".ckpt": _check_checkpoint,
        ".pt": _check_archive,
        ".safetensors": _check_safetensors,
        ".json": _check_json,
        ".jsonl": _check_json_lines,
    }
    return by_name.get(path.name) or by_suffix.get(path.suffix.lower())


# Files with a checksum ---------------------------------------------------------------------------


def _check_checkpoint(path: Path) -> str:
    from powernorm.checksums import check_seal
    from powernorm.lab.training.checkpoints import read_checkpoint

    seal = check_seal(path, _RETRAIN)
    if seal == "unsealed":
        read_checkpoint(path)
    return seal


def _check_archive(path: Path) -> str:
    from powernorm.checksums import check_seal

    if check_seal(path, _RESTORE) == "whole":
        return "whole"
    try:
        with path.open("rb") as file, open_zip(file) as archive:
            damaged = archive.testzip()
    except DAMAGES as error:
        raise InputError(f"{path} is no archive of torch ({error}): {_RESTORE}") from error
    if damaged is not None:
        raise InputError(f"{path} is damaged in {damaged}: {_RESTORE}")
    return "unsealed"


def _check_safetensors(path: Path) -> str:
    from safetensors import SafetensorError, safe_open

    from powernorm.surgery.storage import read_model

    if path.name == MODEL_FILE:
        read_model(path.parent)
        return "whole"

    from powernorm.checksums import check_seal
    from powernorm.lab.engine.averaging import read_weights
    from powernorm.lab.tasks.trained_models import is_checkpoint

    seal = check_seal(path, _RETRAIN if is_checkpoint(path) else _RESTORE)
    if seal == "whole":
        return seal
    if is_checkpoint(path):
        read_weights(path)
        return seal
    try:
        with safe_open(path, "pt"):
            return seal
    except SafetensorError as error:
        raise InputError(f"{path} is damaged ({error}): {_RESTORE}") from error


def _check_entry(path: Path) -> str:
    from powernorm.lab.data.cache import entry_seal

    seal = entry_seal(path)
    if seal == "damaged":
        raise InputError(f"{path} is damaged, its bytes do not have their checksum: {_RENEWED}")
    if seal == "unsealed" and path.suffix == ".json":
        from powernorm.json_reading import read_json_object

        read_json_object(path, _RENEWED)
    elif seal == "unsealed":
        _check_archive(path)
    return seal


def _check_store(folder: Path) -> None:
    """Check a folder of encoded sentence pairs, whose manifest has the sums of its files."""
    from powernorm.lab.tasks.translation.store import read_facts

    read_facts(folder)


def _verify_sets(path: Path, findings: Findings) -> None:
    """Check the fetched data sets of the cache, whose sums are known."""
    from powernorm.lab.data.sets import folders
    from powernorm.lab.data.sets.catalog import SETS

    inside = [path.resolve(), *path.resolve().parents]
    outside = folders.sets_folder().resolve()
    for entry in SETS.values():
        if entry.home != "fetched":
            continue
        folder = outside / entry.name
        is_asked_for = folder in inside or path.resolve() in folder.parents
        if is_asked_for and folders.state_of(entry, thorough=False) != "absent":
            findings.num_checked += len(folders.wheel_of(entry).members)
            damage = folders.damage(entry)
            if damage:
                findings.damaged[str(folder)] = (
                    f"{damage}: run `powernorm data get {entry.name}`, which fetches it again"
                )


# Files that are read -----------------------------------------------------------------------------


def _check_json(path: Path) -> None:
    from powernorm.json_reading import read_json

    read_json(path, _RESTORE)


def _check_json_lines(path: Path) -> None:
    from powernorm.json_reading import parse_json

    for number, line in _lines(path):
        parse_json(line, str(path), _RESTORE, line=number)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        yield from enumerate(file, start=1)


def _check_config(path: Path) -> None:
    from powernorm.json_reading import read_json_object
    from powernorm.runs import TASKS

    settings = read_json_object(path, _RESTORE)
    if settings.get("task") in TASKS:
        from powernorm.lab.tasks.trained_models import run_config

        try:
            run_config(settings)
        except KeyError as error:
            raise InputError(f"{path} lacks {error}: {_RESTORE}") from error
        except InputError as error:
            raise InputError(f"{path}: {error}; {_RESTORE}") from error


def _check_result(path: Path) -> None:
    from powernorm.lab.engine.folders import read_result
    from powernorm.lab.removal.removing import REMOVAL_FILE

    if (path.parent / REMOVAL_FILE).is_file():
        _check_json(path)  # what a removal came to, which is no run
    else:
        read_result(path.parent)


def _check_subwords(path: Path) -> None:
    from powernorm.lab.tasks.translation.vocabulary_files import read_vocabulary

    read_vocabulary(path)


def _check_diagnosis(path: Path) -> None:
    from powernorm.lab.report import read_diagnosis

    read_diagnosis(path)


def _check_log(path: Path) -> None:
    from powernorm.lab.report.logs import read_metrics, read_norms

    if path.name == "metrics.csv":
        read_metrics(path)
    else:
        read_norms(path)
    _check_last_line(path)


def _check_translations(path: Path) -> None:
    from powernorm.lab.report.translations import read_translations

    read_translations(path)
    _check_last_line(path)


def _check_last_line(path: Path) -> None:
    """Check that the last line is whole; the readers leave one out that is not."""
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        number = content.count(b"\n") + 1
        raise InputError(f"{path}, line {number}: cut off; {_RESUME}")


def _verify_together(folder: Path, findings: Findings) -> None:
    """Read a comparison as the report does, where none of its files has a fault of its own."""
    if not any(folder in Path(path).parents for path in findings.damaged):
        _note(folder / RESULTS_FILE, findings, partial(_check_comparison, folder))


def _check_comparison(folder: Path) -> None:
    from powernorm.lab.report import read_comparison

    read_comparison(folder)
