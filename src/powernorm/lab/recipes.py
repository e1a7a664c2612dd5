"""Comparisons of the tasks that come with powernorm."""

from pathlib import Path

from powernorm.recipes import measure_of, paper_records, reduced_note
from powernorm.runs import ComparisonResults
from powernorm.training import comparison
from powernorm.training.comparison import Notes
from powernorm.training.config import ComparisonConfig
from powernorm.training.events import Listener


def compare(
    config: ComparisonConfig,
    out: Path,
    *,
    resume: bool = False,
    force: bool = False,
    on_event: Listener | None = None,
    notes: Notes | None = None,
) -> ComparisonResults:
    """Train the same model with every norm and seed, and write the runs and their results.

    `out` receives a folder for each run and `results.json`, rewritten after every run. A run whose
    loss becomes NaN, or that diverges or fails, is marked so, and the others go on.

    Args:
        config: what to train; `recipe` has presets.
        out: folder of the comparison.
        resume: leave runs that are over as they are, and go on with interrupted ones from their
            last checkpoint, exactly as if they had not been interrupted.
        force: delete the runs that `out` holds first.
        on_event: is called with what happens, as a `ComparisonProgress`.
        notes: what `results.json` says beside what was measured; else what is known of the recipe:
            the metric that its task is about, the papers' numbers, and what differs from theirs.

    Distributed:
        Under `torchrun` every process calls it. They share each micro-batch and the statistics of
        the norms; the first one writes the files, in a folder that all can read.

    Returns:
        The contents of `results.json`.

    Raises:
        InputError: a setting, the text or `out` cannot be used, before anything is trained; or a
            checkpoint to go on from is damaged.
        KeyboardInterrupt: after the interrupted run has been marked in `results.json`.
    """
    notes = notes or _notes_of(config)
    return comparison.compare(
        config, out, resume=resume, force=force, on_event=on_event, notes=notes
    )


def _notes_of(config: ComparisonConfig) -> Notes:
    measure = measure_of(config.task)
    return Notes(
        None if measure == "test_perplexity" else measure,
        tuple(paper_records(config)),
        reduced_note(config),
    )
