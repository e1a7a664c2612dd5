"""Training, evaluation and diagnosis of one run of a built-in task."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from powernorm.diagnosis import training_inference_discrepancy
from powernorm.errors import InputError
from powernorm.inspection.modules import batch_layers
from powernorm.records import TID
from powernorm.surgery import calibrate
from powernorm_lab.data.batch import Batch
from powernorm_lab.data.corpus import EVALUATED_SPLITS, EvaluatedSplit
from powernorm_lab.engine.averaging import AVERAGE, write_weights
from powernorm_lab.engine.events import RunScored
from powernorm_lab.engine.folders import write_json, write_rows
from powernorm_lab.engine.processes import gather, is_main, num_processes, rank
from powernorm_lab.engine.run import Run
from powernorm_lab.models.stream_memory import merged_states, own_state
from powernorm_lab.runs import (
    CHECKPOINTS_FOLDER,
    SCALES_FILE,
    TRANSLATIONS_COLUMNS,
    TRANSLATIONS_FILE,
    ScalesRecord,
    Status,
)
from powernorm_lab.settings.comparison import ComparisonSettings, early_step
from powernorm_lab.training.batches import RunData, own_evaluation
from powernorm_lab.training.evaluation import Scores, evaluate, finite_or_none
from powernorm_lab.training.fitting import Validations, fit, norm_scales
from powernorm_lab.training.losses import TaskModel, TrainingLoss, batch_penalty
from powernorm_lab.training.optimization import build_optimizer, learning_rate

if TYPE_CHECKING:
    from powernorm_lab.training.task import BuiltinTask

METRICS: Final = ("valid_perplexity", "test_perplexity", "valid_loss", "test_loss")
SEED_STRIDE: Final = 7919
"""Distance of the seeds of processes, so that their dropout masks differ."""
DIAGNOSED_BATCHES: Final = 20
"""Number of training batches in each of a diagnosis's two passes; `powernorm diagnose` uses 50."""


def train(run: Run, task: "BuiltinTask[Any, Any]") -> Mapping[str, float | None]:
    """Train a run to its end, from its last checkpoint if there is one; return its metrics.

    Args:
        run: run of the engine, with `ComparisonSettings` as its settings and encoded data.
        task: task of the run.

    Raises:
        InputError: the norm's options do not fit, the train split is shorter than a batch, or the
            checkpoint is damaged.
        KeyboardInterrupt: the user stopped the run; the run can be resumed.
    """
    config: ComparisonSettings = run.settings
    remark = task.remark(config)
    if remark:
        run.record(remark=remark)
    data = task.data(run.data, config, run.seed)
    sizes = task.sizes(run.data)
    model = run.build(partial(task.build, config, run.norm, sizes, run.seed))
    task.fill(model, run.data)
    model.to(run.device)
    torch.manual_seed(run.seed + SEED_STRIDE * rank())
    validations = Validations(run, model, data)
    _fit(run, task, model, data, validations)
    none = dict.fromkeys((*METRICS, *task.metrics))
    if run.is_pruned:
        return none
    status = "nonfinite" if run.is_nonfinite else _status(run, validations, sizes)
    if status == "nonfinite":
        run.record(status=status)
        return none
    return none | _Measuring(run, task, model, data, status).metrics()


def _fit(
    run: Run,
    task: "BuiltinTask[Any, Any]",
    model: TaskModel,
    data: RunData[Any],
    validations: Validations,
) -> None:
    config: ComparisonSettings = run.settings
    training, accumulation = config.training, config.optimizer.accumulation
    batches = data.batches

    def epochs(step: int) -> float:
        return step * accumulation / batches.batches_per_epoch

    def cells(step: int) -> dict[str, float]:
        last_batch = step * accumulation - 1
        return {"epoch": last_batch // batches.batches_per_epoch, **validations.tokens(step)}

    if training.diagnose_every:
        # Built once, because an order caches only the epochs around its latest batch.
        chosen = [batches.batch(at).to(run.device) for at in range(DIAGNOSED_BATCHES)]
        run.diagnose_every(training.diagnose_every, model, chosen, forward_features, epochs=epochs)
    if training.strategy == "fsdp2":
        run.wrap(model, "fsdp2")
    # A fused optimizer unscales gradients itself, so that they could not be clipped before.
    fused = training.precision == "float32" and num_processes() == 1
    score = config.score
    if config.selects_by_score and score is not None:
        run.keep_best("valid_score", score["direction"], patience=training.patience)
    else:
        run.keep_best("valid_loss", patience=training.patience)
    if training.average_checkpoints:
        run.keep_last(training.average_checkpoints)
    run.track(validations=validations)
    if hasattr(model, "memory_state"):
        run.track(memory=_BatchMemory(model))
    fit(
        run,
        model,
        partial(data.updates, run.device),
        TrainingLoss(model, config.label_smoothing, compile=training.compile),
        validations.validate,
        optimizer=build_optimizer(model, config.optimizer, fused=fused),
        learning_rate=partial(learning_rate, config),
        penalty=partial(batch_penalty, model),
        cells=cells,
        precision=training.precision,
        clip_norm=config.optimizer.clip_norm,
        log_every=training.log_every,
        evaluate_every=training.validate_every,
        monitor_every=training.monitor_every,
        count_rows=task.examples is not None,
        early_step=early_step(config),
    )


class _BatchMemory:
    """A model's memory of earlier batches over all processes, as a tracked object."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        return {"lanes": merged_states(gather(self._model.memory_state()))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._model.load_memory_state(own_state(state["lanes"], rank(), num_processes()))


def _status(run: Run, validations: Validations, sizes: tuple[int, ...]) -> Status:
    """Return the status of a trained run from its validations."""
    config: ComparisonSettings = run.settings
    losses, scores = validations.losses, validations.scores
    if not losses or not math.isfinite(losses[-1]):
        return "nonfinite"
    unigram = run.baselines[0]["metrics"]
    floor = unigram.get(f"valid_{config.score_name}")
    sign = -1 if config.score is not None and config.score["direction"] == "min" else 1
    if config.selects_by_score and scores and floor is not None and sign * (scores[-1] - floor) > 0:
        # An overconfident classifier may have a good score and a bad likelihood.
        return "finished"
    unigram_loss = unigram["valid_loss"]
    limit = math.inf if unigram_loss is None else unigram_loss
    has_learned = min(losses) < limit
    is_worse_than_uniform = losses[-1] > math.log(sizes[-1])
    # A short run may end above the unigram loss only because it never reached it.
    if losses[-1] > limit and (has_learned or is_worse_than_uniform):
        return "diverged"
    return "finished"


class _Measuring:
    """Measures the metrics of a trained run.

    Args:
        run: the run.
        task: task of the run.
        model: model with the last weights.
        data: batches of the run.
        status: `finished` or `diverged`.
    """

    def __init__(
        self,
        run: Run,
        task: "BuiltinTask[Any, Any]",
        model: TaskModel,
        data: RunData[Any],
        status: Status,
    ) -> None:
        self._run = run
        self._task = task
        self._config: ComparisonSettings = run.settings
        self._data = data
        self._status = status
        training = self._config.training
        if training.strategy == "fsdp2" and num_processes() > 1:
            # The trained model is sharded among the processes.
            sizes = task.sizes(run.data)
            with torch.random.fork_rng(devices=[]):
                self._model = task.build(self._config, run.norm, sizes, run.seed).to(run.device)
        else:
            self._model = model

    def metrics(self) -> dict[str, float | None]:
        """Load the weights to score, record metadata, and return the metrics."""
        run = self._run
        self._load_scored()
        scores = self._scores()
        metrics = {**self._likelihoods(), **scores.metrics}
        lost = "the valid loss ended above that of the unigram baseline"
        run.record(
            tid=None if run.is_trial else self._tid(),
            signatures=scores.signatures or None,
            status=self._status,
            message=lost if self._status == "diverged" else None,
        )
        self._write_files(scores)
        return metrics

    @property
    def _splits(self) -> tuple[EvaluatedSplit, ...]:
        """Return the splits to evaluate; for a trial only the valid split."""
        return ("valid",) if self._run.is_trial else EVALUATED_SPLITS

    def _load_scored(self) -> None:
        """Load the weights to score into the unsharded model."""
        if self._status != "finished":
            self._run.load("last", model=self._model)
        elif self._config.training.average_checkpoints:
            self._load_average()
        else:
            self._run.load("best", model=self._model)

    def _load_average(self) -> None:
        training, run, model = self._config.training, self._run, self._model
        run.load("average", model=model)
        if batch_layers(model):
            how = training.average_statistics
            if how == "recalibrate":
                batches = self._first_batches(training.recalibration_batches)
                # Each process takes different whole batches; their sums are combined.
                own = batches[rank() :: num_processes()]
                report = calibrate(model, own, forward_features, way="one_pass")
                if all(row.action == "keep" for row in report.rows):
                    # All are running statistics that training itself uses, such as PowerNorm's.
                    how = "average"
            run.record(scored=f"{run.recorded['scored']}, running statistics {how}d")
        if is_main():
            whole = {f"model.{key}": value for key, value in model.state_dict().items()}
            with run.writing():
                write_weights(run.folder / CHECKPOINTS_FOLDER / AVERAGE, whole)

    def _likelihoods(self) -> dict[str, float | None]:
        metrics: dict[str, float | None] = {}
        for split in self._splits:
            likelihood = evaluate(
                self._model,
                own_evaluation(self._data.evaluation(split)),
                words_per_token=self._data.words_per_token(split),
                device=self._run.device,
            )
            metrics[f"{split}_perplexity"] = finite_or_none(likelihood.perplexity)
            metrics[f"{split}_loss"] = finite_or_none(likelihood.loss)
            for name, value in self._data.from_loss(likelihood.loss).items():
                metrics[f"{split}_{name}"] = finite_or_none(value)
        return metrics

    def _scores(self) -> Scores:
        if self._status != "finished":
            return Scores()
        run, task = self._run, self._task
        self._model.eval()
        run.listener(RunScored(run.label, run.seed))
        scores = (
            Scores()
            if run.is_trial
            else task.score(self._model, run.data, self._config, run.device)
        )
        wanted = [name for name in task.metrics if name not in scores.metrics]
        own: dict[str, float | None] = {}
        with torch.no_grad():
            for split in self._splits:
                if any(name.startswith(split) for name in wanted):
                    found = self._data.scores(split, self._model, run.device)
                    own |= {f"{split}_{name}": finite_or_none(found[name]) for name in found}
        own = {name: value for name, value in own.items() if name in wanted}
        return replace(scores, metrics={**own, **scores.metrics})

    def _write_files(self, scores: Scores) -> None:
        if scores.translations and is_main():
            rows = [TRANSLATIONS_COLUMNS, *scores.translations]
            with self._run.writing():
                write_rows(self._run.folder / TRANSLATIONS_FILE, rows)
        if self._config.training.record_scales and not self._run.is_trial:
            self._write_scales()

    def _tid(self) -> TID | None:
        batches = self._first_batches(self._config.training.tid_batches)
        if not batches:
            return None
        return training_inference_discrepancy(self._model, batches, forward_features).summary()

    def _first_batches(self, num_batches: int) -> list[Batch]:
        """Return the first training batches, unsharded, the same in every process."""
        return [self._data.batches.batch(i).to(self._run.device) for i in range(num_batches)]

    def _write_scales(self) -> None:
        """Write scales.json without layers with NaN, which a diverged run may have."""
        records = norm_scales(
            self._model,
            self._first_batches(self._config.training.tid_batches),
            forward_features,
        )
        sound = [r for r in records if all(map(math.isfinite, [*r["weight"], *r["deviation"]]))]
        if is_main():
            with self._run.writing():
                write_json(self._run.folder / SCALES_FILE, ScalesRecord(format=1, layers=sound))


def choose_device(config: ComparisonSettings) -> torch.device:
    """Return the device of a configuration.

    Raises:
        InputError: the configuration requires a GPU, and there is none.
    """
    wanted = config.training.accelerator
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError(
            "training.accelerator=gpu, but torch finds no CUDA device: use auto or cpu"
        )
    return torch.device("cuda", torch.cuda.current_device())


def forward_features(model: Any, batch: Any) -> object:
    """Run the layers without the output, which has no norms."""
    return model.features(**batch.inputs())
