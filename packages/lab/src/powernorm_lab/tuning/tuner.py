"""`powernorm_lab.tune`: compare norms after tuning each with the same number of trials."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from powernorm.errors import InputError
from powernorm_lab.comparing import show_comparison, shown
from powernorm_lab.engine.events import Listener, ignore
from powernorm_lab.engine.executors.choice import Workers
from powernorm_lab.engine.processes import num_processes
from powernorm_lab.engine.stopping import Stop, Stopped
from powernorm_lab.engine.tasks import Task, TrainingFunction
from powernorm_lab.own_grid import NORMS, Direction, checked_goal, checked_norms, checked_seeds
from powernorm_lab.report import Comparison
from powernorm_lab.runs import TRIALS_FOLDER
from powernorm_lab.settings.comparison import ComparisonSettings, Notes
from powernorm_lab.tuning.ranges import parse_search
from powernorm_lab.tuning.rounds import Budget, Tuning
from powernorm_lab.tuning.subjects import Subject, builtin_subject, own_subject, spaces_of
from powernorm_lab.working import with_threads


def tune(
    train: Task | TrainingFunction | str | ComparisonSettings,
    out: str | Path,
    *,
    norms: Sequence[str] = NORMS,
    trials: int = 20,
    search: Mapping[str, str] | None = None,
    seeds: int | Sequence[int] = 1,
    tuning_seed: int | None = None,
    goal: Mapping[str, Direction] | None = None,
    select_by: Mapping[str, Direction] | None = None,
    settings: Mapping[str, Any] | None = None,
    norm_options: Mapping[str, Mapping[str, Any]] | None = None,
    prune: bool = True,
    device: str = "auto",
    jobs: int = 1,
    num_threads: int | None = None,
    executor: str | None = None,
    executor_options: Mapping[str, str] | None = None,
    retries: int = 3,
    resume: bool = False,
    force: bool = False,
    quiet: bool = False,
    on_event: Listener | None = None,
    notes: Notes | None = None,
) -> Comparison:
    """Tune every norm's settings with the same number of trials, and compare the best ones.

    A trial is a run with one seed and settings from the ranges of its norm. It is ranked on the
    valid split only. The best settings of each norm are then trained with the seeds of the
    comparison and scored on the test split. `out` receives that comparison in the format of
    `compare`, with the tuning of each norm in `results.json`, `tuning.json` and the report. All
    trials are in `trials.csv`, `trials/` and `optuna.db`.

    Args:
        train: as in `compare`.
        out: folder of the tuning and the comparison.
        norms: short names, or `module:Class`; a recipe has its own.
        trials: number of trials per norm, including those that are pruned, diverge or fail.
        search: ranges by dotted key that override those of the recipe and the norms:
            `log:LOW:HIGH`, `linear:LOW:HIGH`, `int:LOW:HIGH`, `choice:A,B,…`, or `fixed` for none.
            Keys are those of `--set`, or keyword parameters of a function, and
            `norm_options.NORM.OPTION`.
        seeds: seeds of the comparison, a number (0 to n - 1) or a list; a recipe has its own.
        tuning_seed: seed of the trials; none of `seeds`.
        goal: as in `compare`.
        select_by: selection metric on the valid split, with `max` or `min`; None is the metric that
            selects the task's checkpoints, or `valid_NAME` for a function with the goal
            `test_NAME`.
        settings: as in `compare`.
        norm_options: as in `compare`.
        prune: whether to stop trials, after a third of the run, that are worse than the median of
            the norm's earlier trials.
        device: as in `compare`.
        jobs: as in `compare`, also for trials.
        num_threads: as in `compare`.
        executor: as in `compare`.
        executor_options: as in `compare`.
        retries: as in `compare`.
        resume: continue the tuning in `out` as if it had not been interrupted, also with more
            trials, norms or seeds.
        force: delete an existing tuning in `out` first.
        quiet: show no progress and no table.
        on_event: as in `compare`.
        notes: as in `compare`.

    Returns:
        The comparison of the tuned norms, read from `out`.

    Raises:
        InputError: an argument cannot be used, `out` has other files, or a norm has no completed
            trial.
        KeyboardInterrupt: after the current run has been marked as interrupted.
        SystemExit: the same after SIGTERM or SIGUSR1, with the exit code 75.
    """
    workers = Workers(jobs, executor, executor_options or {}, retries)
    resumed = Path(out) / TRIALS_FOLDER if resume else None
    judged = (
        None
        if select_by is None
        else checked_goal(select_by, "select_by", "one metric of the valid split")
    )
    if isinstance(train, ComparisonSettings):
        given = {"norms": norms != NORMS, "seeds": seeds != 1, "goal": goal, "settings": settings}
        given |= {"norm_options": norm_options, "device": device != "auto"}
        own = [name for name, value in given.items() if value]
        if own:
            raise InputError(f"{own[0]} is part of a recipe: change it by powernorm_lab.override")
        subject = builtin_subject(with_threads(train, workers, num_threads, resumed), notes, judged)
    else:
        subject = own_subject(
            train,
            norms=checked_norms(norms),
            seeds=checked_seeds(seeds),
            goal=goal or {},
            select_by=judged,
            settings=settings or {},
            norm_options=norm_options or {},
            device=device,
            num_threads=workers.threads(num_threads, resumed),
        )
    try:
        return tune_and_show(
            subject,
            Path(out),
            Budget(trials, tuning_seed, prune),
            search or {},
            workers=workers,
            resume=resume,
            force=force,
            progress=on_event or not quiet,
            table=not quiet,
        )
    except Stopped as end:
        sys.stderr.write(f"stopped ({end}): {out} has all trials; continue with resume=True\n")
        raise


def tune_and_show(
    subject: Subject,
    folder: Path,
    budget: Budget,
    search: Sequence[str] | Mapping[str, str],
    *,
    workers: Workers,
    resume: bool,
    force: bool,
    progress: bool | Listener,
    table: bool,
) -> Comparison:
    """Tune and compare with a progress display, write the page, print the table; see `tune`."""
    if num_processes() > 1:
        raise InputError(
            "powernorm tune trains each run in one process: leave torchrun out, and give --jobs"
        )
    spaces = spaces_of(subject, *parse_search(search))
    stop = Stop()
    with shown(folder, progress) as listener, stop.watching():
        tuning = Tuning(subject, folder.absolute(), budget, spaces, workers, listener or ignore)
        with tuning.holding(resume=resume, force=force):
            tuning.search()
        tuning.compare()
    return show_comparison(folder, table=table)
