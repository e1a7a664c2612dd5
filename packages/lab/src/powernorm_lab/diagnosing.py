"""Diagnosis of runs, checkpoints, pretrained models and models by name."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from powernorm.diagnosis import Diagnosis
from powernorm.errors import InputError
from powernorm.inspection.batches import Progress
from powernorm.inspection.devices import Device
from powernorm.integrations.model_sources import check_folder, diagnose_own
from powernorm.integrations.pretrained import diagnose_pretrained, is_pretrained
from powernorm.records import DiagnosisRecord
from powernorm_lab.data.corpus import EvaluatedSplit
from powernorm_lab.data.readers import load_corpus
from powernorm_lab.diagnosed_runs import with_paper
from powernorm_lab.own_models import is_own_run, load_own_run, own_model
from powernorm_lab.report.loading import read_comparison, read_diagnosis, read_selection
from powernorm_lab.report.overlays import OverlayLine, lines_of
from powernorm_lab.report.records import Comparison, ReportedRun
from powernorm_lab.runs import DIAGNOSIS_FILE, is_run_folder
from powernorm_lab.tasks.run_diagnosis import diagnose_run
from powernorm_lab.tasks.trained_models import scored_step

_TEXT: Final = "rt"
"""Default text for a pretrained model: sentences, whose length suits a batch."""


@dataclass(frozen=True)
class Look:
    """Options of a diagnosis.

    Attributes:
        num_batches: training batches in each pass.
        data: text that replaces the run's.
        sequences: rows in a batch of a pretrained model; None is 32.
        length: tokens in a row of a pretrained model; None is 128.
        device: device of the model.
        scores: split of a run that is scored with each kind of statistics; None scores none.
    """

    num_batches: int = 50
    data: str | None = None
    sequences: int | None = None
    length: int | None = None
    device: Device = "cpu"
    scores: EvaluatedSplit | None = None

    def check_own(self, source: str) -> None:
        """Check that no option is given that a model with batches does not take.

        Args:
            source: the model, as it was given.

        Raises:
            InputError: one is given.
        """
        options = {
            "--data": self.data,
            "--sequences": self.sequences,
            "--length": self.length,
            "--scores": self.scores,
        }
        for option, value in options.items():
            if value is not None:
                raise InputError(
                    f"{source} has its own batches, and no score is known: leave out {option}"
                )


def is_run(path: Path) -> bool:
    """Return whether a folder is a run of `compare`, which stores its diagnosis."""
    return path.is_dir() and is_run_folder(path) and not is_pretrained(path)


def runs_in(path: Path) -> list[Path]:
    """Return the runs of a comparison's folder in its order; empty for other folders."""
    if not path.is_dir() or is_run_folder(path) or not any(map(is_run, path.iterdir())):
        return []
    return [run for one in read_comparison(path).runs if is_run(run := path / one.folder)]


def diagnose_source(
    source: str,
    look: Look,
    on_progress: Progress | None = None,
    on_scored: Progress | None = None,
) -> Diagnosis:
    """Load a model and diagnose it.

    Args:
        source: folder of a run, one of its checkpoints, a folder in Hugging Face's layout, or
            `module:name`.
        look: options.
        on_progress: see `powernorm.diagnose`.
        on_scored: see `diagnose_run`.

    Raises:
        InputError: the model does not exist, an option does not fit it, or it cannot be diagnosed.
    """
    path = Path(source)
    own = own_model(source)
    if own is not None:
        look.check_own(source)
        return diagnose_own(
            own, path.name, look.num_batches, device=look.device, on_progress=on_progress
        )
    if look.scores is not None and is_pretrained(path):
        raise InputError(
            f"{source} has no scores, because it is not a run of a built-in task: leave out "
            "--scores"
        )
    if is_pretrained(path):
        return diagnose_pretrained(
            path,
            load_corpus(look.data or _TEXT).documents["train"],
            num_batches=look.num_batches,
            batch_size=look.sequences or 32,
            length=look.length or 128,
            device=look.device,
            on_progress=on_progress,
        )
    check_folder(path)
    if look.sequences is not None or look.length is not None:
        raise InputError(
            f"{path} is a run with its own batches: leave out --sequences and --length, which are "
            "for a folder with a Hugging Face model"
        )
    report = diagnose_run(
        path,
        data=look.data,
        num_batches=look.num_batches,
        device=look.device,
        scores=look.scores,
        on_progress=on_progress,
        on_scored=on_scored,
    )
    # Published statistics do not apply to another text.
    return report if look.data is not None else with_paper(report, path)


# Several -----------------------------------------------------------------------------------------


@dataclass
class Overlay:
    """Diagnoses of several models for comparison.

    Attributes:
        lines: lines of the figures.
        num_diagnosed: number of models diagnosed by this call.
        num_known: number of runs with an existing `diagnosis.json` of the same batches.
        left_out: reasons by path for runs of a comparison that cannot be diagnosed.
    """

    lines: list[OverlayLine] = field(default_factory=list)
    num_diagnosed: int = 0
    num_known: int = 0
    left_out: dict[str, str] = field(default_factory=dict)


def overlay(
    sources: Sequence[str],
    look: Look,
    on_model: Callable[[str, int, int], Progress | None] | None = None,
) -> Overlay:
    """Diagnose several models for comparison, except for those with a diagnosis.

    A run stores its diagnosis as `diagnosis.json` unless `look` names another text.

    Args:
        sources: as for `diagnose_source`, and folders of comparisons for all of their runs.
        look: options.
        on_model: called before each model with (name, number of models before it, number of
            models); returns a function for its progress.

    Raises:
        InputError: as `diagnose_source`; a run of a comparison that cannot be diagnosed is left
            out if others can.
    """
    found = Overlay()
    places = _places(sources)
    records: dict[Path, DiagnosisRecord] = {}
    others: list[OverlayLine] = []
    for number, (source, is_optional) in enumerate(places.items()):
        path = Path(source)
        keeps = is_run(path) and look.data is None
        if keeps and _is_known(path, look):
            found.num_known += 1
            continue
        on_progress = None if on_model is None else on_model(path.name, number, len(places))
        try:
            report = diagnose_source(source, look, on_progress)
        except InputError as error:
            if not is_optional:
                raise
            found.left_out[source] = str(error)
            continue
        found.num_diagnosed += 1
        if keeps:
            report.write_json(path / DIAGNOSIS_FILE)
        elif is_run(path):
            records[path.resolve()] = report.to_json()
        else:
            others.append(_line(report, others))
    runs = [Path(source) for source in places if source not in found.left_out]
    runs = [run for run in runs if is_run(run)]
    found.lines = [*_lines_of_runs(runs, records), *others]
    if not found.lines:
        raise InputError("; ".join(f"{name}: {why}" for name, why in found.left_out.items()))
    return found


def _places(sources: Sequence[str]) -> dict[str, bool]:
    """Return the distinct models, and whether each comes from a comparison's folder."""
    places: dict[str, bool] = {}
    for source in sources:
        runs = runs_in(Path(source))
        for place in [str(run) for run in runs] or [source]:
            places.setdefault(place, bool(runs))
    return places


def _is_known(run: Path, look: Look) -> bool:
    """Return whether the scored weights of a run were diagnosed on the same batches."""
    file = run / DIAGNOSIS_FILE
    if not file.exists():
        return False
    record = read_diagnosis(file)
    if is_own_run(run):
        return record["num_batches"] == min(look.num_batches, len(load_own_run(run).batches))
    return record["num_batches"] == look.num_batches and record["step"] == scored_step(run)


def _lines_of_runs(runs: Sequence[Path], records: dict[Path, DiagnosisRecord]) -> list[OverlayLine]:
    if not runs:
        return []
    # Runs in the same folder belong to one comparison, even if only some of them are named.
    folders: dict[Path, list[Path]] = {}
    for run in runs:
        folders.setdefault(run.resolve().parent, []).append(run)
    comparisons = [read_selection(group)[0] for group in folders.values()]
    return lines_of(
        replace(run, label=label, diagnosis=records.get(place, run.diagnosis))
        for comparison in comparisons
        for run in comparison.runs
        for label in [_label(run, comparison, comparisons)]
        for place in [(comparison.folder / run.folder).resolve()]
    )


def _label(run: ReportedRun, comparison: Comparison, comparisons: Sequence[Comparison]) -> str:
    """Return the name of a run's line, with its comparison if another one has the same name."""
    if sum(run.name in one.names for one in comparisons) == 1:
        return run.name
    shared = os.path.commonpath([one.folder.resolve() for one in comparisons])
    return f"{comparison.folder.resolve().relative_to(shared)} {run.name}"


def _line(report: Diagnosis, others: Sequence[OverlayLine]) -> OverlayLine:
    """Return the line of a model that is not a run; equal names are numbered."""
    step = "" if report.step is None else f", step {report.step}"
    name = f"{report.model}{step}"
    same = sum(line.name == name or line.name.startswith(f"{name} (") for line in others)
    return OverlayLine(f"{name} ({same + 1})" if same else name, [report.to_json()])
