"""The comparison of norms: every norm and seed trained alike, and what came of it."""

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from powernorm.errors import InputError
from powernorm.runs import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    RESULT_FILE,
    RESULTS_FILE,
    ComparisonResults,
    PaperRecord,
    RunResult,
    run_name,
)
from powernorm.training.checkpoints import LAST
from powernorm.training.config import ComparisonConfig
from powernorm.training.events import DataPrepared, Listener, RunEnded, ignore
from powernorm.training.language_modeling import norm_options
from powernorm.training.processes import (
    is_main,
    locally_first,
    num_processes,
    on_main,
    process_group,
)
from powernorm.training.run_folders import (
    check_same_settings,
    find_runs,
    prepare_folder,
    read_json,
    read_result,
    remove_unfinished,
    write_json,
)
from powernorm.training.running import TENSORBOARD_FOLDER, Run, RunTrainer, choose_device
from powernorm.training.settings import comparison_settings, run_settings
from powernorm.training.tasks import task_of
from powernorm.training.variants import (
    Line,
    chosen_norms,
    line_of_variant,
    lines_of,
    study_info,
)

LOGGER = logging.getLogger(__name__)

OVER: Final = ("finished", "diverged", "nonfinite")
"""Statuses of runs that `resume` leaves as they are."""


@dataclass(frozen=True)
class Notes:
    """What is known of a comparison before it is made."""

    measure: str | None = None
    """The metric that it is about."""
    paper: Sequence[PaperRecord] = ()
    """What the papers print."""
    reduced: str | None = None
    """How it is smaller than what a paper did."""


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

    `out` receives a folder for each run and `results.json`, rewritten after every run
    (`powernorm.runs` says what is in them). A run whose loss becomes NaN, or that diverges or
    fails, is marked so, and the others go on.

    Args:
        config: what to train; `powernorm.recipes` has presets.
        out: folder of the comparison.
        resume: leave runs that are over as they are, and go on with interrupted ones from their
            last checkpoint, exactly as if they had not been interrupted.
        force: delete the runs that `out` holds first.
        on_event: is called with every `powernorm.training.events.Event`.
        notes: what `results.json` says beside what was measured.

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
    check_norms(config)
    device = choose_device(config)
    with process_group(device.type):
        task = task_of(config)
        encoded = locally_first(lambda: task.encode(config.data))

        def prepare() -> None:
            for line in lines_of(config):
                for seed in config.seeds:
                    task.data(encoded, line.config, seed)
            prepare_folder(out, resume=resume, force=force)

        on_main(prepare)
        listener = (on_event or ignore) if is_main() else ignore
        comparison = _Comparison(config, out, encoded, notes, listener)
        # The runs seed torch's generators; the caller's shall be as before.
        with (
            torch.random.fork_rng([choose_device(config)] if device.type == "cuda" else []),
            _threads(config.training.num_threads),
        ):
            return comparison.run()


def check_norms(config: ComparisonConfig) -> None:
    """Check the names and options of all norms and variants by building each norm once.

    Raises:
        InputError: an unknown norm, an unknown option, or one that does not fit the model.
    """
    with torch.random.fork_rng(devices=[]):  # a user's norm may draw what it begins with
        for norm in dict.fromkeys([*chosen_norms(config), *config.norm_options]):
            norm_options(config, norm, task_of(config).norm_widths(config))
        for line in lines_of(config):
            task = task_of(line.config)
            norm_options(line.config, line.norm, task.norm_widths(line.config))
            task.check(line.config, line.norm)


@contextmanager
def _threads(num_threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Comparison:
    """The runs of one call of `compare` and the results that they share."""

    def __init__(
        self,
        config: ComparisonConfig,
        out: Path,
        encoded: Any,
        notes: Notes | None,
        listener: Listener,
    ) -> None:
        self._config = config
        self._lines = lines_of(config)
        self._out = out
        self._encoded = encoded
        self._notes = notes or Notes()
        self._listener = listener
        # Read once: the first process soon writes in these folders.
        self._results = on_main(self._old_results)
        self._task = task_of(config)
        self._baselines = on_main(lambda: self._task.baselines(encoded, config))

    def run(self) -> ComparisonResults:
        summary = self._task.summary(self._encoded)
        self._listener(
            DataPrepared(
                summary.name,
                summary.num_train,
                summary.vocabulary_size,
                tuple(self._baselines),
                self._task.units,
                summary.unit,
                summary.left_out,
            )
        )
        self._write_results()
        for run in self._runs():
            old = self._results.get(run.folder.name)
            if old is not None and old["status"] in OVER:
                self._listener(RunEnded(old, skipped=True))
            else:
                self._train(run)
        return self._write_results()

    def _runs(self) -> list[Run]:
        """Return the runs in the order of training: all norms of a seed before the next seed."""
        pairs = [(line, seed) for seed in self._config.seeds for line in self._lines]
        unigram = self._baselines[0]["metrics"]
        unigram_loss = unigram["valid_loss"]
        return [
            Run(
                config=line.config,
                norm=line.norm,
                variant=line.variant,
                seed=seed,
                folder=self._folder(line, seed),
                encoded=self._encoded,
                unigram_loss=float("inf") if unigram_loss is None else unigram_loss,
                unigram=unigram,
                index=index,
                num_runs=len(pairs),
            )
            for index, (line, seed) in enumerate(pairs, start=1)
        ]

    def _folder(self, line: Line, seed: int) -> Path:
        return self._out / run_name(line.label, line.config.model.placement, seed)

    def _old_results(self) -> dict[str, RunResult]:
        """Return the results that are there, after checking that all runs had these settings."""
        results = {}
        for folder in find_runs(self._out):
            old = read_json(folder / CONFIG_FILE)
            seed = old.get("seed")
            seed = seed if isinstance(seed, int) else 0
            line = self._line_of(folder, old)
            check_same_settings(folder, old, run_settings(line, seed, self._encoded.fingerprint))
            result = read_result(folder)
            if result is not None:
                # It is in the run's own file only.
                result.pop("study", None)
                results[folder.name] = result
        return results

    def _line_of(self, folder: Path, old: Mapping[str, Any]) -> Line:
        """Return the line that a run of an earlier call belongs to, also one that is not chosen."""
        if not self._config.variants:
            return Line(self._config, str(old.get("norm")))
        for variant in self._config.variants:
            if variant.label == old.get("label"):
                return line_of_variant(self._config, variant)
        raise InputError(
            f"{folder} is no run of this study: give another --out, or --force to delete it."
        )

    def _train(self, run: Run) -> None:
        line = Line(run.config, run.norm, run.variant)
        settings = run_settings(line, run.seed, self._encoded.fingerprint)

        def begin() -> None:
            _begin_folder(run.folder, settings)
            self._task.keep(self._encoded, run.folder)

        on_main(begin)
        try:
            trainer = RunTrainer(run, self._listener)
        except InputError:
            on_main(lambda: self._forget(run))
            raise
        try:
            result = trainer.result()
        except KeyboardInterrupt:
            result = trainer.partial_result("interrupted")
            result["message"] = "interrupted; --resume goes on from the last checkpoint"
            self._keep(run, result)
            raise
        except InputError:
            raise
        except OSError as error:
            raise InputError(
                f"{run.folder} cannot be written ({error.strerror or error}): make room, then go "
                "on with --resume."
            ) from error
        except Exception as error:
            if num_processes() > 1:
                # The others may be waiting for this process: only an end sets them free.
                raise
            # One norm that breaks must not cost the others; the table shows it as failed.
            LOGGER.exception("The run %s failed.", run.folder.name)
            result = trainer.partial_result("failed")
            result["message"] = f"{type(error).__name__}: {error}"
        self._keep(run, result)
        self._listener(RunEnded(result, skipped=False))

    def _forget(self, run: Run) -> None:
        """Leave no trace of settings that fit everything but the data: the next try is a first."""
        _clear_unless_resumable(run.folder)
        if not find_runs(self._out):
            (self._out / RESULTS_FILE).unlink(missing_ok=True)

    def _keep(self, run: Run, result: RunResult) -> None:
        study = self._config.study
        own = RunResult(**result, study=study_info(study)) if study is not None else result
        if is_main():
            write_json(run.folder / RESULT_FILE, own)
        self._results[run.folder.name] = result
        self._write_results()

    def _write_results(self) -> ComparisonResults:
        config = self._config
        results = ComparisonResults(
            format=1,
            task=config.task,
            preset=config.preset,
            placement=config.model.placement,
            settings=comparison_settings(config),
            data=self._task.facts(self._encoded),
            baselines=self._baselines,
            runs=self._ordered_results(),
        )
        if config.study is not None:
            results["study"] = study_info(config.study)
        notes = self._notes
        if notes.measure is not None:
            results["measure"] = notes.measure
        if notes.paper:
            results["paper"] = list(notes.paper)
        if notes.reduced is not None:
            results["reduced"] = notes.reduced
        if is_main():
            write_json(self._out / RESULTS_FILE, results)
        return results

    def _ordered_results(self) -> list[RunResult]:
        """Return the results by norm, then seed; those of an earlier call with others last."""
        names = [
            self._folder(line, seed).name for line in self._lines for seed in self._config.seeds
        ]
        ordered = dict.fromkeys([*names, *self._results])
        return [self._results[name] for name in ordered if name in self._results]


def _begin_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    _clear_unless_resumable(folder)
    remove_unfinished(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG_FILE, settings)


def _clear_unless_resumable(folder: Path) -> None:
    """Delete what a run left that never reached a checkpoint; a resumable one stays as it is."""
    if (folder / CHECKPOINTS_FOLDER / LAST).exists():
        return
    if (folder / CONFIG_FILE).exists() or (folder / TENSORBOARD_FOLDER).exists():
        shutil.rmtree(folder)
