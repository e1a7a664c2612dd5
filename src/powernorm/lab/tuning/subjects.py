"""What is tuned: a recipe of a built-in task, or a function of a user's own."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from powernorm.errors import InputError
from powernorm.lab.comparing import notes_of
from powernorm.lab.engine.grid import Grid
from powernorm.lab.engine.tasks import Task, task_of
from powernorm.lab.engine.trials import TrialRules
from powernorm.lab.own_grid import OwnVariant, own_grid
from powernorm.lab.settings.comparison import (
    ComparisonSettings,
    Notes,
    Variant,
    options_of,
    to_json,
)
from powernorm.lab.settings.overrides import known_keys
from powernorm.lab.tasks.builtin import check_norms, grid_of
from powernorm.lab.tasks.registry import task_of as builtin_task
from powernorm.lab.tuning.ranges import (
    FIXED,
    Space,
    option_key,
    options_in,
    parse_range,
    settings_in,
    value_text,
)
from powernorm.norms.registry import norm_info
from powernorm.norms.search_spaces import search_space
from powernorm.runs import Goal

LEARNING_RATE: Final = "optimizer.learning_rate"
WARMUP: Final = "schedule.warmup_fraction"
WARMUP_STEPS: Final = "schedule.warmup_steps"


@dataclass(frozen=True)
class Point:
    """A line of a grid: a norm with the values that a trial has, or that were chosen."""

    norm: str
    values: Mapping[str, Any]
    """By dotted key."""
    number: int | None = None
    """Of the trial; None for the final comparison."""

    @property
    def label(self) -> str:
        """Name of the line: of its folder, and in tables."""
        name = self.norm.replace(":", ".")
        return name if self.number is None else f"{name}-trial{self.number}"


class Subject(Protocol):
    """What is tuned."""

    @property
    def norms(self) -> Sequence[str]:
        """Short names."""

    @property
    def seeds(self) -> Sequence[int]:
        """Return those of the final comparison."""

    @property
    def goal(self) -> Goal:
        """Return what the final comparison is about."""

    def identity(self) -> dict[str, Any]:
        """Return what a tuning that goes on must have in common with the one before, as JSON."""

    def select_by(self) -> Goal:
        """Return the value of the valid split by which trials are judged.

        Raises:
            InputError: nothing says which.
        """

    def column(self) -> str:
        """Return the column of metrics.csv that has it during a run."""

    def shared_ranges(self) -> dict[str, str]:
        """Return the ranges that all norms have without being asked for."""

    def untuned(self, norm: str, key: str) -> Any:
        """Return what a setting is without a tuning; None where that is no single value."""

    def check(self, points: Sequence[Point]) -> None:
        """Check that settings can be used.

        Raises:
            InputError: one cannot; the message names it.
        """

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

    def comparison(self, points: Sequence[Point]) -> Grid:
        """Return the grid of the final comparison."""


class BuiltinSubject:
    """A recipe of a built-in task.

    Args:
        config: its settings.
        notes: what results.json says of it; None is what is known.
        select_by: overrules what the task is judged by.

    Raises:
        InputError: it has variants, or norms that do not fit.
    """

    def __init__(
        self, config: ComparisonSettings, notes: Notes | None = None, select_by: Goal | None = None
    ) -> None:
        if config.variants:
            raise InputError(
                f"the recipe {config.preset} has variants, whose settings are the point: tune a "
                "recipe of norms"
            )
        check_norms(config)
        self._config = config
        self._notes = notes or notes_of(config)
        self.norms = config.norms
        self.seeds = config.seeds
        self.goal = self._notes.goal
        known = self._goals()
        if select_by is not None and select_by not in known:
            options = ", ".join(f"{one['metric']}:{one['direction']}" for one in known)
            raise InputError(
                f"{config.task} cannot be judged by {select_by['metric']}:{select_by['direction']} "
                f"during the training: choose {options}"
            )
        self._select_by = select_by or known[0]

    def _goals(self) -> list[Goal]:
        """Return what trials can be judged by, the one that chooses checkpoints first."""
        loss = Goal(metric="valid_loss", direction="min")
        score = self._config.score
        has_score = score is not None and score["metric"] in builtin_task(self._config).metrics
        if score is None or not has_score or not self._config.score_every:
            return [loss]
        return [score, loss] if self._config.selects_by_score else [loss, score]

    def identity(self) -> dict[str, Any]:
        """Return all settings but norms and seeds."""
        settings = to_json(self._config)
        return {key: settings[key] for key in settings if key not in ("norms", "seeds")}

    def select_by(self) -> Goal:
        """Return the task's score of the valid split, or its loss."""
        return self._select_by

    def column(self) -> str:
        """Return the column of the loss or of the score."""
        return "valid_loss" if self._select_by["metric"] == "valid_loss" else "valid_score"

    def shared_ranges(self) -> dict[str, str]:
        """Return ranges of the learning rate and its warm-up around the recipe's own."""
        rate = self._config.optimizer.learning_rate
        steps = self._config.schedule.warmup_steps
        ranges = {LEARNING_RATE: f"log:{rate / 8:.6g}:{rate * 4:.6g}"}
        if steps is None:
            ranges[WARMUP] = "linear:0.01:0.3"
        else:
            most = max(steps + 1, min(4 * steps, self._config.training.max_steps // 2))
            ranges[WARMUP_STEPS] = f"int:{max(1, steps // 4)}:{most}"
        return ranges

    def untuned(self, norm: str, key: str) -> Any:
        """Return the recipe's value, or the norm's default."""
        if key.startswith("norm_options."):
            return _option(norm, key, options_of(self._config, norm))
        if key not in known_keys(type(self._config)):
            return None  # is refused with all others
        value: Any = self._config
        for part in key.split("."):
            value = getattr(value, part)
        return value

    def check(self, points: Sequence[Point]) -> None:
        """Make the settings of each, and its norm once."""
        check_norms(self._with(points, self.seeds))

    def trials(
        self, points: Sequence[Point], known: Sequence[Point], seed: int, rules: TrialRules
    ) -> Grid:
        """Return the grid of trials, each a variant."""
        config = replace(self._with(known, (seed,)), norms=tuple(point.label for point in points))
        notes = Notes(rules.goal)
        return replace(grid_of(config, notes), trial=rules)

    def comparison(self, points: Sequence[Point]) -> Grid:
        """Return the grid of the norms, each a variant with the settings that were chosen."""
        return grid_of(self._with(points, self.seeds), self._notes)

    def _with(self, points: Sequence[Point], seeds: Sequence[int]) -> ComparisonSettings:
        variants = tuple(
            Variant(
                label=point.label,
                norm=point.norm,
                norm_options=options_in(point.values, point.norm),
                settings={k: value_text(v) for k, v in settings_in(point.values).items()},
            )
            for point in points
        )
        norms = tuple(dict.fromkeys(point.norm for point in points))
        return replace(self._config, norms=norms, seeds=tuple(seeds), variants=variants)


class OwnSubject:
    """A training function of a user's own.

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
        InputError: as `own_grid`.
    """

    def __init__(
        self,
        train: Any,
        *,
        norms: Sequence[str],
        seeds: Sequence[int],
        goal: Mapping[str, str],
        select_by: Goal | None,
        settings: Mapping[str, Any],
        norm_options: Mapping[str, Mapping[str, Any]],
        device: str,
        num_threads: int | None,
    ) -> None:
        self._task: Task = task_of(train)
        self._arguments: dict[str, Any] = {
            "settings": settings,
            "norm_options": norm_options,
            "device": device,
            "num_threads": num_threads,
        }
        grid = own_grid(self._task, norms=norms, seeds=seeds, goal=goal, **self._arguments)
        self._settings = grid.settings
        self.norms = norms
        self.seeds = seeds
        self.goal = grid.goal
        self._select_by = select_by

    def identity(self) -> dict[str, Any]:
        """Return the function's name, its settings and the norms' options."""
        return {
            "task": self._task.name,
            "settings": self._task.to_json(self._settings),
            "norm_options": {n: dict(o) for n, o in self._arguments["norm_options"].items()},
            "goal": dict(self.goal),
        }

    def select_by(self) -> Goal:
        """Return what was given, or the goal with valid in place of test."""
        if self._select_by is not None:
            return self._select_by
        metric = self.goal["metric"]
        if metric.startswith("test_"):
            valid = metric.replace("test_", "valid_", 1)
            return Goal(metric=valid, direction=self.goal["direction"])
        raise InputError(
            f"the goal {metric} does not say by what trials are judged: give --select-by "
            "METRIC:max or METRIC:min, a value of the valid split that the function returns and, "
            "to give up trials early, logs; the goal is then for the test split"
        )

    def column(self) -> str:
        """Return the metric's own name."""
        return self.select_by()["metric"]

    def shared_ranges(self) -> dict[str, str]:
        """Return none: what the parameters mean, only the user knows."""
        return {}

    def untuned(self, norm: str, key: str) -> Any:
        """Return the function's default, or the norm's."""
        if key.startswith("norm_options."):
            return _option(norm, key, self._arguments["norm_options"].get(norm, {}))
        return self._settings.get(key)

    def check(self, points: Sequence[Point]) -> None:
        """Check the settings of each, and its norm's options."""
        self._grid(points, self.seeds, self.goal)

    def trials(
        self, points: Sequence[Point], known: Sequence[Point], seed: int, rules: TrialRules
    ) -> Grid:
        """Return the grid of trials, each a variant."""
        labels = [point.label for point in points]
        grid = self._grid(known, [seed], rules.goal, labels)
        return replace(grid, trial=rules)

    def comparison(self, points: Sequence[Point]) -> Grid:
        """Return the grid of the norms, each with the settings that were chosen."""
        return self._grid(points, self.seeds, self.goal)

    def _grid(
        self,
        points: Sequence[Point],
        seeds: Sequence[int],
        goal: Goal,
        labels: Sequence[str] | None = None,
    ) -> Grid:
        variants = [
            OwnVariant(
                point.norm if point.number is None else point.label,
                point.norm,
                settings_in(point.values),
                options_in(point.values, point.norm),
            )
            for point in points
        ]
        return own_grid(
            self._task,
            norms=list(dict.fromkeys(point.norm for point in points)),
            seeds=seeds,
            goal={goal["metric"]: goal["direction"]},
            variants=variants,
            labels=labels,
            **self._own_options({point.norm for point in points}),
        )

    def _own_options(self, norms: set[str]) -> dict[str, Any]:
        options = self._arguments["norm_options"]
        chosen = {norm: options[norm] for norm in options if norm in norms}
        return {**self._arguments, "norm_options": chosen}


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
        texts = {**subject.shared_ranges(), **settings, **own}
        spaces[norm] = {k: parse_range(k, text) for k, text in texts.items() if text != FIXED}
        if not spaces[norm]:
            raise InputError(
                f"there is nothing to tune for {norm}: give a range, such as "
                "--search learning_rate=log:1e-4:1e-1"
            )
    _check_ends(subject, spaces)
    return spaces


def untuned_values(subject: Subject, norm: str, space: Space) -> dict[str, Any]:
    """Return what the settings are without a tuning, where the ranges hold it."""
    values = {key: subject.untuned(norm, key) for key in space}
    return {key: value for key, value in values.items() if space[key].holds(value)}


def _check_ends(subject: Subject, spaces: Mapping[str, Space]) -> None:
    """Check each end of every range, beside the first values of the others."""
    points = []
    for norm, space in spaces.items():
        first = {key: one.values[0] for key, one in space.items()} | untuned_values(
            subject, norm, space
        )
        tried = [first, *({**first, k: v} for k, one in space.items() for v in one.values)]
        points += [Point(norm, values) for values in tried]
    numbered = [replace(point, number=index) for index, point in enumerate(points)]
    subject.check(numbered)
