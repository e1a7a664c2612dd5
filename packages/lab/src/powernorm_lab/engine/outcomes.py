"""Status and result of a run, from the metrics that the task returned."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from powernorm.errors import InputError
from powernorm_lab.engine.grid import Grid
from powernorm_lab.engine.line import Line
from powernorm_lab.engine.run import Run
from powernorm_lab.engine.run_logs import plain_number
from powernorm_lab.engine.tasks import Metrics
from powernorm_lab.runs import RunResult, Status


def measured_result(run: Run, line: Line, grid: Grid, metrics: Metrics) -> RunResult:
    """Return the result of a run that was trained to its end.

    Args:
        run: the run.
        line: line of the run.
        grid: grid of the comparison.
        metrics: return value of the task.

    Raises:
        InputError: the task used no norm, or returned no mapping of names to numbers with the goal.
    """
    if run.is_pruned:
        return result_of(run, line, "pruned", message=behind(run.step))
    if "status" in run.recorded and run.uses_norm:
        status = run.recorded["status"]
        message = run.recorded.get("message") or _reason(run, status)
        return result_of(run, line, status, _checked_metrics(metrics), message)
    if run.is_nonfinite:
        return result_of(run, line, "nonfinite", message=_reason(run, "nonfinite"))
    if not run.uses_norm:
        raise InputError(
            f"{grid.task.name} called neither run.swap nor run.build_norm, so every norm would "
            "train the same model: build the model with one of them"
        )
    found = _checked_metrics(metrics)
    goal = grid.goal["metric"]
    if goal not in found:
        raise InputError(
            f"{grid.task.name} returned no {goal!r}, which is the goal (it returned "
            f"{', '.join(found) or 'nothing'}): return it, and --resume continues from the "
            "checkpoint at the end of the training; or give another goal with --force"
        )
    value = found[goal]
    if value is None:
        message = f"{goal} is NaN, infinite or None"
        return result_of(run, line, "nonfinite", found, message)
    floor = run.baselines[0]["metrics"].get(goal) if run.baselines else None
    if floor is not None and (value > floor if grid.goal["direction"] == "min" else value < floor):
        message = f"{goal} is worse than that of {run.baselines[0]['name']}"
        return result_of(run, line, "diverged", found, message)
    return result_of(run, line, "finished", found, _reason(run, "finished"))


def _reason(run: Run, status: Status) -> str:
    """Return why a run stopped early; empty if it reached its last step."""
    if status == "nonfinite":
        return f"the loss was NaN or infinite; stopped at step {run.step}"
    is_early = run.is_out_of_patience and run.step != run.num_steps
    return f"stopped early after step {run.step}" if is_early and status == "finished" else ""


def behind(step: int) -> str:
    """Return the message of a trial that was pruned after a step."""
    return f"given up after step {step}: worse than the median of the earlier trials"


def result_of(
    run: Run,
    line: Line,
    status: Status,
    metrics: Mapping[str, float | None] | None = None,
    message: str = "",
) -> RunResult:
    """Return the contents of a run's result.json."""
    recorded = {key: value for key, value in run.recorded.items() if key != "status"}
    known = recorded.pop("message", "")
    return replace(
        result_without_training(line, run.seed, run.folder.name, status, message or known),
        metrics=dict(metrics or {}),
        seconds=round(run.seconds, 3),
        parameters=run.num_parameters,
        **recorded,
    )


def result_without_training(
    line: Line, seed: int, folder: str, status: Status, message: str
) -> RunResult:
    """Return the result of a run that was not trained to its end.

    Args:
        line: line of the run.
        seed: seed of the run.
        folder: name of its folder.
        status: `failed` if all its workers were lost, `dropped` if the race was decided.
        message: the reason.
    """
    return RunResult.empty(
        norm=line.norm,
        seed=seed,
        placement=line.placement,
        status=status,
        folder=folder,
        label=line.label or "",
        x=line.x,
        y=line.y,
        message=message,
    )


def _checked_metrics(metrics: Any) -> dict[str, float | None]:
    """Return the metrics of a training function as numbers; None for values that are not finite.

    Raises:
        InputError: the return value is not a mapping of names to numbers.
    """
    if not isinstance(metrics, Mapping):
        raise InputError(
            f"the training function returned {metrics!r:.80}, expected a dict of metrics such as "
            "{'valid_loss': 1.23}"
        )
    found: dict[str, float | None] = {}
    for name, value in metrics.items():
        try:
            number = plain_number(value)
        except (TypeError, ValueError):
            raise InputError(
                f"the training function returned {name}={value!r:.80}, expected a number"
            ) from None
        found[str(name)] = number if number is not None and math.isfinite(number) else None
    return found
