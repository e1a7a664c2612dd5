"""One training of a comparison, as the function that trains sees it."""

import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import torch
from torch import Tensor, nn

import powernorm
from powernorm.diagnosis import NormMonitor
from powernorm.errors import InputError
from powernorm.inspection import Where
from powernorm.inspection.batches import Forward
from powernorm.integrations.trainers import loss_scale, process_penalty
from powernorm.norms import Norm
from powernorm.norms.models import Reduction
from powernorm.records import CONFIG_FILE, TID
from powernorm_lab.engine.averaging import Snapshots
from powernorm_lab.engine.best import Best, Direction
from powernorm_lab.engine.diagnosing import EPOCH, Diagnosing, Epochs
from powernorm_lab.engine.distribution import divide_weights, synchronized
from powernorm_lab.engine.events import Listener, Notice, RunStarted, logged
from powernorm_lab.engine.folders import BEST, LAST, last_checkpoint
from powernorm_lab.engine.leases import LEASE_FILE, LOCK_FILE, Lease
from powernorm_lab.engine.position import Position
from powernorm_lab.engine.processes import (
    any_process,
    gather,
    is_main,
    num_processes,
    on_main,
    rank,
    summed,
)
from powernorm_lab.engine.run_logs import RunLogs, number_of
from powernorm_lab.engine.sharding import check_equal_weights, is_sharded, shards
from powernorm_lab.engine.state import FIX, random_states, set_random_states, weights_in
from powernorm_lab.engine.stopping import Stop, Stopped
from powernorm_lab.engine.throughput import Throughput
from powernorm_lab.engine.tracked import Tracked
from powernorm_lab.engine.trials import TrialRules
from powernorm_lab.engine.warmup import warmup_options
from powernorm_lab.engine.watching import Monitoring, evaluating
from powernorm_lab.runs import (
    AVERAGE_SCORED,
    BEST_SCORED,
    CHECKPOINTS_FOLDER,
    DIAGNOSES_FILE,
    DIAGNOSIS_FILE,
    DIAGNOSIS_PAGE,
    LAST_SCORED,
    METRICS_FILE,
    NORMS_FILE,
    RESULT_FILE,
    SCALES_FILE,
    Baseline,
    RunResult,
    Status,
)
from powernorm_lab.schema import record_of, written

CHECKPOINT_SECONDS: Final = 300.0
"""At the latest after so long a checkpoint is written, where the steps between are not given."""
LOST_ROWS: Final = 2
"""Rows of the log in a row with a training loss that is not finite, after which a run is lost."""
RESERVED: Final = frozenset(
    {
        *(CONFIG_FILE, RESULT_FILE, METRICS_FILE, NORMS_FILE, SCALES_FILE, CHECKPOINTS_FOLDER),
        *(DIAGNOSES_FILE, DIAGNOSIS_FILE, DIAGNOSIS_PAGE, LEASE_FILE, LOCK_FILE),
    }
)
"""The engine's own in a run's folder."""

RECORDED: Final = ("finished", "diverged", "nonfinite")
"""Statuses that a function may say of its run."""

_Model = TypeVar("_Model", bound=nn.Module)
_Batch = TypeVar("_Batch")
Evaluation = Callable[[], Mapping[str, float | Tensor | None] | None]
Batches = Iterable[_Batch] | Callable[[int], Iterable[_Batch]]


class Run:
    """One norm and one seed of a comparison: what the training function builds and reports with.

    The engine seeds Python's, NumPy's and torch's generators by `seed` before the function is
    called, so that all norms of a seed begin with the same weights and see the same batches.

    Attributes:
        seed: of this run.
        folder: of this run.
        device: to train on: a GPU where there is one, unless the comparison says otherwise.
        settings: keyword arguments of the function, by name; or the task's own settings.
        data: what the task's `prepare` returned; None for a plain function.
        baselines: what the task's `baselines` returned; empty for a plain function.
        num_steps: number of steps: the setting `steps`, or what the task says. None where there is
            none; then `steps` sets it to the number of batches, where that is known.
    """

    def __init__(
        self,
        *,
        norm: str,
        seed: int,
        folder: Path,
        device: torch.device,
        settings: Any,
        data: Any,
        num_steps: int | None,
        norm_options: Mapping[str, Any],
        lease: Lease | None,
        stop: Stop,
        listener: Listener,
        label: str | None = None,
        baselines: Sequence[Baseline] = (),
        index: int = 1,
        num_runs: int = 1,
        trial: TrialRules | None = None,
        score: str | None = None,
        log_to: Sequence[str] = (),
    ) -> None:
        self._norm = norm
        self.label = label or norm
        self.seed = seed
        self.folder = folder
        self.device = device
        self.settings = settings
        self.data = data
        self.baselines = baselines
        self.num_steps = num_steps
        self.norm_options = dict(norm_options)
        self.index = index
        self.num_runs = num_runs
        self.listener = listener
        self.stop = stop
        self.lease = lease
        self.trial = trial
        self._score = score
        self.recorded: dict[str, Any] = {}
        """What `record` was given."""
        self.step = 0
        """Number of steps that are done, earlier sittings included."""
        self.is_nonfinite = False
        """Whether the training loss was lost."""
        self.is_pruned = False
        """Whether it is a trial that fell behind."""
        self._best_of_trial: float | None = None
        """By what trials are judged by."""
        self._knows_norm = False
        self._built: list[nn.Module] = []
        self._tracked = Tracked(folder, self.writing)
        self._logs = RunLogs(folder, lambda: self._tracked.step, self.writing, log_to)
        self._started = time.perf_counter()
        self._saved_at = time.perf_counter()
        self._saved_step: int | None = None
        self._lost_rows = 0
        self._monitors: list[Monitoring] = []
        self._evaluations: list[tuple[int, Evaluation]] = []
        self._evaluated_at: int | None = None
        self._diagnosing: list[Diagnosing] = []
        self._best: Best | None = None
        self._throughput = Throughput()
        self._snapshots: Snapshots | None = None
        self._position = Position()
        self._is_started = False
        self._is_in_step = False
        self._wants_checkpoint = False
        self._kept_names: list[str] = []
        self._keeps_end = True
        self._end: Mapping[str, Any] | None = None
        self._stop_was_seen = False

    # What is compared

    @property
    def norm(self) -> str:
        """Short name of the norm, or `module:Class`, for a function that builds it by itself."""
        self._knows_norm = True
        return self._norm

    @property
    def is_trial(self) -> bool:
        """Whether this is a trial of a tuning, of whose result only the valid score is looked at.

        A function may leave the test data alone then, and return no test metric.
        """
        return self.trial is not None

    def swap(self, model: _Model, where: str | Where | Any = None) -> _Model:
        """Replace the norms of a model by the run's, in place, and return the model.

        Call it before the optimizer is built, and before `torch.compile` or a wrapper for several
        processes.

        Args:
            model: any module; see `powernorm.swap`.
            where: which of its norms; see `powernorm.plan_swap`.

        Raises:
            InputError: as `powernorm.swap`.
        """
        with self._own_random_numbers():
            powernorm.swap(model, self._norm, where, **self._options())
        self._built.append(model)
        return model

    def build_norm(self, num_features: int, **fixed: Any) -> Norm:
        """Return a norm of the run over `num_features` features.

        Args:
            num_features: C.
            fixed: options that the model's architecture fixes, such as `feature_dim=1`; they win
                over those of the comparison.

        Raises:
            InputError: as `powernorm.build_norm`.
        """
        with self._own_random_numbers():
            norm = powernorm.build_norm(self._norm, num_features, **{**self._options(), **fixed})
        self._built.append(norm)
        return norm

    def build(self, make: Callable[[], _Model]) -> _Model:
        """Return the model that a function builds with the run's norms inside.

        It draws the model's first weights from the seed and leaves the generators as they were,
        so that all norms of a seed have the same first weights. Monitors, penalties and the number
        of parameters are those of the whole model.

        Args:
            make: calls `build_norm`, `swap` or reads `norm`, and returns the model.

        Raises:
            InputError: it did not use the norm.

        >>> model = run.build(lambda: Encoder(norm=run.build_norm))  # doctest: +SKIP
        """
        before = len(self._built)
        with self._own_random_numbers():
            torch.default_generator.manual_seed(self.seed)
            model = make()
        if not self.uses_norm:
            raise InputError(
                "run.build got a model that did not ask for the norm, so that every norm would "
                "train the same model: build its norms with run.build_norm"
            )
        self._built[before:] = [model]
        return model

    def wrap(self, model: _Model, strategy: Literal["ddp", "fsdp2"] = "ddp") -> nn.Module:
        """Return what to call in the training in place of the model.

        In several processes (`--devices`, `torchrun`) it is torch's DistributedDataParallel, whose
        backward gives every process the mean of the gradients of all; in one the model itself. The
        optimizer, `track` and evaluations keep the model.

        Args:
            model: on its device, after `swap`; also a module around one whose weights are divided
                already.
            strategy: `fsdp2` divides the weights of each layer of a `nn.ModuleList`, then the rest,
                among the processes, in place: call it before the optimizer is built. Checkpoints
                hold whole weights.
        """
        if strategy == "fsdp2" and num_processes() > 1:
            divide_weights(model, self.device)
        return synchronized(model)

    def penalty(
        self, num_tokens: int | Tensor | None = None, reduction: Reduction = "mean"
    ) -> Tensor:
        """Return the penalty of Regularized BatchNorm to add to the loss; 0 for other norms.

        Args:
            num_tokens: number of tokens that the loss is the mean of, in several processes that of
                this one; needed for `mean`.
            reduction: how the loss is reduced: `mean` over tokens, or `token_sum`.

        Raises:
            InputError: as `powernorm.penalty`, or nothing was built by this run.
        """
        if not self._built:
            raise InputError(
                "run.penalty was called before run.swap or run.build_norm: build the model first"
            )
        model = nn.ModuleList(self._built)
        added = process_penalty(model, reduction, num_tokens) if num_processes() > 1 else None
        return powernorm.penalty(model, reduction, num_tokens) if added is None else added

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Let a norm draw what it begins with; what is built after it shall not depend on it."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            yield

    def _options(self) -> dict[str, Any]:
        """Return the norm's options: those of the comparison, and warm-ups that fit into the run.

        They count forwards in training, one a step.
        """
        if self.num_steps is None:
            return self.norm_options
        derived = warmup_options(self._norm, self.num_steps)
        return derived | self.norm_options

    # State that survives an interruption

    def track(self, **things: Any) -> None:
        """Keep the state of objects in the checkpoints, and restore it at once when resuming.

        Args:
            things: modules, optimizers, schedules, scalers, `torch.Generator`s, … by a name of
                your choice: what has `state_dict` and `load_state_dict`.

        Raises:
            InputError: an object has no state, a name is taken, or the checkpoint does not fit.
        """
        # Weights of modules before what trains them: an optimizer follows how these are divided.
        for name, thing in sorted(
            things.items(), key=lambda one: not isinstance(one[1], nn.Module)
        ):
            if self._is_started:
                raise InputError(f"run.track({name}=…) comes after run.steps: track before it")
            self._tracked.add(name, thing)
        checkpoint = self._tracked.checkpoint
        if checkpoint is not None:
            with self._tracked.naming():
                self.step = self._saved_step = int(checkpoint["step"])
                self._lost_rows = int(checkpoint["lost_rows"])
                self.is_nonfinite = self._lost_rows >= LOST_ROWS
                self._best_of_trial, self.is_pruned = checkpoint["trial"]
            # For loops of the user's own; `steps` does it again, just before the first batch.
            self._tracked.set_random_states()

    def checkpoint(self, step: int | None = None, *, keep: str | None = None) -> None:
        """Write a checkpoint now: tracked objects, random generators, step, place in the data.

        `steps` calls it by itself; a loop of your own does after a step. Within `steps` it is
        written when the step at hand is done.

        Args:
            step: number of steps that are done, where `steps` does not count them.
            keep: name under which it is kept, too: `early` is checkpoints/early.ckpt.

        Raises:
            InputError: nothing is tracked, or the file cannot be written.
        """
        if not self._tracked:
            raise InputError(
                "run.checkpoint has nothing to save: call run.track(model=…, optimizer=…) before"
            )
        if keep is not None:
            self._kept_names.append(f"{keep}.ckpt")
        if self._is_in_step:
            self._wants_checkpoint = True
            return
        self.step = self.step if step is None else step
        self._logs.flush()
        self._tracked.save(
            {
                "step": self.step,
                "position": gather(self._position.state_dict()),
                "seconds": self.seconds,
                "lost_rows": LOST_ROWS if self.is_nonfinite else self._lost_rows,
                "evaluated_at": self._evaluated_at,
                "trial": (self._best_of_trial, self.is_pruned),
                "best": None if self._best is None else self._best.state_dict(),
                "speed": self._throughput.state_dict(),
                **({} if self._end is None else {"result": self._end}),
            },
            copies=self._kept_names,
        )
        self._kept_names = []
        self._saved_step = self.step
        self._saved_at = time.perf_counter()
        self._wants_checkpoint = False

    @property
    def should_stop(self) -> bool:
        """Whether to end the training now: a scheduler asked for it, or the loss is lost.

        Or it is a trial of a tuning that fell behind. For loops other than `steps`: after it was
        True, call `checkpoint` and return. Every process reads it equally often.
        """
        self.stop.defer(until_asked=True)
        self._stop_was_seen |= self._agree()
        return self._stop_was_seen or self._ends_early

    def _agree(self) -> bool:
        """Return whether any process was asked to stop.

        What ends the run in one of them ends it in all: each may have logged its own loss.
        """
        is_asked, self.is_nonfinite, self.is_pruned = any_process(
            self.stop.was_asked, self.is_nonfinite, self.is_pruned
        )
        return is_asked

    @property
    def _ends_early(self) -> bool:
        return self.is_nonfinite or self.is_pruned or self.is_out_of_patience

    @property
    def is_out_of_patience(self) -> bool:
        """Whether the run has waited long enough for a better evaluation; see `keep_best`."""
        return self._best is not None and self._best.is_out_of_patience

    @property
    def was_interrupted(self) -> bool:
        """Whether a scheduler's request to stop was passed on to the function."""
        return self._stop_was_seen

    @property
    def is_resumed(self) -> bool:
        """Whether there is a checkpoint that the run goes on from."""
        return self._tracked.checkpoint is not None

    def steps(
        self,
        batches: Batches[_Batch],
        *,
        checkpoint_every: int | None = None,
        shard: bool = True,
    ) -> Iterator[tuple[int, _Batch]]:
        """Yield (step, batch), the step from 1, until the run has its `num_steps`.

        Without the setting `steps` it is one pass through the batches; with it they are begun anew
        as often as needed. Between two steps it evaluates, diagnoses, saves and, when a
        scheduler sends SIGTERM or SIGUSR1, ends the run as `interrupted`. A run that goes
        on comes to the same batch: by the `state_dict` of the batches where they have one
        (torchdata's StatefulDataLoader), else by skipping those that were seen. Batches draw their
        random numbers from a stream of their own, beside the training's.

        In several processes each one gets its part of the rows of every batch, unless the loader
        has a DistributedSampler; together with `wrap` they train as one process does where all
        parts are equally large. Weights that differ between the processes after a step end the run.

        Args:
            batches: a DataLoader, or anything that can be iterated; or a function that returns the
                batches after so many steps, which a run that resumes does not need to skip.
            checkpoint_every: steps between two checkpoints; None is a tenth of the run, or five
                minutes, whichever comes first.
            shard: whether batches are divided among several processes; False where each process
                has batches of its own, or the loop makes them.

        Raises:
            InputError: called twice; nothing built or tracked where it has to be; what is given
                cannot be iterated; the batches end before `num_steps` and cannot be begun anew; a
                batch cannot be divided, or the processes have learned different weights.
        """
        is_iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
        if not is_iterable and (not callable(batches) or isinstance(batches, nn.Module)):
            raise InputError(
                f"run.steps got {batches!r:.80}, expected batches: give a DataLoader or a list, or "
                "range(100) where the loop makes its own; how many steps a run has is its setting "
                "steps"
            )
        if checkpoint_every is not None and checkpoint_every < 1:
            raise InputError(f"checkpoint_every is {checkpoint_every}, expected at least 1")
        self._start(batches)
        every = checkpoint_every or max(1, (self.num_steps or 10_000) // 10)
        # A signal waits for the end of its step.
        self.stop.defer(until_asked=True)
        try:
            if not self.is_resumed:
                self._diagnose(is_last=False)
            found = self._batches(batches)
            is_divided = shard and num_processes() > 1 and not is_sharded(batches)
            for batch in shards(found) if is_divided else found:
                for monitoring in self._monitors:
                    monitoring.start(self.step + 1)
                self._throughput.begin()
                self._is_in_step = True
                yield self.step + 1, batch
                self._is_in_step = False
                self.step += 1
                self._throughput.end()
                self._after_step(every, by_time=checkpoint_every is None)
                if self._ends_early:
                    break
        finally:
            self._is_in_step = False
            self.stop.defer(until_asked=False)
            for monitoring in self._monitors:
                monitoring.close()
        self._finish()

    # What the run reports

    def log(self, step: int, /, **values: float | Tensor | list[Tensor] | None) -> None:
        """Write values of a step to metrics.csv and show them.

        Args:
            step: number of the step, from 1, not below that of the last call.
            values: numbers or 0-d tensors, which are read from the device here. A row with
                `train_loss` moves the progress bar; other rows are shown with all values. A
                `train_loss` that is NaN or infinite twice in a row ends the run as `nonfinite`. It
                may also be a list of the losses since the last row, as tensors: their mean over
                all processes is written, and the run is lost where none of them is finite.

        Raises:
            InputError: a value is no number, or a name cannot be a column.
        """
        step = _whole(step)
        losses = values.get("train_loss")
        if isinstance(losses, list) and losses:
            values["train_loss"] = self._mean_loss(losses)
        numbers = {name: number_of(name, value) for name, value in values.items()}
        loss = numbers.get("train_loss")
        if loss is not None:
            if not isinstance(losses, list):
                self._lost_rows = 0 if math.isfinite(loss) else self._lost_rows + 1
            self.is_nonfinite |= self._lost_rows >= LOST_ROWS
        self._judge(step, numbers)
        self._logs.add(step, {"seconds": round(self.seconds, 3), **numbers})
        for event in logged(self.label, self.seed, step, numbers, self._score):
            self.listener(event)

    def _mean_loss(self, losses: Sequence[Tensor]) -> float:
        """Return the mean over all processes; take note of whether any loss is finite."""
        found = torch.stack([loss.to(losses[-1].device) for loss in losses])
        total, num_finite = summed([float(found.mean()), float(found.isfinite().sum())])
        self._lost_rows = 0 if num_finite else LOST_ROWS
        return total / num_processes()

    def _judge(self, step: int, numbers: Mapping[str, float | None]) -> None:
        """Give a trial up where its best value so far is behind."""
        if self.trial is None:
            return
        metric = self.trial.goal["metric"]
        value = numbers.get("valid_score" if metric == f"valid_{self._score}" else metric)
        if value is None or not math.isfinite(value):
            return
        self._best_of_trial = self.trial.better(self._best_of_trial, value)
        if step != self.num_steps:
            self.is_pruned |= self.trial.is_behind(self._norm, step, self._best_of_trial)

    def count(self, tokens: int, rows: int = 0) -> None:
        """Count what the step at hand trains on, for the speed of the training.

        The clock runs while batches are made and trained on, from the sixth step on; evaluations,
        diagnoses and checkpoints do not count.

        Args:
            tokens: positions that are no padding, of this process.
            rows: examples, where their speed is worth telling.
        """
        self._throughput.count(tokens, rows)

    def monitor(self, every: int | str = 50, *, scaler: Any = None, scale: float = 1.0) -> None:
        """Watch the norms that were built: a row a layer in norms.csv after every so many steps.

        Call it after `swap` and before `torch.compile`; it needs `steps`.

        Args:
            every: steps, or `log`; see `powernorm.diagnosis.NormMonitor`.
            scaler: GradScaler by which the loss is multiplied before the backward.
            scale: another factor of the loss, such as the number of processes whose gradients are
                averaged, where each has its share of the loss.

        Raises:
            InputError: nothing was built, or a model is compiled already.
        """
        if not self._built:
            raise InputError(
                "run.monitor was called before run.swap or run.build_norm: build the model first"
            )
        alone = len(self._built) == 1 and not isinstance(self._built[0], Norm)
        model = self._built[0] if alone else nn.ModuleList(self._built)
        device = self.device
        self._monitors.append(
            Monitoring(
                NormMonitor(model, every),
                lambda: loss_scale(scaler, device) * scale,
                self._logs.add_norm,
            )
        )

    def evaluate_every(self, steps: int, evaluate: Evaluation) -> None:
        """Evaluate after every so many steps and after the last, inside of `steps`.

        Tracked modules are in evaluation mode meanwhile, without gradients, and no random number
        is drawn from the training's. What `evaluate` returns goes to metrics.csv.

        Args:
            steps: number of steps between two evaluations.
            evaluate: function that returns values by name, such as `{"valid_loss": 1.2}`, or None.

        Raises:
            InputError: steps is below 1.
        """
        if steps < 1:
            raise InputError(f"run.evaluate_every got {steps} steps, expected at least 1")
        self._evaluations.append((steps, evaluate))

    def is_last_evaluation(self, **values: float | None) -> bool:
        """Return whether the run ends with the evaluation at hand, should it bring these values."""
        ends = self._best is not None and self._best.ends_with(values)
        return self.step == self.num_steps or self._ends_early or ends

    def keep_best(
        self, metric: str, direction: Direction = "min", *, patience: int | None = None
    ) -> None:
        """Keep the checkpoint of the best evaluation as checkpoints/best.ckpt.

        Args:
            metric: among the values of `evaluate_every`; evaluations without it do not count.
            direction: which way it is better.
            patience: evaluations without a better value after which the run ends; None never.

        Raises:
            InputError: patience is below 1.
        """
        if patience is not None and patience < 1:
            raise InputError(f"run.keep_best got patience={patience}, expected at least 1")
        self._best = Best(metric, direction, patience)

    def keep_last(self, number: int) -> None:
        """Keep the weights of the tracked modules after the last evaluations, for an average.

        Args:
            number: of evaluations.

        Raises:
            InputError: number is below 1.
        """
        if number < 1:
            raise InputError(f"run.keep_last got {number}, expected at least 1")
        self._snapshots = Snapshots(self.folder / CHECKPOINTS_FOLDER, number)

    def load(self, which: Literal["best", "last", "average"], **modules: nn.Module) -> None:
        """Put weights that were kept into the tracked modules; after `steps`.

        Args:
            which: `best`, of the best evaluation (see `keep_best`); `last`; or `average`, the mean
                of what `keep_last` kept. Running statistics are averaged like the weights;
                `powernorm.calibrate` measures them anew.
            modules: others to put them into, by the names under which modules are tracked.

        Raises:
            InputError: they were not kept, or a file is damaged.
        """
        folder = self.folder / CHECKPOINTS_FOLDER
        if which == "average":
            if self._snapshots is None:
                raise InputError("run.load('average') has nothing: call run.keep_last before")
            weights = on_main(self._snapshots.average)
            number = len(on_main(self._snapshots.paths))
            scored = f"{AVERAGE_SCORED} {number} checkpoints"
        else:
            path = folder / (BEST if which == "best" else LAST)
            if not on_main(path.exists):
                raise InputError(
                    f"{path} does not exist: call run.keep_best and run.track before run.steps, or "
                    f"{FIX}"
                )
            names = list(modules or self._tracked.modules())
            weights = on_main(lambda: weights_in(path, names))
            scored = self._best_scored() if which == "best" else LAST_SCORED
        try:
            self._tracked.load_weights(weights, modules)
        except RuntimeError as error:
            where = folder if which == "average" else path
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"{where} holds the weights of another model ({reason}): {FIX}"
            ) from error
        # Others than the tracked ones are not in the last checkpoint.
        self._keeps_end &= not modules
        self.record(scored=scored)

    def _best_scored(self) -> str:
        """Return what the best checkpoint is called: by what it was chosen, where not by loss."""
        metric = "valid_loss" if self._best is None else self._best.metric
        if metric == "valid_score" and self._score is not None:
            metric = f"valid_{self._score}"
        return BEST_SCORED if metric == "valid_loss" else f"{BEST_SCORED} by {metric}"

    def diagnose_every(
        self,
        every: int | Literal["epoch"],
        model: nn.Module,
        batches: Sequence[Any],
        forward: Forward | None = None,
        *,
        epochs: Epochs | None = None,
    ) -> None:
        """Diagnose the norms before the first step, after every so many and after `num_steps`.

        A run that ends early is not diagnosed at its end.

        A row each goes to diagnoses.jsonl; nothing changes in the training.

        Args:
            every: steps, or `epoch`.
            model: that trains, on its device.
            batches: on the same device, the same in every process.
            forward: runs the model on a batch; None calls it.
            epochs: returns how many epochs so many steps are; needed for `epoch`.

        Raises:
            InputError: every is below 1, or `epoch` without `epochs`.
        """
        if every == EPOCH and epochs is None:
            raise InputError("run.diagnose_every('epoch') needs epochs: how many some steps are")
        if every != EPOCH and every < 1:
            raise InputError(f"run.diagnose_every got {every} steps, expected at least 1")
        name = self.folder.name
        self._diagnosing.append(Diagnosing(name, every, model, batches, forward, epochs))

    def record(
        self,
        *,
        tid: TID | None = None,
        remark: str | None = None,
        scored: str | None = None,
        signatures: Mapping[str, str] | None = None,
        status: Status | None = None,
        message: str | None = None,
    ) -> None:
        """Add to the run's result what is no metric.

        Args:
            tid: `powernorm.training_inference_discrepancy(…).summary()`; left out where a value is
                NaN or infinite.
            remark: what has to stand beside every number of the run, such as `sees the future`.
            scored: which weights the metrics are of, such as `best checkpoint`.
            signatures: how scores were computed, by metric.
            status: what the run came to, where the goal alone does not say it: `finished`,
                `diverged` or `nonfinite`.
            message: why.

        Raises:
            InputError: a value is of another type.
        """
        numbers = [] if tid is None else [one for one in tid.values() if isinstance(one, float)]
        if not all(map(math.isfinite, numbers)):
            tid = None
        given = {
            "tid": tid,
            "remark": remark,
            "scored": scored,
            "signatures": None if signatures is None else dict(signatures),
            "status": status,
            "message": message,
        }
        texts = {**given, **(signatures or {}), "signatures": None, "tid": None}
        wrong = [name for name, text in texts.items() if not isinstance(text, str | None)]
        if wrong:
            raise InputError(f"run.record got {wrong[0]}={texts[wrong[0]]!r:.80}, expected text")
        if status not in (None, *RECORDED):
            raise InputError(
                f"run.record got status={status!r:.80}, expected {', '.join(RECORDED)}"
            )
        self.recorded |= {name: value for name, value in given.items() if value is not None}

    def path(self, name: str) -> Path:
        """Return the path of a file or folder of your own in the run's folder.

        Raises:
            InputError: it lies outside, or is one of the engine's.
        """
        path = (self.folder / name).resolve()
        inside = path.relative_to(self.folder.resolve()) if self._holds(path) else None
        if inside is None or not inside.parts or inside.parts[0] in RESERVED:
            raise InputError(f"run.path({name!r}) is no place of yours: give another name")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    # For the engine

    @property
    def seconds(self) -> float:
        """Seconds that the run took so far, over all its sittings."""
        checkpoint = self._tracked.checkpoint
        with self._tracked.naming():
            before = 0.0 if checkpoint is None else float(checkpoint["seconds"])
        return before + time.perf_counter() - self._started

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters of all that was tracked or built."""
        modules = (*self._tracked.modules().values(), *self._built)
        unique = {id(p): p for module in modules for p in module.parameters()}
        return sum(p.numel() for p in unique.values() if p.requires_grad)

    @property
    def uses_norm(self) -> bool:
        """Whether anything depended on the norm."""
        return bool(self._built) or self._knows_norm

    @property
    def ended(self) -> RunResult | None:
        """The result of a run whose last checkpoint is that of `keep_end`, None of any other."""
        kept = (self._tracked.checkpoint or {}).get("result")
        if kept is None:
            return None
        return record_of(RunResult, kept, str(last_checkpoint(self.folder)), FIX, exact=True)

    def keep_end(self, result: RunResult) -> None:
        """Let the last checkpoint hold what is tracked now: averaged, or the best weights.

        With the result, as a run that went on from here would not come to it again.
        """
        if self._saved_step is not None and self._keeps_end:
            self._end = written(result)
            self.checkpoint()

    def close(self) -> None:
        """Finish the files."""
        self._logs.close()

    def _holds(self, path: Path) -> bool:
        return path.is_relative_to(self.folder.resolve())

    def _start(self, batches: Any) -> None:
        if self._is_started:
            raise InputError(
                "run.steps was called twice: a run has one loop; use run.checkpoint and "
                "run.should_stop in loops of your own"
            )
        if not self.uses_norm:
            raise InputError(
                "the function called neither run.swap nor run.build_norm before run.steps, so that "
                "every norm would train the same model: build the model with one of them"
            )
        if (self._best or self._snapshots) and not self._evaluations:
            raise InputError(
                "run.keep_best and run.keep_last keep weights of evaluations: call "
                "run.evaluate_every before run.steps"
            )
        self._is_started = True
        if self.num_steps is None and hasattr(batches, "__len__"):
            self.num_steps = len(batches)
        if self._tracked.checkpoint is not None:
            with self._tracked.naming():
                self._go_on(self._tracked.checkpoint)
        elif self._snapshots is not None and is_main():
            self._snapshots.forget_after(0)
        self.listener(
            RunStarted(self.label, self.seed, self.index, self.num_runs, self.num_steps, self.step)
        )

    def _go_on(self, checkpoint: Mapping[str, Any]) -> None:
        self._tracked.check_complete()
        self._evaluated_at = checkpoint["evaluated_at"]
        if self._best is not None and checkpoint["best"] is not None:
            self._best.load_state_dict(checkpoint["best"])
        self._throughput.load_state_dict(checkpoint["speed"])
        if self._snapshots is not None and is_main():
            self._snapshots.forget_after(self.step)
        positions = checkpoint["position"]
        if len(positions) == num_processes():
            self._position.load_state_dict(positions[rank()])

    def _batches(self, batches: Batches[_Batch]) -> Iterator[_Batch]:
        """Yield the batches that are still to come."""
        if self._ends_early:
            return
        if callable(batches) and not hasattr(batches, "__iter__"):
            if self.is_resumed:
                self._tracked.set_random_states()
            if self.step != self.num_steps:
                yield from self._until_done(iter(batches(self.step)))
                self._check_done()
            return
        self._position.use(batches, self._tracked.generators())
        if self.is_resumed:
            self._tracked.set_random_states()
            if self._position.has_position and self.step != self.num_steps:
                self._tell_what_workers_forgot(batches)
                yield from self._until_done(self._position.go_on(batches))
                if self.num_steps is None:
                    return
        while self.num_steps is None or self.step < self.num_steps:
            before = self.step
            yield from self._until_done(self._position.begin(batches))
            if self.step == before or self.num_steps is None or self._ends_early:
                break
        self._check_done()

    def _check_done(self) -> None:
        if self.num_steps is not None and self.step < self.num_steps and not self._ends_early:
            raise InputError(
                f"the batches ended after {self.step} of {self.num_steps} steps and cannot be "
                "begun anew: give a DataLoader or a list, or more batches"
            )

    def _tell_what_workers_forgot(self, batches: Iterable[Any]) -> None:
        is_later_pass = self.step > self._position.taken
        if is_later_pass and getattr(batches, "persistent_workers", False):
            self.listener(
                Notice(
                    f"{self.folder.name}: the loader has persistent_workers=True, and what its "
                    "workers had drawn in earlier passes is in no checkpoint: the batches may "
                    "differ from those of a run that was never interrupted"
                )
            )

    def _until_done(self, batches: Iterator[_Batch]) -> Iterator[_Batch]:
        while self.num_steps is None or self.step < self.num_steps:
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch
            if self._ends_early:
                return

    def _after_step(self, every: int, *, by_time: bool) -> None:
        # Again at 2, 4, 8, …: the first steps of a warm-up, or of an accumulation, change nothing.
        if num_processes() > 1 and self.step & (self.step - 1) == 0:
            check_equal_weights((*self._tracked.modules().values(), *self._built))
        for monitoring in self._monitors:
            monitoring.finish(self.step)
        is_last = self.step == self.num_steps
        self._diagnose(is_last=is_last)
        is_best = self._evaluate(is_last=is_last)
        if is_best:
            self._kept_names.append(BEST)
        is_stopping = self._agree()
        is_due = self.step % every == 0 or is_last or self._wants_checkpoint
        is_due |= is_best or self._ends_early
        if by_time and not is_due and num_processes() == 1:
            is_due = time.perf_counter() - self._saved_at > CHECKPOINT_SECONDS
        if (is_due or is_stopping) and self._tracked:
            self._throughput.pause()
            self.checkpoint()
        if is_stopping:
            raise Stopped

    def _diagnose(self, *, is_last: bool) -> None:
        for diagnosing in self._diagnosing:
            if is_last or diagnosing.is_due(self.step):
                self._throughput.pause()
                self._logs.add_diagnosis(diagnosing.diagnose(self.step))

    def _evaluate(self, *, is_last: bool) -> bool:
        """Evaluate where it is due; return whether it is the best evaluation so far."""
        due = [one for every, one in self._evaluations if is_last or self.step % every == 0]
        if not due or self._evaluated_at == self.step:
            return False
        self._throughput.pause()
        self._evaluated_at = self.step
        found: dict[str, float | None] = {}
        states = random_states()
        with torch.no_grad(), evaluating(*self._tracked.modules().values()):
            for evaluate in due:
                values = evaluate()
                if values:
                    numbers = {name: number_of(name, value) for name, value in values.items()}
                    self.log(self.step, **numbers)
                    found |= numbers
        set_random_states(states)
        if self._snapshots is not None:
            weights = self._tracked.weights()  # of all processes, where they divide them
            if is_main():
                with self.writing():
                    self._snapshots.keep(self.step, weights)
        # Each process may have evaluated rows of its own: the first one decides for all.
        return self._best is not None and self._best.sees(gather(found)[0])

    def _finish(self) -> None:
        """Add up the speed; evaluate the last weights where the number of steps was not known."""
        self.recorded |= self._throughput.total()
        if self._ends_early:
            return
        if self._evaluations and self._evaluated_at != self.step:
            if self._evaluate(is_last=True):
                self._kept_names.append(BEST)
            self._saved_step = None
        if self._tracked and self._saved_step != self.step:
            self.checkpoint()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the run's folder while the block puts files into place.

        Raises:
            LeaseLostError: another process trains the run by now.
        """
        if self.lease is None:
            yield
        else:
            with self.lease.writing():
                yield


def _whole(step: Any) -> int:
    try:
        return operator.index(step)
    except TypeError:
        raise InputError(f"run.log got the step {step!r:.80}, expected a whole number") from None
