"""Files of runs and comparisons: written in one step, read back, never overwritten by accident."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from powernorm.errors import InputError
from powernorm.files import check_own, is_draft, remove, remove_drafts, write
from powernorm.json_reading import check_json, read_json_object, seal_json
from powernorm.json_reading import read_json as read_unchecked
from powernorm.records import CONFIG_FILE
from powernorm_lab.engine.leases import LEASE_FILE, LOCK_FILE
from powernorm_lab.runs import (
    CHECKPOINTS_FOLDER,
    COMPARISON_FILE,
    REMOVAL_FILE,
    REPORT_FILE,
    RESULT_FILE,
    RESULTS_FILE,
    SCALES_FILE,
    SUBWORDS_FILE,
    TUNING_FILE,
    WORK_FILE,
    RunResult,
    is_run_folder,
)
from powernorm_lab.schema import read_record

MAX_DIFFERENCES: Final = 5
LAST: Final = "last.ckpt"
BEST: Final = "best.ckpt"
"""Checkpoint of the best evaluation."""
EARLY: Final = "early.ckpt"
"""Checkpoint soon after the beginning of a built-in task's run."""
KEPT: Final = frozenset({LEASE_FILE, LOCK_FILE})
IGNORED: Final = frozenset({"data.path", "function.file", "function.sha256"})
"""Settings of a run that may differ: a fingerprint identifies the data, and a change of the code is
told."""
_OF_COMPARISON: Final = (COMPARISON_FILE, RESULTS_FILE, WORK_FILE, TUNING_FILE)
_SEALED: Final = (
    *_OF_COMPARISON,
    *(CONFIG_FILE, RESULT_FILE, SCALES_FILE),
    *(SUBWORDS_FILE, REMOVAL_FILE),
)
"""Names of the files that `write_json` writes."""


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file with its seal in one step.

    Raises:
        InputError: the folder cannot be written.
        ValueError: a number is NaN or infinite, for which JSON has no word.
    """
    text = json.dumps(seal_json(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        write(path, text)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror}): give a folder that can be with --out"
        ) from error


def write_rows(path: Path, rows: Sequence[Sequence[str]]) -> None:
    """Write a file of cells between tabs in one step; white space in cells becomes spaces."""
    lines = ("\t".join(" ".join(cell.split()) for cell in row) for row in rows)
    write(path, "\n".join(lines) + "\n")


READ_ANEW: Final = "remove this file, and run the same command again with --resume"
"""How results.json comes back, which is put together of the runs' own results."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file that `write_json` wrote.

    Raises:
        InputError: the file is missing, edited, damaged or no JSON object.
    """
    return read_json_object(path, f"remove {path.parent}")


def accept_edits(folder: Path) -> list[Path]:
    """Seal the JSON files again that somebody edited, and return their paths.

    Args:
        folder: of a comparison with its runs, or of one run, to which belongs what the folder
            around it says of the comparison.

    Raises:
        InputError: a file is no JSON, or cannot be written.
    """
    patterns = [place + name for place in ("", "*/") for name in _SEALED]
    paths = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    if is_run_folder(folder):
        paths += [folder.resolve().parent / name for name in _OF_COMPARISON]
    accepted = []
    for path in paths:
        if not path.is_file():
            continue
        value = read_unchecked(path, "restore it")
        try:
            check_json(value if isinstance(value, dict) else {}, path)
        except InputError:
            accepted.append(path)
            try:
                write_json(path, value)
            except InputError:
                raise
            except ValueError as error:  # infinity as 1e999, or half a letter as an escape
                raise InputError(f"{path} cannot be written again ({error}): restore it") from error
    return accepted


def find_runs(out: Path) -> list[Path]:
    """Return the run folders of a comparison, by name."""
    if not out.is_dir():
        return []
    return sorted(path for path in out.iterdir() if is_run_folder(path))


def check_place(folder: Path) -> None:
    """Refuse a place for a run where somebody keeps other files.

    Raises:
        InputError: it is a file, or a folder that is no run's and holds files; the message names
            them; or it or one of them is a link.
    """
    check_own(folder)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file, and a run is to go there: move it away")
    paths = sorted(folder.iterdir())
    check_own(*paths)
    # A process may have been killed between its lease and its first file.
    foreign = [p.name for p in paths if p.name not in KEPT and not is_draft(p.name)]
    # Asked last: another process may begin the run in between.
    if foreign and not is_run_folder(folder):
        more = "" if len(foreign) <= MAX_DIFFERENCES else " and more"
        raise InputError(
            f"{folder} is no run and holds {', '.join(foreign[:MAX_DIFFERENCES])}{more}: move that "
            "away, or give another --out"
        )


def check_folder(out: Path, *, resume: bool, force: bool) -> None:
    """Refuse a folder that cannot take a comparison; changes nothing.

    Raises:
        InputError: `out` is a file; it holds runs and neither `resume` nor `force` is set, or both
            are.
    """
    if resume and force:
        raise InputError(
            "--resume goes on with the runs that are there and --force deletes them: choose one"
        )
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file: give a folder with --out")
    runs, files = find_runs(out), _results_in(out)
    if (runs or files) and not (resume or force):
        found = ", ".join(path.name for path in [*runs, *files][:MAX_DIFFERENCES])
        raise InputError(
            f"{out} holds other runs ({found}): give another --out, --resume to go on with them or "
            "--force to delete them"
        )


def prepare_folder(out: Path, *, resume: bool, force: bool) -> None:
    """Make the folder of a comparison ready, or refuse it.

    With `force`, run folders and results that are there are deleted, and nothing else.

    Raises:
        InputError: as `check_folder`, or `out` cannot be written.
    """
    check_folder(out, resume=resume, force=force)
    if force:
        for path in find_runs(out):
            delete_run(path)
        remove(*_results_in(out), out / WORK_FILE)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{out} cannot be made ({error.strerror}): give a folder that can be with --out"
        ) from error


def _results_in(out: Path) -> list[Path]:
    files = (out / name for name in (RESULTS_FILE, COMPARISON_FILE, REPORT_FILE))
    return [path for path in files if path.exists()]


def last_checkpoint(folder: Path) -> Path:
    """Return the path of what a run goes on from, which may not be there."""
    return folder / CHECKPOINTS_FOLDER / LAST


def remove_unfinished(folder: Path, *, is_over: bool = False) -> None:
    """Delete what a killed process was writing in a run's folder; of one that is over its lease."""
    check_own(folder, folder / CHECKPOINTS_FOLDER)
    for place in (folder, folder / CHECKPOINTS_FOLDER):
        remove_drafts(place)
    if is_over:
        remove(*(folder / name for name in KEPT))


def clear_unless_resumable(folder: Path) -> None:
    """Delete what a run left that never reached a checkpoint; a resumable one stays as it is.

    Raises:
        InputError: as `check_place`.
    """
    check_place(folder)
    if folder.is_dir() and not last_checkpoint(folder).exists():
        _empty(folder)


def delete_run(folder: Path) -> None:
    """Delete the folder of a run."""
    _empty(folder)
    remove(folder)


def _empty(folder: Path) -> None:
    """Delete what a run left, its settings last: without them what is left would be nobody's."""
    check_own(folder)
    paths = sorted(folder.iterdir(), key=lambda path: path.name == CONFIG_FILE)
    remove(*(path for path in paths if path.name not in KEPT))


def check_same_settings(folder: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Check that a run was made with the settings that it would be made with now.

    The path of the text is not compared: the settings hold a fingerprint of its contents.

    Raises:
        InputError: they differ; the message names where, the old value and the new.
    """
    before, now = _flat(old), _flat(new)
    differing = [
        f"{key} {before.get(key)} → {now.get(key)}"
        for key in sorted((before.keys() | now.keys()) - IGNORED)
        if before.get(key) != now.get(key)
    ]
    if differing:
        more = "" if len(differing) <= MAX_DIFFERENCES else " and more"
        raise InputError(
            f"{folder} was made with other settings ({', '.join(differing[:MAX_DIFFERENCES])}"
            f"{more}): use the same ones, another --out, or --force to delete it"
        )


def owner_of(folder: Path) -> dict[str, Any]:
    """Return whose the checkpoints of a run's folder are; empty where it says no settings."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return {}
    config = read_json(path)
    settings = {key: value for key, value in _flat(config).items() if key not in IGNORED}
    packed = json.dumps(settings, sort_keys=True).encode()
    return {
        "comparison": config.get("task"),
        "norm": config.get("label") or config.get("norm"),
        "seed": config.get("seed"),
        "settings": hashlib.sha256(packed).hexdigest(),
    }


def check_owner(checkpoint: Path, owner: Mapping[str, Any] | None) -> None:
    """Check that a checkpoint is of the run in whose folder it lies.

    Args:
        checkpoint: its file.
        owner: what it says itself; None and empty say nothing.

    Raises:
        InputError: it was copied from another run; the message names both.
    """
    here = owner_of(checkpoint.parent.parent)
    if owner and here and dict(owner) != here:
        differing = [
            f"{key} {owner.get(key)}, not {value}"
            for key, value in here.items()
            if owner.get(key) != value
        ]
        raise InputError(
            f"{checkpoint} is of another run ({'; '.join(differing)}): put the run's own "
            "checkpoint there, or remove the run's folder to train it anew"
        )


def read_result(folder: Path) -> RunResult | None:
    """Return the result of a run folder, None while it has none.

    Raises:
        InputError: the file is damaged.
    """
    path = folder / RESULT_FILE
    if not path.exists():
        return None
    return read_record(RunResult, path, f"remove {folder}", exact=True)


def read_own_result(folder: Path) -> RunResult | None:
    """Return the result of a run that goes on or enters results.json, as `read_result`.

    Raises:
        InputError: the file is damaged, or is of another run.
    """
    result = read_result(folder)
    if result is not None and result.folder != folder.name:
        raise InputError(
            f"{folder / RESULT_FILE} is the result of {result.folder}: put the run's own there, or "
            f"remove {folder}"
        )
    return result


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one, by dotted keys."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[prefix + key] = item
    return flat
