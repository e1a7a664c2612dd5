"""Does the verdict hold? Comparisons in many settings, each with a checkpoint of its first part.

`train_study` trains them, in an order in which every part of the work is of use by itself;
`training.verdict_measures` then diagnoses the early checkpoints and `training.verdict_scores` says
how often they were right.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from powernorm.errors import InputError
from powernorm.lab.engine.events import Listener, SettingStarted, ignore
from powernorm.lab.engine.folders import prepare_folder, read_result
from powernorm.runs import REPORT_FILE, run_name
from powernorm.training.comparison import OVER, check_norms, compare
from powernorm.training.verdict_settings import Phase, Setting, VerdictStudy
from powernorm.verdict_runs import VERDICT_FILE


def train_study(
    study: VerdictStudy,
    out: Path,
    *,
    resume: bool = False,
    force: bool = False,
    on_event: Listener | None = None,
) -> None:
    """Train all norms and seeds of all settings; a setting's comparison is in `out/NAME`.

    Args:
        study: what to train.
        out: folder of the study.
        resume: leave runs that are over as they are and go on with interrupted ones.
        force: delete the runs that the settings' folders hold first.
        on_event: is called with every event of the comparisons.

    Raises:
        InputError: a setting cannot be used, or `out` holds runs and neither `resume` nor `force`
            is set.
        KeyboardInterrupt: the run at hand can be resumed.
    """
    _check(study)
    for setting in study.settings:
        # Before the first run: a folder that cannot be used must not show up in the middle.
        prepare_folder(out / setting.name, resume=resume, force=force)
    if force:
        for name in (VERDICT_FILE, REPORT_FILE):
            (out / name).unlink(missing_ok=True)
    listener = on_event or ignore
    waiting = list(_waiting(study, out))
    for index, (setting, phase) in enumerate(waiting, start=1):
        listener(SettingStarted(setting.name, phase.norms, phase.seeds, index, len(waiting)))
        config = replace(setting.config, norms=phase.norms, seeds=phase.seeds)
        compare(config, out / setting.name, resume=True, on_event=listener)


def _check(study: VerdictStudy) -> None:
    names = [setting.name for setting in study.settings]
    if len(set(names)) < len(names):
        raise InputError("Two settings of the study have the same name: give each its own.")
    for setting in study.settings:
        if setting.config.training.early_checkpoint is None:
            raise InputError(
                f"The setting {setting.name} keeps no early checkpoint, which is what is "
                "diagnosed: set training.early_checkpoint, e.g. to 0.1."
            )
        for phase in study.phases:
            check_norms(replace(setting.config, norms=phase.norms, seeds=phase.seeds))


def _waiting(study: VerdictStudy, out: Path) -> Iterator[tuple[Setting, Phase]]:
    """What is not over: to look at the results first saves reading each text once a phase."""
    for phase in study.phases:
        for setting in study.settings:
            folders = (
                out / setting.name / run_name(norm, setting.config.model.placement, seed)
                for norm in phase.norms
                for seed in phase.seeds
            )
            if not all(map(_is_over, folders)):
                yield setting, phase


def _is_over(folder: Path) -> bool:
    result = read_result(folder)
    return result is not None and result["status"] in OVER
