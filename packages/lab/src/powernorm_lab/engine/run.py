"""The `Run` that a training function receives: one norm and one seed of a comparison."""

import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args

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
from powernorm_lab.engine.between_steps import (
    EPOCH,
    Best,
    Diagnosing,
    Direction,
    Epochs,
    Monitoring,
    Throughput,
    evaluating,
)
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
from powernorm_lab.engine.state import FIX, Tracked, random_states, set_random_states, weights_in
from powernorm_lab.engine.stopping import Stop, Stopped
from powernorm_lab.engine.trials import TrialRules
from powernorm_lab.engine.warmup import warmup_options
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
"""Maximal seconds between two checkpoints, unless the steps between them are given."""
LOST_ROWS: Final = 2
"""Consecutive rows of the log without a finite training loss after which a run is lost."""
RESERVED: Final = frozenset(
    {
        *(CONFIG_FILE, RESULT_FILE, METRICS_FILE, NORMS_FILE, SCALES_FILE, CHECKPOINTS_FOLDER),
        *(DIAGNOSES_FILE, DIAGNOSIS_FILE, DIAGNOSIS_PAGE, LEASE_FILE, LOCK_FILE),
    }
)
"""Names in a run's folder that belong to the engine."""

RECORDED: Final = ("finished", "diverged", "nonfinite")
"""Statuses that a function may record."""

_Model = TypeVar("_Model", bound=nn.Module)
_Batch = TypeVar("_Batch")
Evaluation = Callable[[], Mapping[str, float | Tensor | None] | None]
Batches = Iterable[_Batch] | Callable[[int], Iterable[_Batch]]


class Run:
    """One norm and one seed of a comparison; a training function builds and reports with it.

    The engine seeds Python's, NumPy's and torch's generators by `seed` before it calls the
    function, so that all norms of a seed start with the same weights and see the same batches.

    Attributes:
        seed: seed of this run.
        folder: folder of this run.
        device: device to train on; a GPU if there is one, unless the comparison names another.
        settings: keyword arguments of the function by name, or the settings of the task.
        data: return value of the task's `prepare`; None for a plain function.
        baselines: return value of the task's `baselines`; empty for a plain function.
        num_steps: number of steps, from the setting `steps` or the task. If it is None, the method
            `steps` sets it to the number of batches, if that is known.
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
        """Values that were passed to `record`."""
        self.step = 0
        """Number of steps done, including steps before a resume."""
        self.is_nonfinite = False
        """Whether the training loss became NaN or infinite."""
        self.is_pruned = False
        """Whether the run is a trial that fell behind the earlier ones."""
        self._best_of_trial: float | None = None
        """Best value so far of the metric by which trials are pruned."""
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

    # The norm

    @property
    def norm(self) -> str:
        """Short name of the norm, or `module:Class`, for functions that build the norm themselves.

        Reading it counts as using the norm.
        """
        self._knows_norm = True
        return self._norm

    @property
    def is_trial(self) -> bool:
        """Whether this is a trial of a tuning, of which only the valid score is used.

        A function may then skip the test data and return no test metric.
        """
        return self.trial is not None

    def swap(self, model: _Model, where: str | Where | Any = None) -> _Model:
        """Replace the norms of a model by the run's norm in place, and return the model.

        Call it before the optimizer is built, and before `torch.compile` or a wrapper for several
        processes.

        Args:
            model: any module; see `powernorm.swap`.
            where: selects the norms to replace; see `powernorm.plan_swap`.

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
            fixed: options that the model's architecture fixes, such as `feature_dim=1`; they
                override those of the comparison.

        Raises:
            InputError: as `powernorm.build_norm`.
        """
        with self._own_random_numbers():
            norm = powernorm.build_norm(self._norm, num_features, **{**self._options(), **fixed})
        self._built.append(norm)
        return norm

    def build(self, make: Callable[[], _Model]) -> _Model:
        """Return the model that a function builds with the run's norm.

        The initial weights are drawn from the seed, and the generators are restored afterwards, so
        that all norms of a seed start with the same weights. Monitors, penalties and the number of
        parameters refer to the whole model.

        Args:
            make: calls `build_norm` or `swap`, or reads `norm`, and returns the model.

        Raises:
            InputError: the function did not use the norm, or returned no module.

        >>> model = run.build(lambda: Encoder(norm=run.build_norm))  # doctest: +SKIP
        """
        before = len(self._built)
        with self._own_random_numbers():
            torch.default_generator.manual_seed(self.seed)
            model = make()
        if not isinstance(model, nn.Module):
            raise InputError(
                f"run.build got a {type(model).__name__}, expected a module: return the model"
            )
        if not self.uses_norm:
            raise InputError(
                "run.build got a model without the run's norm, so every norm would train the same "
                "model: build its norms with run.build_norm"
            )
        self._built[before:] = [model]
        return model

    def wrap(self, model: _Model, strategy: Literal["ddp", "fsdp2"] = "ddp") -> nn.Module:
        """Return the module to call in training in place of the model.

        In several processes (`--devices`, `torchrun`) it is torch's DistributedDataParallel, which
        averages the gradients over the processes; in a single process it is the model itself. Pass
        the unwrapped model to the optimizer, `track` and evaluations.

        Args:
            model: the model on its device, after `swap`; also a module around a model whose weights
                are sharded already.
            strategy: `fsdp2` shards the weights of each layer of a `nn.ModuleList`, then the rest,
                in place: call it before the optimizer is built. Checkpoints hold whole weights.
        """
        if strategy == "fsdp2" and num_processes() > 1:
            divide_weights(model, self.device)
        return synchronized(model)

    def penalty(
        self, num_tokens: int | Tensor | None = None, reduction: Reduction = "mean"
    ) -> Tensor:
        """Return the penalty of Regularized BatchNorm to add to the loss; 0 for other norms.

        Args:
            num_tokens: number of tokens over which the loss is averaged, in several processes those
                of this one; needed for `mean`.
            reduction: how the loss is reduced: `mean` over tokens, or `token_sum`.

        Raises:
            InputError: as `powernorm.penalty`, or this run has built no norm.
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
        """Isolate a norm's random initialization, so that it does not shift the RNG afterwards."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            yield

    def _options(self) -> dict[str, Any]:
        """Return the norm's options: those of the comparison, and warm-ups scaled to the run.

        Warm-ups count forwards in training, assuming one for each step.
        """
        if self.num_steps is None:
            return self.norm_options
        derived = warmup_options(self._norm, self.num_steps)
        return derived | self.norm_options

    # State that survives an interruption

    def track(self, **things: Any) -> None:
        """Keep the state of objects in the checkpoints, and restore it at once when resuming.

        Args:
            things: `torch.Generator`s, and objects with `state_dict` and `load_state_dict` such as
                modules, optimizers, schedules and scalers, by names of your choice.

        Raises:
            InputError: an object has no state, a name is taken, or the checkpoint does not fit.
        """
        # Modules before optimizers, whose state depends on how the weights are sharded.
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
            # For custom loops; `steps` does it again, just before the first batch.
            self._tracked.set_random_states()

    def checkpoint(self, step: int | None = None, *, keep: str | None = None) -> None:
        """Write a checkpoint: tracked objects, random generators, step and position in the data.

        `steps` calls it by itself; a custom loop calls it after a step. Inside of a step of `steps`
        it is deferred to the end of the step.

        Args:
            step: number of steps done, for loops other than `steps`.
            keep: name of an additional copy: `early` makes checkpoints/early.ckpt.

        Raises:
            InputError: nothing is tracked, or the file cannot be written.
        """
        if not self._tracked:
            raise InputError(
                "run.checkpoint has nothing to save: call run.track(model=…, optimizer=…) first"
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
        """Whether a custom loop must end: a scheduler requested it, or the run has ended early.

        A run ends early if its loss is not finite, if its patience is exhausted, or if it is a
        trial that fell behind. When this is True, call `checkpoint` and return. Every process must
        read it equally often.
        """
        self.stop.defer(until_asked=True)
        self._stop_was_seen |= self._agree()
        return self._stop_was_seen or self._ends_early

    def _agree(self) -> bool:
        """Return whether any process was asked to stop, and synchronize the early-end flags.

        Processes may log different losses, but an early end in one process ends the run in all.
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
        """Whether the patience of `keep_best` is exhausted."""
        return self._best is not None and self._best.is_out_of_patience

    @property
    def was_interrupted(self) -> bool:
        """Whether the function has seen a scheduler's request to stop."""
        return self._stop_was_seen

    @property
    def is_resumed(self) -> bool:
        """Whether the run resumes from a checkpoint."""
        return self._tracked.checkpoint is not None

    def steps(
        self,
        batches: Batches[_Batch],
        *,
        checkpoint_every: int | None = None,
        shard: bool = True,
    ) -> Iterator[tuple[int, _Batch]]:
        """Yield (step, batch), the step from 1, until the run has done `num_steps` steps.

        Without the setting `steps` it makes one pass over the batches; with it, as many as needed.
        Between two steps it evaluates, diagnoses and saves, and when a scheduler sends SIGTERM or
        SIGUSR1, it ends the run as `interrupted`. A resumed run continues with the next batch: by
        the `state_dict` of the batches if they have one (torchdata's StatefulDataLoader), else by
        skipping the batches already seen. Batches draw random numbers from their own stream,
        independent of the training's.

        In several processes each one gets a part of the rows of every batch, unless the loader has
        a DistributedSampler. With `wrap` they train as a single process would if all parts have
        equal size. The run fails if the weights of the processes differ after a step.

        Args:
            batches: a DataLoader or another iterable; or a function of the number of steps done
                that returns the following batches, so that a resumed run need not skip any.
            checkpoint_every: steps between two checkpoints; None is a tenth of the run, or five
                minutes, whichever comes first.
            shard: whether to divide batches among the processes; False if each process has its own
                batches, or if the loop makes them.

        Raises:
            InputError: `steps` is called twice, without a model, or with `keep_best` or `keep_last`
                but no evaluation; `batches` cannot be iterated, or not again after its end; a batch
                cannot be divided; or the weights of the processes differ.
        """
        is_iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
        if not is_iterable and (not callable(batches) or isinstance(batches, nn.Module)):
            raise InputError(
                f"run.steps got {batches!r:.80}, expected batches: give a DataLoader or a list, or "
                "range(100) if the loop makes its own batches; the setting steps is the number of "
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

    # Reports

    def log(self, step: int, /, **values: float | Tensor | list[Tensor] | None) -> None:
        """Write values of a step to metrics.csv and show them.

        Args:
            step: number of the step, from 1, not below that of the last call.
            values: numbers or 0-d tensors, which are synchronized here. A row with `train_loss`
                moves the progress bar; other rows are shown with all values. A `train_loss` that is
                NaN or infinite twice in a row ends the run as `nonfinite`. `train_loss` may also be
                a list of the losses since the last row, as tensors: their mean over all processes
                is written, and the run ends as `nonfinite` if none of them is finite.

        Raises:
            InputError: a value is not a number, or a name cannot be a column.
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
        """Return the mean over all processes; record whether any loss is finite."""
        found = torch.stack([loss.to(losses[-1].device) for loss in losses])
        total, num_finite = summed([float(found.mean()), float(found.isfinite().sum())])
        self._lost_rows = 0 if num_finite else LOST_ROWS
        return total / num_processes()

    def _judge(self, step: int, numbers: Mapping[str, float | None]) -> None:
        """Prune a trial whose best value so far is behind."""
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
        """Count the tokens of the current step, for the training's throughput.

        The measured time includes making the batches and training on them, from the sixth step on,
        without evaluations, diagnoses and checkpoints.

        Args:
            tokens: number of positions without padding in this process.
            rows: number of examples; 0 leaves their throughput out.
        """
        self._throughput.count(tokens, rows)

    def monitor(self, every: int | str = 50, *, scaler: Any = None, scale: float = 1.0) -> None:
        """Monitor the norms of the run: write one row for each layer to norms.csv at regular steps.

        Call it after `swap` and before `torch.compile`. The training must use `steps`.

        Args:
            every: steps between two rows, or `log`; see `powernorm.diagnosis.NormMonitor`.
            scaler: GradScaler that scales the loss before the backward.
            scale: another factor of the loss, such as the number of processes if each averages its
                gradients and has its share of the loss.

        Raises:
            InputError: the run has built no norm, or a model is compiled already.
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
        """Evaluate at regular steps and after the last step, inside of `steps`.

        Tracked modules are in evaluation mode, without gradients, and the random states of the
        training are restored afterwards. The values are written to metrics.csv.

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
        """Return whether the current evaluation is the run's last one if it has these values."""
        ends = self._best is not None and self._best.ends_with(values)
        return self.step == self.num_steps or self._ends_early or ends

    def keep_best(
        self, metric: str, direction: Direction = "min", *, patience: int | None = None
    ) -> None:
        """Keep the checkpoint of the best evaluation as checkpoints/best.ckpt.

        Args:
            metric: name among the values of `evaluate_every`; evaluations without it do not count.
            direction: whether lower or higher values are better.
            patience: evaluations without a better value after which the run ends; None never.

        Raises:
            InputError: the direction is unknown, or patience is below 1; at the end of `steps`, no
                evaluation had the metric.
        """
        if direction not in get_args(Direction):
            raise InputError(f"run.keep_best got {direction!r}, expected min or max")
        if patience is not None and patience < 1:
            raise InputError(f"run.keep_best got patience={patience}, expected at least 1")
        self._best = Best(metric, direction, patience)

    def keep_last(self, number: int) -> None:
        """Keep the weights of the tracked modules after the last evaluations, for an average.

        Args:
            number: number of evaluations.

        Raises:
            InputError: number is below 1.
        """
        if number < 1:
            raise InputError(f"run.keep_last got {number}, expected at least 1")
        self._snapshots = Snapshots(self.folder / CHECKPOINTS_FOLDER, number)

    def load(self, which: Literal["best", "last", "average"], **modules: nn.Module) -> None:
        """Load kept weights into the tracked modules, after `steps`.

        Args:
            which: `best`, the weights of the best evaluation (see `keep_best`); `last`; or
                `average`, the mean of the weights that `keep_last` kept. Running statistics are
                averaged like the weights; `powernorm.calibrate` measures them again.
            modules: other modules to load them into, by the names of tracked modules.

        Raises:
            InputError: the weights were not kept, or a file is damaged.
        """
        if which not in ("best", "last", "average"):
            raise InputError(f"run.load got {which!r}, expected best, last or average")
        folder = self.folder / CHECKPOINTS_FOLDER
        if which == "average":
            if self._snapshots is None:
                raise InputError("run.load('average') has no weights: call run.keep_last first")
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
        # The last checkpoint holds only tracked modules.
        self._keeps_end &= not modules
        self.record(scored=scored)

    def _best_scored(self) -> str:
        """Return the name of the best checkpoint, with its metric unless that is the loss."""
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
        """Diagnose the norms before the first step, at regular steps and after `num_steps`.

        Each diagnosis is a row of diagnoses.jsonl, and does not affect the training. A run that
        ends early is not diagnosed at its end.

        Args:
            every: steps between two diagnoses, or `epoch`.
            model: the model in training, on its device.
            batches: batches on the same device, the same in every process.
            forward: runs the model on a batch; None calls it.
            epochs: converts a number of steps to epochs; needed for `epoch`.

        Raises:
            InputError: every is below 1, or `epoch` without `epochs`.
        """
        if every == EPOCH and epochs is None:
            raise InputError("run.diagnose_every('epoch') needs epochs, which converts steps")
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
        """Add metadata that are not metrics to the run's result.

        Args:
            tid: `powernorm.training_inference_discrepancy(…).summary()`; ignored if a value is NaN
                or infinite.
            remark: caveat displayed next to the run's metrics, such as `sees the future`.
            scored: name of the weights that the metrics belong to, such as `best checkpoint`.
            signatures: how scores were computed, by metric.
            status: `finished`, `diverged` or `nonfinite`; overrides the status that follows from
                the goal.
            message: reason for the status.

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
        """Return a path for your own file or folder in the run's folder.

        Raises:
            InputError: the path is outside the run's folder, or belongs to the engine.
        """
        path = (self.folder / name).resolve()
        inside = path.relative_to(self.folder.resolve()) if self._holds(path) else None
        if inside is None or not inside.parts or inside.parts[0] in RESERVED:
            where = "is outside the run's folder or reserved: give another name"
            raise InputError(f"run.path({name!r}) {where}")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    # For the engine

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken so far, including the time before a resume."""
        checkpoint = self._tracked.checkpoint
        with self._tracked.naming():
            before = 0.0 if checkpoint is None else float(checkpoint["seconds"])
        return before + time.perf_counter() - self._started

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters of all tracked modules and built norms or models."""
        modules = (*self._tracked.modules().values(), *self._built)
        unique = {id(p): p for module in modules for p in module.parameters()}
        return sum(p.numel() for p in unique.values() if p.requires_grad)

    @property
    def uses_norm(self) -> bool:
        """Whether the function has built or read the norm."""
        return bool(self._built) or self._knows_norm

    @property
    def ended(self) -> RunResult | None:
        """The result in the last checkpoint if `keep_end` wrote it, else None."""
        kept = (self._tracked.checkpoint or {}).get("result")
        if kept is None:
            return None
        return record_of(RunResult, kept, str(last_checkpoint(self.folder)), FIX, exact=True)

    def keep_end(self, result: RunResult) -> None:
        """Write the loaded weights (average or best) and the result into the last checkpoint.

        The result is stored because a run that resumes from these weights could not reproduce it.
        """
        if self._saved_step is not None and self._keeps_end:
            self._end = written(result)
            self.checkpoint()

    def close(self) -> None:
        """Close the log files."""
        self._logs.close()

    def _holds(self, path: Path) -> bool:
        return path.is_relative_to(self.folder.resolve())

    def _start(self, batches: Any) -> None:
        if self._is_started:
            raise InputError(
                "run.steps was called twice: a run has one loop; use run.checkpoint and "
                "run.should_stop in custom loops"
            )
        if not self.uses_norm:
            raise InputError(
                "the function called neither run.swap nor run.build_norm before run.steps, so "
                "every norm would train the same model: build the model with one of them"
            )
        if (self._best or self._snapshots) and not (self._tracked and self._evaluations):
            raise InputError(
                "run.keep_best and run.keep_last keep tracked weights of evaluations: call "
                "run.track and run.evaluate_every before run.steps"
            )
        self._is_started = True
        if self.num_steps is None and hasattr(batches, "__len__"):
            self.num_steps = len(batches)
        if self._tracked.checkpoint is not None:
            with self._tracked.naming():
                self._resume(self._tracked.checkpoint)
        elif self._snapshots is not None and is_main():
            self._snapshots.forget_after(0)
        self.listener(
            RunStarted(self.label, self.seed, self.index, self.num_runs, self.num_steps, self.step)
        )

    def _resume(self, checkpoint: Mapping[str, Any]) -> None:
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
        """Yield the remaining batches of the run."""
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
                self._warn_of_persistent_workers(batches)
                yield from self._until_done(self._position.resume(batches))
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
                "iterated again: give a DataLoader or a list, or more batches"
            )

    def _warn_of_persistent_workers(self, batches: Iterable[Any]) -> None:
        is_later_pass = self.step > self._position.taken
        if is_later_pass and getattr(batches, "persistent_workers", False):
            self.listener(
                Notice(
                    f"{self.folder.name}: the loader has persistent_workers=True, and the random "
                    "states of its workers are not in the checkpoint: the batches may differ from "
                    "those of an uninterrupted run"
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
        # At steps 1, 2, 4, 8, …: the first steps of a warm-up or accumulation change no weights.
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
        """Evaluate if it is due, and return whether the evaluation is the best so far."""
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
            weights = self._tracked.weights()  # a collective operation if they are sharded
            if is_main():
                with self.writing():
                    self._snapshots.keep(self.step, weights)
        # Processes may have evaluated different rows: the first one decides for all.
        return self._best is not None and self._best.sees(gather(found)[0])

    def _finish(self) -> None:
        """Record the throughput; evaluate the last weights if the number of steps was unknown."""
        self.recorded |= self._throughput.total()
        if self._ends_early:
            return
        if self._evaluations and self._evaluated_at != self.step:
            if self._evaluate(is_last=True):
                self._kept_names.append(BEST)
            self._saved_step = None
        if self._best is not None and self._best.is_unseen:
            raise InputError(
                f"run.keep_best({self._best.metric!r}) found no such value in any evaluation: "
                "return it in the function of run.evaluate_every"
            )
        if self._tracked and self._saved_step != self.step:
            self.checkpoint()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock of the run's lease while the block writes files.

        Raises:
            LeaseLostError: another process has taken over the run.
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
