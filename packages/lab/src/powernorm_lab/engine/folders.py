"""Files of runs and comparisons: written atomically, and protected against overwriting."""

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
"""Checkpoint early in the training of a built-in task."""
KEPT: Final = frozenset({LEASE_FILE, LOCK_FILE})
IGNORED: Final = frozenset({"data.path", "function.file", "function.sha256"})
"""Settings that may differ when a run resumes: a fingerprint identifies the data, and a changed
source file makes a notice."""
_OF_COMPARISON: Final = (COMPARISON_FILE, RESULTS_FILE, WORK_FILE, TUNING_FILE)
_SEALED: Final = (
    *_OF_COMPARISON,
    *(CONFIG_FILE, RESULT_FILE, SCALES_FILE),
    *(SUBWORDS_FILE, REMOVAL_FILE),
)
"""Names of the files that `write_json` writes."""


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file with its checksum atomically.

    Raises:
        InputError: the folder is not writable.
        ValueError: a number is NaN or infinite, which JSON cannot represent.
    """
    text = json.dumps(seal_json(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        write(path, text)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror}): give a writable folder with --out"
        ) from error


def write_rows(path: Path, rows: Sequence[Sequence[str]]) -> None:
    """Write tab-separated cells atomically; white space in cells becomes single spaces."""
    lines = ("\t".join(" ".join(cell.split()) for cell in row) for row in rows)
    write(path, "\n".join(lines) + "\n")


READ_ANEW: Final = "remove this file, and run the same command again with --resume"
"""Advice for a damaged results.json, which is rebuilt from the results of the runs."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file that `write_json` wrote.

    Raises:
        InputError: the file is missing, edited, damaged or not a JSON object.
    """
    return read_json_object(path, f"remove {path.parent}")


def accept_edits(folder: Path) -> list[Path]:
    """Update the checksums of edited JSON files, and return their paths.

    Args:
        folder: folder of a comparison with its runs, or of one run, with the comparison's files in
            its parent.

    Raises:
        InputError: a file is not valid JSON, or cannot be written.
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
            except ValueError as error:  # infinity as 1e999, or a lone surrogate
                raise InputError(f"{path} cannot be written again ({error}): restore it") from error
    return accepted


def find_runs(out: Path) -> list[Path]:
    """Return the run folders of a comparison, by name."""
    if not out.is_dir():
        return []
    return sorted(path for path in out.iterdir() if is_run_folder(path))


def check_place(folder: Path) -> None:
    """Refuse a folder for a run that holds other files.

    Raises:
        InputError: it is a file, a folder with files that is not a run's (the message names them),
            or a link, or holds a link.
    """
    check_own(folder)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file where a run's folder belongs: move it away")
    paths = sorted(folder.iterdir())
    check_own(*paths)
    # A process may have been killed after it took the lease and before it wrote its first file.
    foreign = [p.name for p in paths if p.name not in KEPT and not is_draft(p.name)]
    # This check comes last: another process may start the run in between.
    if foreign and not is_run_folder(folder):
        more = "" if len(foreign) <= MAX_DIFFERENCES else " and more"
        raise InputError(
            f"{folder} is no run and holds {', '.join(foreign[:MAX_DIFFERENCES])}{more}: move them "
            "away, or give another --out"
        )


def check_folder(out: Path, *, resume: bool, force: bool) -> None:
    """Refuse a folder that cannot hold a comparison, without changing anything.

    Raises:
        InputError: `out` is a file; it holds runs and neither `resume` nor `force` is set, or both
            are.
    """
    if resume and force:
        raise InputError(
            "--resume continues the existing runs and --force deletes them: choose one"
        )
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file: give a folder with --out")
    runs, files = find_runs(out), _results_in(out)
    if (runs or files) and not (resume or force):
        found = ", ".join(path.name for path in [*runs, *files][:MAX_DIFFERENCES])
        raise InputError(
            f"{out} holds other runs ({found}): give another --out, --resume to continue them or "
            "--force to delete them"
        )


def prepare_folder(out: Path, *, resume: bool, force: bool) -> None:
    """Prepare the folder of a comparison, or refuse it.

    With `force`, existing run folders and results are deleted, and nothing else.

    Raises:
        InputError: as `check_folder`, or `out` is not writable.
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
            f"{out} cannot be created ({error.strerror}): give a writable folder with --out"
        ) from error


def _results_in(out: Path) -> list[Path]:
    files = (out / name for name in (RESULTS_FILE, COMPARISON_FILE, REPORT_FILE))
    return [path for path in files if path.exists()]


def last_checkpoint(folder: Path) -> Path:
    """Return the path of the checkpoint that a run resumes from; the file may not exist."""
    return folder / CHECKPOINTS_FOLDER / LAST


def remove_unfinished(folder: Path, *, is_over: bool = False) -> None:
    """Delete unfinished files of a killed process, and the lease of a run that is over."""
    check_own(folder, folder / CHECKPOINTS_FOLDER)
    for place in (folder, folder / CHECKPOINTS_FOLDER):
        remove_drafts(place)
    if is_over:
        remove(*(folder / name for name in KEPT))


def clear_unless_resumable(folder: Path) -> None:
    """Delete the files of a run that has no checkpoint; a resumable run stays as it is.

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
    """Delete a run's files; config.json is last, because it identifies the folder as a run's."""
    check_own(folder)
    paths = sorted(folder.iterdir(), key=lambda path: path.name == CONFIG_FILE)
    remove(*(path for path in paths if path.name not in KEPT))


def check_same_settings(folder: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Check that a run was trained with the current settings.

    The path of the data is not compared: the settings hold a fingerprint of their contents.

    Raises:
        InputError: settings differ; the message names them with the old and the new values.
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
            f"{folder} was trained with other settings ({', '.join(differing[:MAX_DIFFERENCES])}"
            f"{more}): use the same ones, another --out, or --force to delete it"
        )


def threads_of(folder: Path) -> int | None:
    """Return the number of CPU threads in the settings of a run; None is torch's default."""
    settings = _flat(read_json(folder / CONFIG_FILE))
    found = settings.get("num_threads", settings.get("training.num_threads"))
    return found if isinstance(found, int) else None


def owner_of(folder: Path) -> dict[str, Any]:
    """Return the identity of a run for its checkpoints; empty without config.json."""
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
    """Check that a checkpoint belongs to the run whose folder holds it.

    Args:
        checkpoint: path of the checkpoint.
        owner: `owner_of` stored in the checkpoint; None or empty passes the check.

    Raises:
        InputError: the checkpoint was copied from another run; the message names both.
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
            "checkpoint there, or remove the run's folder to train the run again"
        )


def read_result(folder: Path) -> RunResult | None:
    """Return the result in a run's folder; None if there is none yet.

    Raises:
        InputError: the file is damaged.
    """
    path = folder / RESULT_FILE
    if not path.exists():
        return None
    return read_record(RunResult, path, f"remove {folder}", exact=True)


def read_own_result(folder: Path) -> RunResult | None:
    """Return the result in a run's folder as `read_result`, and check that it is of this run.

    Raises:
        InputError: the file is damaged, or belongs to another run.
    """
    result = read_result(folder)
    if result is not None and result.folder != folder.name:
        raise InputError(
            f"{folder / RESULT_FILE} is the result of {result.folder}: put the run's own there, or "
            f"remove {folder}"
        )
    return result


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries to dotted keys."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[prefix + key] = item
    return flat
