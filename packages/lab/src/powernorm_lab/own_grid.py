"""Grid of runs of a training function, with checked arguments."""

from collections.abc import Mapping, Sequence
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

import torch

from powernorm.errors import InputError
from powernorm.norms.registry import check_norm_options
from powernorm_lab.engine.environment import environment
from powernorm_lab.engine.grid import Grid
from powernorm_lab.engine.line import Line
from powernorm_lab.engine.processes import are_several, local_rank
from powernorm_lab.engine.tasks import Task, TrainingFunction, task_of
from powernorm_lab.runs import Goal
from powernorm_lab.settings.comparison import Variant

NORM_OPTIONS: Final = "norm_options"
NORMS: Final = ("ln", "bn", "rbn", "pn")
NUM_THREADS: Final = "num_threads"
Direction = Literal["min", "max"]


def own_grid(
    train: Task | TrainingFunction | str,
    *,
    norms: Sequence[str],
    seeds: Sequence[int],
    goal: Mapping[str, str],
    settings: Mapping[str, Any],
    norm_options: Mapping[str, Mapping[str, Any]],
    device: str = "auto",
    num_threads: int | None = None,
    variants: Sequence[Variant] = (),
    labels: Sequence[str] | None = None,
) -> Grid:
    """Return the grid of a training function after checking all arguments.

    Args:
        train: function of a `Run`, a `Task`, or `module:name` of one.
        norms: short names, or `module:Class`.
        seeds: seeds of the runs.
        goal: metric that decides, with its better direction, `max` or `min`.
        settings: values of the function's keyword parameters, or strings to parse.
        norm_options: options of `build_norm` by norm.
        device: as in `_chosen_device`.
        num_threads: CPU threads of torch in each run; None is torch's default.
        variants: variants to train instead of plain norms; a variant whose label is its norm is
            the line of that norm.
        labels: labels of the variants to train; None is all. The others may already have runs.

    Raises:
        InputError: an argument cannot be used; the message names it.
    """
    task = task_of(train)
    decides = checked_goal(goal, "goal", f"the metric of {task.name} that compares the norms")
    checked = task.settings(settings)
    for norm in (*norms, *norm_options):
        check_norm_options(norm, norm_options.get(norm, {}))
    unused = [norm for norm in norm_options if norm not in norms]
    if unused:
        raise InputError(
            f"norm_options.{unused[0]} is given, but {unused[0]} is not among the norms "
            f"({', '.join(norms)}): add it, or leave out its options"
        )
    options = {norm: dict(norm_options.get(norm, {})) for norm in norms}
    lines = {norm: Line(norm, checked, options[norm]) for norm in norms}
    if variants:
        lines = {one.label: _line_of_variant(one, task, settings, options) for one in variants}
    for line in lines.values():
        task.check(line.settings, line.norm)
    return Grid(
        task=task,
        lines=[lines[label] for label in (lines if labels is None else labels)],
        seeds=seeds,
        goal=decides,
        settings=checked,
        head=partial(_head, task, checked, options, list(seeds)),
        config=partial(_config, task, decides, num_threads),
        line_of=partial(_line_of, checked, norm_options, lines if variants else {}),
        device=_chosen_device(device),
        num_threads=num_threads,
    )


def _line_of_variant(
    variant: Variant,
    task: Task,
    settings: Mapping[str, Any],
    options: Mapping[str, Mapping[str, Any]],
) -> Line:
    chosen = {**options.get(variant.norm, {}), **variant.norm_options}
    check_norm_options(variant.norm, chosen)
    own = task.settings({**settings, **variant.settings})
    if variant.label == variant.norm:
        return Line(variant.norm, own, chosen)
    return Line(variant.norm, own, chosen, label=variant.label)


def _chosen_device(device: str) -> torch.device:
    """Return the device of a name; `auto` is a GPU if there is one.

    Raises:
        InputError: torch does not know the device, or the machine does not have it.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        if device == "cuda" and torch.cuda.is_available():
            chosen = torch.device("cuda", local_rank() if are_several() else 0)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first_line = str(error).partition("\n")[0]
        raise InputError(
            f"device {device!r} cannot be used ({first_line}): try auto or cpu"
        ) from error
    return chosen


def checked_goal(given: Mapping[str, str], option: str, meaning: str) -> Goal:
    """Return a metric and its better direction.

    Args:
        given: the metric with `max` or `min`.
        option: name of the option, for error messages.
        meaning: description of the metric, for error messages.

    Raises:
        InputError: there is not exactly one metric, or its direction is unknown.
    """
    if len(given) != 1:
        raise InputError(
            f"{option} is {given!r}: name {meaning}, and its better direction, e.g. "
            "{'valid_loss': 'min'}"
        )
    ((metric, direction),) = given.items()
    if direction not in get_args(Direction):
        raise InputError(
            f"{option} {metric!r}: the direction is {direction!r}, expected min or max"
        )
    return Goal(metric=metric, direction=cast("Direction", direction))


def checked_seeds(seeds: int | Sequence[int]) -> list[int]:
    """Return the list of seeds; a number n gives 0 to n - 1.

    Raises:
        InputError: the list is empty, or has repeated seeds, or others than whole numbers from 0 to
            2^63 - 1.
    """
    try:
        chosen = [index(one) for one in (range(seeds) if isinstance(seeds, int) else seeds)]
    except TypeError:
        chosen = []
    if not chosen or len({*chosen}) < len(chosen) or min(chosen) < 0 or max(chosen) >= 2**63:
        raise InputError(
            f"seeds is {seeds!r}: give a number of seeds (at least 1), or different seeds from 0"
        )
    return chosen


def checked_norms(norms: Sequence[str]) -> list[str]:
    """Return the norms of a comparison.

    Raises:
        InputError: the list is empty or has repeated norms.
    """
    chosen = list(norms)
    if isinstance(norms, str) or not chosen or len(set(chosen)) < len(chosen):
        raise InputError(f"norms is {norms!r}: give different short names, such as {list(NORMS)}")
    return chosen


def _head(
    task: Task, settings: Any, options: Mapping[str, Any], seeds: list[int]
) -> dict[str, Any]:
    return {
        "task": task.name,
        "function": task.source(),
        "settings": {
            **task.to_json(settings),
            "norms": list(options),
            "seeds": seeds,
            NORM_OPTIONS: {norm: chosen for norm, chosen in options.items() if chosen},
            **environment(["powernorm"]),
        },
    }


def _config(
    task: Task,
    goal: Goal,
    num_threads: int | None,
    line: Line,
    seed: int,
    fingerprint: str | None,
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "task": task.name,
        "function": task.source(),
        "goal": goal,
        "norm": line.norm,
        "seed": seed,
        NORM_OPTIONS: dict(line.norm_options),
        "settings": task.to_json(line.settings),
    }
    if num_threads is not None:
        config[NUM_THREADS] = num_threads
    if line.label is not None:
        config["label"] = line.label
    return config if fingerprint is None else {**config, "data_fingerprint": fingerprint}


def _line_of(
    settings: Any,
    norm_options: Mapping[str, Mapping[str, Any]],
    variants: Mapping[str, Line],
    folder: Path,
    old: Mapping[str, Any],
) -> Line:
    """Return the line of a run from an earlier call, even if its norm is not chosen now."""
    norm = old.get("norm")
    if not isinstance(norm, str):
        raise InputError(f"{folder} is not a run of a training function: give another --out")
    variant = variants.get(old.get("label", norm))
    if variant is not None:
        return variant
    chosen = norm_options.get(norm)
    if chosen is None and isinstance(old.get(NORM_OPTIONS), Mapping):
        chosen = old[NORM_OPTIONS]
    return Line(norm=norm, settings=settings, norm_options=dict(chosen or {}))
