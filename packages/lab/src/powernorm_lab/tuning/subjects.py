"""The subject of a tuning: a recipe of a built-in task, or a function of a user's own."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, Final

from powernorm.errors import InputError
from powernorm.norms.registry import norm_info, search_space
from powernorm_lab.comparing import notes_of
from powernorm_lab.engine.grid import Grid
from powernorm_lab.engine.tasks import Task, TrainingFunction, task_of
from powernorm_lab.engine.trials import TrialRules
from powernorm_lab.engine.warmup import warmup_options
from powernorm_lab.own_grid import own_grid
from powernorm_lab.runs import Goal
from powernorm_lab.settings.comparison import (
    ComparisonSettings,
    Notes,
    Variant,
    options_of,
    to_json,
)
from powernorm_lab.settings.overrides import known_keys
from powernorm_lab.tasks.builtin import check_norms, grid_of
from powernorm_lab.tasks.registry import task_of as builtin_task
from powernorm_lab.tuning.ranges import FIXED, Point, Space, option_key, parse_range, value_text

LEARNING_RATE: Final = "optimizer.learning_rate"
WARMUP: Final = "schedule.warmup_fraction"
WARMUP_STEPS: Final = "schedule.warmup_steps"


@dataclass(frozen=True)
class Subject:
    """A comparison whose norms are tuned."""

    norms: Sequence[str]
    """Short names, or `module:Class`."""
    seeds: Sequence[int]
    """Seeds of the final comparison."""
    goal: Goal
    """The metric that the final comparison is about."""
    select_by: Goal
    """The value of the valid split by which trials are judged."""
    column: str
    """The column of metrics.csv that has it during a run."""
    identity: Mapping[str, Any]
    """Settings that a resumed tuning must have in common with the one before, as JSON."""
    settings: Mapping[str, Any]
    """The settings without a tuning, by dotted key."""
    norm_options: Mapping[str, Mapping[str, Any]]
    """The options without a tuning, by norm, where they are not the norm's defaults."""
    ranges: Mapping[str, str]
    """The ranges that all norms have without being asked for, by dotted key."""
    grid: Callable[[Sequence[Point], Sequence[int], Goal, Sequence[str] | None], Grid]
    """Returns the grid of points, seeds and a goal, all of them checked.

    The last argument names the labels of trials to train, where the points are those of all trials;
    None trains all points in the final comparison.
    """

    def untuned(self, norm: str, space: Space) -> dict[str, Any]:
        """Return the settings of a norm without a tuning, by dotted key, where ranges hold them."""
        options = self.norm_options.get(norm, {})
        own = {key: _option(norm, key, options) for key in space if key.startswith("norm_options.")}
        values = {key: self.settings.get(key) for key in space} | own
        return {key: value for key, value in values.items() if space[key].holds(value)}

    def trials(
        self, points: Sequence[Point], known: Sequence[Point], seed: int, rules: TrialRules
    ) -> Grid:
        """Return the grid of trials.

        Args:
            points: to train.
            known: these and all of earlier rounds.
            seed: of their runs.
            rules: by which they are judged.
        """
        labels = [point.label for point in points]
        return replace(self.grid(known, [seed], rules.goal, labels), trial=rules)

    def comparison(self, points: Sequence[Point]) -> Grid:
        """Return the grid of the final comparison, each norm with the settings of its point.

        Raises:
            InputError: a setting cannot be used; the message names it.
        """
        return self.grid(points, self.seeds, self.goal, None)


def builtin_subject(
    config: ComparisonSettings, notes: Notes | None = None, select_by: Goal | None = None
) -> Subject:
    """Return a recipe of a built-in task as what is tuned.

    Args:
        config: its settings.
        notes: what results.json says of it; None is what is known.
        select_by: overrules what the task is judged by.

    Raises:
        InputError: it has variants, norms that do not fit, or is not judged by that.
    """
    if config.variants:
        raise InputError(
            f"the recipe {config.preset} has variants, whose settings are the point: tune a "
            "recipe of norms"
        )
    check_norms(config)
    told = notes or notes_of(config)
    known = _goals(config)
    if select_by is not None and select_by not in known:
        options = ", ".join(f"{one['metric']}:{one['direction']}" for one in known)
        raise InputError(
            f"{config.task} cannot be judged by {select_by['metric']}:{select_by['direction']} "
            f"during the training: choose {options}"
        )
    judged = select_by or known[0]
    keys = [key for key in known_keys(type(config)) if not key.startswith("norm_options.")]

    def grid(
        points: Sequence[Point], seeds: Sequence[int], goal: Goal, labels: Sequence[str] | None
    ) -> Grid:
        variants = tuple(
            Variant(
                label=point.label,
                norm=point.norm,
                norm_options=point.norm_options(),
                settings={k: value_text(v) for k, v in point.settings().items()},
            )
            for point in points
        )
        norms = config.norms if labels is None else tuple(labels)
        whole = replace(config, norms=norms, seeds=tuple(seeds), variants=variants)
        return grid_of(whole, told if labels is None else Notes(goal))

    return Subject(
        norms=config.norms,
        seeds=config.seeds,
        goal=told.goal,
        select_by=judged,
        column="valid_loss" if judged["metric"] == "valid_loss" else "valid_score",
        identity={k: v for k, v in to_json(config).items() if k not in ("norms", "seeds")},
        settings={key: attrgetter(key)(config) for key in keys},
        norm_options={norm: options_of(config, norm) for norm in config.norms},
        ranges=_recipe_ranges(config),
        grid=grid,
    )


def _goals(config: ComparisonSettings) -> list[Goal]:
    """Return what trials can be judged by, the one that chooses checkpoints first."""
    loss, score = Goal(metric="valid_loss", direction="min"), config.score
    has_score = score is not None and score["metric"] in builtin_task(config).metrics
    if score is None or not has_score or not config.score_every:
        return [loss]
    return [score, loss] if config.selects_by_score else [loss, score]


def _recipe_ranges(config: ComparisonSettings) -> dict[str, str]:
    """Return ranges of the learning rate and its warm-up around the recipe's own."""
    rate, steps = config.optimizer.learning_rate, config.schedule.warmup_steps
    ranges = {LEARNING_RATE: f"log:{rate / 8:.6g}:{rate * 4:.6g}"}
    if steps is None:
        ranges[WARMUP] = "linear:0.01:0.3"
    else:
        most = max(steps + 1, min(4 * steps, config.training.max_steps // 2))
        ranges[WARMUP_STEPS] = f"int:{max(1, steps // 4)}:{most}"
    return ranges


def own_subject(
    train: Task | TrainingFunction | str,
    *,
    norms: Sequence[str],
    seeds: Sequence[int],
    goal: Mapping[str, str],
    select_by: Goal | None,
    settings: Mapping[str, Any],
    norm_options: Mapping[str, Mapping[str, Any]],
    device: str,
    num_threads: int | None,
) -> Subject:
    """Return a training function of a user's own as what is tuned.

    Nothing is searched that nobody names: what the parameters mean, only the user knows.

    Args:
        train: function, task or `module:name`.
        norms: short names, or `module:Class`.
        seeds: of the final comparison.
        goal: of the final comparison.
        select_by: value of the valid split by which trials are judged; None is derived of the goal.
        settings: values of the function's keyword parameters.
        norm_options: options by norm.
        device: as `compare`.
        num_threads: of each run.

    Raises:
        InputError: as `own_grid`, or nothing says by what trials are judged.
    """
    task = task_of(train)
    made = partial(
        own_grid,
        task,
        norms=norms,
        settings=settings,
        norm_options=norm_options,
        device=device,
        num_threads=num_threads,
    )
    whole = made(seeds=seeds, goal=goal)
    judged = select_by or _valid_goal(whole.goal)
    steps = task.num_steps(whole.settings)
    # As `Run` builds the norms: their warm-ups fit into the run where nobody sets them.
    derived = {} if steps is None else {norm: warmup_options(norm, steps) for norm in norms}

    def grid(
        points: Sequence[Point], seeds: Sequence[int], goal: Goal, labels: Sequence[str] | None
    ) -> Grid:
        variants = [
            Variant(
                label=point.norm if point.number is None else point.label,
                norm=point.norm,
                norm_options=point.norm_options(),
                settings=point.settings(),
            )
            for point in points
        ]
        about = {goal["metric"]: goal["direction"]}
        return made(seeds=seeds, goal=about, variants=variants, labels=labels)

    return Subject(
        norms=norms,
        seeds=seeds,
        goal=whole.goal,
        select_by=judged,
        column=judged["metric"],
        identity={
            "task": task.name,
            "settings": task.to_json(whole.settings),
            "norm_options": {norm: dict(chosen) for norm, chosen in norm_options.items()},
            "goal": whole.goal,
        },
        settings=whole.settings,
        norm_options={n: {**derived.get(n, {}), **norm_options.get(n, {})} for n in norms},
        ranges={},
        grid=grid,
    )


def _valid_goal(goal: Goal) -> Goal:
    """Return a goal of the test split with valid in place of test.

    Raises:
        InputError: it is none of the test split.
    """
    metric = goal["metric"]
    if metric.startswith("test_"):
        valid = metric.replace("test_", "valid_", 1)
        return Goal(metric=valid, direction=goal["direction"])
    raise InputError(
        f"the goal {metric} does not say by what trials are judged: give --select-by "
        "METRIC:max or METRIC:min, a value of the valid split that the function returns and, "
        "to give up trials early, logs; the goal is then for the test split"
    )


def _option(norm: str, key: str, options: Mapping[str, Any]) -> Any:
    """Return an option of a norm: what is set, or its default."""
    info = norm_info(norm)
    option = key.removeprefix(option_key(norm, ""))
    chosen = {**info.presets, **options}
    if option in chosen:
        return chosen[option]
    try:
        parameter = inspect.signature(info.layer).parameters.get(option)
    except (TypeError, ValueError):
        return None
    return None if parameter is None or parameter.default is parameter.empty else parameter.default


def spaces_of(
    subject: Subject,
    settings: Mapping[str, str],
    options: Mapping[str, Mapping[str, str]],
) -> dict[str, Space]:
    """Return the ranges of each norm: those that are declared, with what a user says.

    Args:
        subject: what is tuned.
        settings: ranges of settings, for all norms.
        options: ranges of options, by norm.

    Raises:
        InputError: a range cannot be used, or a norm has nothing to tune.
    """
    foreign = [norm for norm in options if norm not in subject.norms]
    if foreign:
        option = next(iter(options[foreign[0]]))
        raise InputError(
            f"{option_key(foreign[0], option)} is to be searched, and {foreign[0]} is not among "
            f"the norms ({', '.join(subject.norms)}): add it, or leave its ranges out"
        )
    spaces: dict[str, Space] = {}
    for norm in subject.norms:
        declared = {**search_space(norm), **options.get(norm, {})}
        own = {option_key(norm, option): text for option, text in declared.items()}
        texts = {**subject.ranges, **settings, **own}
        spaces[norm] = {k: parse_range(k, text) for k, text in texts.items() if text != FIXED}
        if not spaces[norm]:
            raise InputError(
                f"there is nothing to tune for {norm}: give a range, such as "
                "--search learning_rate=log:1e-4:1e-1"
            )
    _check_ends(subject, spaces)
    return spaces


def _check_ends(subject: Subject, spaces: Mapping[str, Space]) -> None:
    """Check each end of every range, beside the first values of the others."""
    points = []
    for norm, space in spaces.items():
        lowest = {key: one.values[0] for key, one in space.items()}
        first = {**lowest, **subject.untuned(norm, space)}
        tried = [first, *({**first, k: v} for k, one in space.items() for v in one.values)]
        points += [Point(norm, values) for values in tried]
    numbered = [replace(point, number=index) for index, point in enumerate(points)]
    subject.comparison(numbered)
