"""Subjects of tunings: recipes of built-in tasks and users' functions."""

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
    """Main metric of the final comparison."""
    select_by: Goal
    """Selection metric of the trials, on the valid split."""
    column: str
    """Column of metrics.csv with the selection metric."""
    identity: Mapping[str, Any]
    """Settings that a resumed tuning must share with the existing one, as JSON."""
    settings: Mapping[str, Any]
    """Untuned settings by dotted key."""
    norm_options: Mapping[str, Mapping[str, Any]]
    """Untuned options by norm, except for the norm's defaults."""
    ranges: Mapping[str, str]
    """Default ranges of all norms, by dotted key."""
    grid: Callable[[Sequence[Point], Sequence[int], Goal, Sequence[str] | None], Grid]
    """Function from points, seeds and a goal to a checked grid.

    The last argument has the labels of the trials to train, with the points of all trials; None
    trains all points in the final comparison.
    """

    def untuned(self, norm: str, space: Space) -> dict[str, Any]:
        """Return the untuned settings of a norm that are within their ranges, by dotted key."""
        options = self.norm_options.get(norm, {})
        own = {key: _option(norm, key, options) for key in space if key.startswith("norm_options.")}
        values = {key: self.settings.get(key) for key in space} | own
        return {key: value for key, value in values.items() if space[key].holds(value)}

    def trials(
        self, points: Sequence[Point], known: Sequence[Point], seed: int, rules: TrialRules
    ) -> Grid:
        """Return the grid of trials.

        Args:
            points: trials to train.
            known: these trials and those of earlier rounds.
            seed: seed of the runs.
            rules: selection metric and limits of pruning.
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
    """Return the subject of a built-in task's recipe.

    Args:
        config: settings of the recipe.
        notes: caveats and published results for results.json; None takes them from the recipe.
        select_by: selection metric; None is the task's default.

    Raises:
        InputError: the recipe has variants, or norms or a metric that do not fit the task.
    """
    if config.variants:
        raise InputError(
            f"the recipe {config.preset} has variants, whose settings must not be tuned: choose a "
            "recipe of norms, or write `variants = []` into a recipe of your own that extends it"
        )
    check_norms(config)
    told = notes or notes_of(config)
    known = _goals(config)
    if select_by is not None and select_by not in known:
        options = ", ".join(f"{one['metric']}:{one['direction']}" for one in known)
        raise InputError(
            f"{config.task} does not measure {select_by['metric']}:{select_by['direction']} "
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
    """Return the possible selection metrics, first the one that selects checkpoints."""
    loss, score = Goal(metric="valid_loss", direction="min"), config.score
    has_score = score is not None and score["metric"] in builtin_task(config).metrics
    if score is None or not has_score or not config.score_every:
        return [loss]
    return [score, loss] if config.selects_by_score else [loss, score]


def _recipe_ranges(config: ComparisonSettings) -> dict[str, str]:
    """Return ranges of learning rate and warm-up around the recipe's values."""
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
    """Return the subject of a user's training function.

    It has no default ranges, because the meanings of its parameters are not known.

    Args:
        train: function, task or `module:name`.
        norms: short names, or `module:Class`.
        seeds: seeds of the final comparison.
        goal: main metric of the final comparison.
        select_by: selection metric on the valid split; None derives it from the goal.
        settings: values of the function's keyword parameters.
        norm_options: options by norm.
        device: as in `compare`.
        num_threads: CPU threads of each run.

    Raises:
        InputError: as `own_grid`, or there is no selection metric.
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
    # As in `Run`: unless they are set, the norms' warm-ups fit into the run.
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
    """Return the valid split's metric for a goal of the test split.

    Raises:
        InputError: the goal is not of the test split.
    """
    metric = goal["metric"]
    if metric.startswith("test_"):
        valid = metric.replace("test_", "valid_", 1)
        return Goal(metric=valid, direction=goal["direction"])
    raise InputError(
        f"the goal {metric} is not a metric of the test split, such as test_loss, so that trials "
        "have no selection metric: give --select-by METRIC:max or METRIC:min, a metric of the "
        "valid split that the function returns and, for pruning, logs"
    )


def _option(norm: str, key: str, options: Mapping[str, Any]) -> Any:
    """Return the value of a norm's option, or its default."""
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
    """Return the ranges of each norm: the declared ones, overridden by the user's.

    Args:
        subject: subject of the tuning.
        settings: ranges of settings, for all norms.
        options: ranges of options, by norm.

    Raises:
        InputError: a range cannot be used, or a norm has none.
    """
    foreign = [norm for norm in options if norm not in subject.norms]
    if foreign:
        option = next(iter(options[foreign[0]]))
        raise InputError(
            f"{option_key(foreign[0], option)} has a range, but {foreign[0]} is not among the "
            f"norms ({', '.join(subject.norms)}): add it, or leave out its ranges"
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
    _check_values(subject, spaces)
    return spaces


def _check_values(subject: Subject, spaces: Mapping[str, Space]) -> None:
    """Check values of every range, combined with the first values of the others."""
    points = []
    for norm, space in spaces.items():
        lowest = {key: one.values[0] for key, one in space.items()}
        first = {**lowest, **subject.untuned(norm, space)}
        tried = [first, *({**first, k: v} for k, one in space.items() for v in one.probes())]
        points += [Point(norm, values) for values in tried]
    numbered = [replace(point, number=index) for index, point in enumerate(points)]
    subject.comparison(numbered)
