"""Trials of each norm in Optuna's storage."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import optuna
from optuna.importance import get_param_importances
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial
from sqlalchemy.engine import URL

from powernorm.errors import InputError
from powernorm_lab.engine.trials import Limits, TrialRules, median_limits
from powernorm_lab.runs import Goal
from powernorm_lab.tuning.ranges import Point, Space

STORAGE_FILE: Final = "optuna.db"
NUM_RANDOM: Final = 5
"""Trials of a norm before the sampler learns from them."""
NUM_BEFORE_PRUNING: Final = 4
"""Completed trials of a norm before a trial may be pruned."""
PRUNING_FROM: Final = 1 / 3
"""Fraction of a run before which no trial is pruned, because the rate may still rise."""
FEWEST_FOR_IMPORTANCE: Final = 4
_ASKED: Final = (TrialState.RUNNING, TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
STATES: Final = {
    "finished": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    # Not FAIL: the sampler should learn that these settings are worse than any value.
    "diverged": TrialState.PRUNED,
    "nonfinite": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}
"""Optuna's state of a trial by the status of its run."""


def open_storage(folder: Path) -> optuna.storages.BaseStorage:
    """Open the storage in a tuning's folder, or create it."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    place = URL.create("sqlite", database=str(folder.absolute() / STORAGE_FILE))
    # Optuna formats the URL as a template.
    url = place.render_as_string().replace("{", "{{").replace("}", "}}")
    return optuna.storages.RDBStorage(url)


@contextmanager
def naming_storage(folder: Path) -> Iterator[None]:
    """Convert Optuna's exceptions about a damaged storage to an InputError with advice."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # a damaged file raises many types in Optuna and its database
        first_line = str(error).partition("\n")[0]
        raise InputError(
            f"{folder / STORAGE_FILE} is damaged ({type(error).__name__}: {first_line}): put a "
            "copy of it in its place, or restart with --force"
        ) from error


class NormStudy:
    """Trials of one norm.

    Every trial has a new sampler with its own seed, whose proposal depends only on the earlier
    trials. A resumed tuning therefore proposes the same trials.

    Args:
        storage: storage of the tuning.
        norm: short name.
        goal: selection metric.
        space: ranges by dotted key.
        untuned: untuned settings that are within their ranges, for the first trial.
        seed: seed of the sampler.
    """

    def __init__(
        self,
        storage: optuna.storages.BaseStorage,
        norm: str,
        goal: Goal,
        space: Space,
        untuned: Mapping[str, Any],
        seed: int,
    ) -> None:
        self.norm = norm
        self.space = space
        self._seed = seed
        self._goal = goal
        self._distributions = {key: one.distribution() for key, one in space.items()}
        self._study = optuna.create_study(
            storage=storage,
            study_name=norm,
            direction="minimize" if goal["direction"] == "min" else "maximize",
            load_if_exists=True,
        )
        _ = self._study.direction  # raises for a damaged file without one
        self._untuned = dict(untuned)
        self._check_trials()

    def _check_trials(self) -> None:
        """Raise ValueError for trials of a damaged file that were never asked for."""
        for number, trial in enumerate(self.trials()):
            if trial.number != number:
                raise ValueError(f"trial {number} of {self.norm} is missing")
            if trial.params.keys() != self._distributions.keys():
                raise ValueError(f"trial {number} of {self.norm} lacks settings")
            if trial.state == TrialState.COMPLETE and trial.value is None:
                raise ValueError(f"trial {number} of {self.norm} lacks its value")

    def trials(self) -> list[FrozenTrial]:
        """Return all trials that were asked for."""
        return self._study.get_trials(deepcopy=False, states=_ASKED)

    def points(self, states: Sequence[TrialState] = _ASKED) -> list[Point]:
        """Return the trials in some states as points of the grid."""
        found = (trial for trial in self.trials() if trial.state in states)
        return [Point(self.norm, dict(trial.params), trial.number) for trial in found]

    def next_round(self, size: int, num_trials: int) -> list[Point]:
        """Return the trials to train next, started and new ones; empty at the end.

        Args:
            size: number of trials in a round.
            num_trials: number of trials in the whole tuning.
        """
        known = self.trials()
        is_told = [trial.state != TrialState.RUNNING for trial in known]
        first = is_told.index(False) if False in is_told else len(known)
        for number in range(len(known), min((first // size + 1) * size, num_trials)):
            self._ask(number)
        return self.points((TrialState.RUNNING,))

    def _ask(self, number: int) -> None:
        seed = zlib.crc32(f"{self._seed} {self.norm} {number}".encode())
        sampler = TPESampler(n_startup_trials=NUM_RANDOM, seed=seed)
        # Drawn in memory: in the storage, a kill between two settings would leave half a trial.
        draft = optuna.create_study(directions=self._study.directions, sampler=sampler)
        draft.add_trials(self._study.get_trials(deepcopy=False))
        if number == 0:
            draft.enqueue_trial(self._untuned)
        params = draft.ask(self._distributions).params
        state = TrialState.RUNNING
        self._study.add_trial(
            create_trial(state=state, params=params, distributions=self._distributions)
        )

    def tell(self, number: int, status: str, value: float | None, history: Limits) -> None:
        """Store the result of a trial.

        Args:
            number: number of the trial.
            status: status of its run.
            value: selection metric; None without one.
            history: selection metric at its validations, by step.
        """
        state = STATES[status]
        trial = self._study.get_trials(deepcopy=False)[number]
        if state == TrialState.COMPLETE and value is None:
            state = TrialState.PRUNED
        if status in ("finished", "pruned"):
            reporting = Trial(self._study, trial._trial_id)
            for step in history.keys() - trial.intermediate_values.keys():
                reporting.report(history[step], step)
        is_complete = state == TrialState.COMPLETE
        # Without None, Optuna would take the last value of a pruned trial as its result.
        self._study.tell(number, value if is_complete else None, state)

    def limits(self) -> Limits:
        """Return the values below which the next trials are pruned, by step."""
        histories = [t.intermediate_values for t in self._complete()]
        last = max((step for history in histories for step in history), default=0)
        return median_limits(
            histories, at_least=NUM_BEFORE_PRUNING, first_step=round(PRUNING_FROM * last)
        )

    def _complete(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))

    def best(self) -> FrozenTrial | None:
        """Return the best completed trial, the first of equal ones; None without one."""
        complete = [trial for trial in self._complete() if trial.value is not None]
        if not complete:
            return None
        choose: Callable[..., Any] = min if self._goal["direction"] == "min" else max
        best: FrozenTrial = choose(complete, key=lambda trial: trial.value)
        return best

    def curve(self) -> list[float | None]:
        """Return the best value after 1, 2, … trials; None before the first value."""
        best: float | None = None
        curve: list[float | None] = []
        for trial in self.trials():
            value = trial.value if trial.state == TrialState.COMPLETE else None
            if value is not None:
                best = TrialRules(self._goal).better(best, value)
            curve.append(best)
        return curve

    def importance(self) -> dict[str, float]:
        """Return the importance of each setting, with a sum of 1; empty for too few trials."""
        complete = self._complete()
        if len(complete) < FEWEST_FOR_IMPORTANCE or len({t.value for t in complete}) < 2:
            return {}
        return dict(get_param_importances(self._study))
