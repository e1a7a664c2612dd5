"""A run that is stopped in the middle and resumed writes the same files as an uninterrupted one.

One table covers all contents of a checkpoint; the ways of stopping are in `test_killed_anytime.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.tests.tasks.lm_char.tiny_characters import tiny_characters, write_stream
from lab.tests.training.same_runs import assert_same_folder
from lab.tests.training.tiny_training import TRAINING, compare, tiny_config
from lab.tests.training.tiny_translation import tiny_translation, write_pairs

from powernorm_lab.engine.events import Event, RunStarted, StepsDone
from powernorm_lab.recipes import recipe
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.overrides import override
from powernorm_lab.settings.training import OptimizerSettings

MUON = OptimizerSettings(name="muon", learning_rate=1e-2)
ACCUMULATED = OptimizerSettings(learning_rate=1e-2, accumulation=2)
SCORED = {"score_every": 2, "select_by": "score", "log_every": 1}
UNEVEN = {"max_steps": 24, "log_every": 5, "validate_every": 12, "monitor_every": 7}
UNEVEN |= {"average_checkpoints": 2, "recalibration_batches": 2}
"""The checkpoint of step 12 is inside an epoch, and two updates after the last row of the log."""


pytestmark = pytest.mark.usefixtures("drawn_norm")


def lm(folder: Path, text: Path, norm: str, **changes: Any) -> ComparisonSettings:
    del folder
    return tiny_config(str(text), norms=(norm,), **changes)


def muon(folder: Path, text: Path, precision: str) -> ComparisonSettings:
    config = lm(folder, text, "bn", optimizer=MUON)
    return override(config, [f"training.precision={precision}"])


def translation(folder: Path, text: Path, norm: str, **training: Any) -> ComparisonSettings:
    del text
    return tiny_translation(write_pairs(folder / "pairs"), norms=(norm,), training=training)


def characters(folder: Path, text: Path, norm: str) -> ComparisonSettings:
    """Return settings with two micro-batches, each with its rows and memory, and dropout."""
    del text
    return tiny_characters(write_stream(folder / "stream"), norms=(norm,))


def moved_images(folder: Path, text: Path) -> ComparisonSettings:
    """Return settings with augmented images; augmentation depends on seed and position only."""
    del folder, text
    changes = ("data.path=drawn-digits", "data.augmentation=true", "data.max_examples=200")
    steps = ("training.max_steps=6", "training.validate_every=3", "training.tid_batches=0")
    return override(recipe("image", "smoke"), ["norms=bn", *changes, *steps])


EARLY = replace(TRAINING, early_checkpoint=0.4)
WATCHED = replace(TRAINING, diagnose_every=2)
CASES: dict[str, tuple[Callable[[Path, Path], Any], dict[int, int]]] = {
    "rbn": (lambda *at: lm(*at, "rbn"), {2: 0, 6: 4, 10: 8, 12: 8}),
    "pn, accumulated": (lambda *at: lm(*at, "pn", dropout=0.3, optimizer=ACCUMULATED), {6: 4}),
    "early checkpoint": (lambda *at: lm(*at, "bn", training=EARLY), {2: 0, 10: 8}),
    "diagnosed": (lambda *at: lm(*at, "pn", training=WATCHED), {8: 4}),
    "muon": (lambda *at: muon(*at, "float32"), {6: 4}),
    "muon, float16": (lambda *at: muon(*at, "float16"), {6: 4}),
    "module:Norm": (lambda *at: lm(*at, "norms.own_modules:Centered"), {6: 4}),
    "registered": (lambda *at: lm(*at, "drawn"), {6: 4}),
    "scored": (lambda *at: translation(*at, "bn", **SCORED), {5: 4, 7: 4, 10: 8}),
    "characters, ln": (lambda *at: characters(*at, "ln"), {10: 8}),
    "characters, pn": (lambda *at: characters(*at, "pn"), {10: 8}),
    "moved images": (moved_images, {4: 3}),
    **{
        f"translation, {norm}, {precision}": (
            lambda *at, norm=norm, precision=precision: translation(
                *at, norm, precision=precision, **UNEVEN
            ),
            {15: 12},
        )
        for norm in ("ln", "bn", "pn", "mabn")
        for precision in ("float32", "bfloat16", "float16")
    },
}
"""Settings by name, with steps to stop at and the steps from which the run resumes."""

RARE = ("muon", "module:Norm", "characters, ln", "early checkpoint", "rbn")
IN_DEFAULT = (" pn, float32", " bn, bfloat16", " mabn, float16")


def stop_at(step: int) -> Callable[[Event], None]:
    def listen(event: Event) -> None:
        if isinstance(event, StepsDone) and event.step >= step:
            raise KeyboardInterrupt

    return listen


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            marks=pytest.mark.slow
            if (case.startswith("translation") and not case.endswith(IN_DEFAULT)) or case in RARE
            else (),
        )
        for case in CASES
    ],
)
def test_a_run_that_goes_on_equals_one_that_never_stopped(
    case: str, text: Path, tmp_path: Path
) -> None:
    make, stops = CASES[case]
    config = make(tmp_path, text)
    whole = compare(config, tmp_path / "whole").runs[0]
    for stop, first in stops.items():
        out = tmp_path / f"stopped-{stop}"
        with pytest.raises(KeyboardInterrupt):
            compare(config, out, on_event=stop_at(stop))
        events: list[Event] = []
        (run,) = compare(config, out, resume=True, on_event=events.append).runs
        assert [event.first_step for event in events if isinstance(event, RunStarted)] == [first]
        assert run.status == whole.status
        assert_same_folder(tmp_path / "whole" / whole.folder, out / run.folder)
