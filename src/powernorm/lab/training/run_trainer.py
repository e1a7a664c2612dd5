"""One run: a norm and a seed, trained, evaluated and diagnosed in a folder of its own."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from powernorm.diagnosis import training_inference_discrepancy
from powernorm.errors import InputError
from powernorm.inspection.modules import batch_layers
from powernorm.lab.data.batch import Batch
from powernorm.lab.data.corpus import EVALUATED_SPLITS, EvaluatedSplit
from powernorm.lab.engine.averaging import AVERAGE, Snapshots, write_weights
from powernorm.lab.engine.events import RunScored, RunStarted
from powernorm.lab.engine.folders import LAST, write_json, write_rows
from powernorm.lab.engine.outcomes import behind
from powernorm.lab.engine.processes import is_main, num_processes, on_main, rank
from powernorm.lab.engine.run import Run
from powernorm.lab.settings.comparison import ComparisonSettings
from powernorm.lab.training.batches import own_evaluation
from powernorm.lab.training.checkpoints import (
    BEST,
    Checkpoints,
    check_weights,
    read_checkpoint,
)
from powernorm.lab.training.evaluation import evaluate, finite_or_none
from powernorm.lab.training.loop import TrainingLoop
from powernorm.lab.training.recording import Recorder
from powernorm.lab.training.scales import norm_scales
from powernorm.lab.training.task import Scores, Task, TaskModel
from powernorm.runs import (
    BEST_SCORED,
    CHECKPOINTS_FOLDER,
    SCALES_FILE,
    TID,
    TRANSLATIONS_COLUMNS,
    TRANSLATIONS_FILE,
    RunResult,
    ScalesRecord,
    Status,
)
from powernorm.surgery import calibrate

METRICS = ("valid_perplexity", "test_perplexity", "valid_loss", "test_loss")
SEED_STRIDE = 7919
"""Between the seeds of processes, so that they drop other features."""


class RunTrainer:
    """Trains, evaluates and diagnoses one run.

    Args:
        run: of the engine, with a `ComparisonSettings` as its settings and the task's text as data.
        task: what is trained.

    Raises:
        InputError: the norm's options do not fit, or the train split is shorter than a batch.
    """

    def __init__(self, run: Run, task: Task[Any, Any]) -> None:
        self.run = run
        config: ComparisonSettings = run.settings
        self.config = config
        self._listener = run.listener
        self.device = run.device
        self._task = task
        self.data = self._task.data(run.data, config, run.seed)
        self._sizes = self._task.sizes(run.data)
        self._unigram = run.baselines[0]["metrics"]
        loss = self._unigram["valid_loss"]
        self._unigram_loss = math.inf if loss is None else loss
        self.model = self._build()
        self.recorder = Recorder(run.folder, config, run.label, run.seed, self.data, run.listener)
        folder = run.folder / CHECKPOINTS_FOLDER
        self._num_parameters = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self._snapshots = Snapshots(folder, config.training.average_checkpoints)
        self.num_steps = 0

    def result(self) -> RunResult:
        """Train to the end, from the last checkpoint if there is one, and return the result.

        Raises:
            InputError: the checkpoint is damaged.
            KeyboardInterrupt: the user stopped the run; its last checkpoint is there.
        """
        loop = self._train()
        if loop.is_pruned:
            return {**self.partial_result("pruned"), "message": behind(loop.step)}
        status = self._status()
        result = self.partial_result(status)
        if status != "nonfinite":
            result["scored"] = self._load_scored(status)
            self.model.to(self.device)
            scores = self._scores(status)
            result["metrics"] |= {**self._metrics(), **scores.metrics}
            result["tid"] = None if self.run.is_trial else self._tid()
            if scores.signatures:
                result["signatures"] = scores.signatures
            self._write_files(scores)
        if status != "finished":
            result["message"] = _explain(status, self.num_steps)
        elif self.num_steps < self.config.training.max_steps:
            result["message"] = f"stopped early after step {self.num_steps}"
        return result

    def partial_result(self, status: Status) -> RunResult:
        """Return a result without measurements, for a run that did not get to them."""
        run = self.run
        result = RunResult(
            norm=run.norm,
            seed=run.seed,
            placement=self.config.placement,
            status=status,
            metrics=dict.fromkeys((*METRICS, *self._task.metrics)),
            tid=None,
            seconds=round(self.recorder.seconds, 3),
            tokens_per_second=self.recorder.tokens_per_second,
            parameters=self._num_parameters,
            folder=run.folder.name,
        )
        if self._task.examples is not None:
            result["examples_per_second"] = self.recorder.examples_per_second
        remark = self._task.remark(self.config)
        if remark:
            result["remark"] = remark
        return result

    @property
    def _splits(self) -> tuple[EvaluatedSplit, ...]:
        """Return what the result is measured on: of a trial the valid split alone."""
        return ("valid",) if self.run.is_trial else EVALUATED_SPLITS

    def _train(self) -> TrainingLoop:
        run = self.run
        folder = run.folder / CHECKPOINTS_FOLDER
        last = folder / LAST
        first_step = on_main(lambda: self._step_of(last)) if last.exists() else 0
        max_steps = self.config.training.max_steps
        self._listener(
            RunStarted(run.label, run.seed, run.index, run.num_runs, max_steps, first_step)
        )
        torch.manual_seed(run.seed + SEED_STRIDE * rank())
        checkpoints = Checkpoints(folder, self._snapshots, run.lease)
        loop = TrainingLoop(run, self.model, self.data, self.recorder, checkpoints)
        if first_step:
            loop.load_state(read_checkpoint(last))
        loop.train()
        self.num_steps = loop.step
        return loop

    def _step_of(self, checkpoint: Path) -> int:
        """Return the updates of a checkpoint of this model."""
        content = read_checkpoint(checkpoint)
        check_weights(checkpoint, content["weights"], self.model)
        return int(content["step"])

    def _build(self) -> TaskModel:
        run = self.run
        with torch.random.fork_rng(devices=[]):
            # Our models draw by generators of their own; a user's norm may draw by torch's.
            torch.default_generator.manual_seed(run.seed)
            model = self._task.build(self.config, run.norm, self._sizes, run.seed)
        self._task.fill(model, run.data)
        return model

    def _status(self) -> Status:
        losses = self.recorder.valid_losses
        if self.recorder.is_nonfinite or not losses or not math.isfinite(losses[-1]):
            return "nonfinite"
        floor = self._unigram.get(f"valid_{self.config.score_name}")
        scores = self.recorder.valid_scores if self.config.selects_by_score else []
        if scores and floor is not None and scores[-1] > floor:
            # An overconfident classifier is right more often than it is likely.
            return "finished"
        has_learned = min(losses) < self._unigram_loss
        is_worse_than_uniform = losses[-1] > math.log(self._sizes[-1])
        # A short run may end above the unigram without ever having come down to it.
        if losses[-1] > self._unigram_loss and (has_learned or is_worse_than_uniform):
            return "diverged"
        return "finished"

    def _load_scored(self, status: Status) -> str:
        """Put the weights that are scored into the model, whole, and return which they are."""
        training = self.config.training
        if training.strategy == "fsdp2" and num_processes() > 1:
            # The trained one is divided among the processes.
            self.model = self._build()
        if status == "finished" and training.average_checkpoints:
            return self._load_average()
        name = BEST if status == "finished" else LAST
        path = self.run.folder / CHECKPOINTS_FOLDER / name
        self._load(path, on_main(lambda: read_checkpoint(path)["weights"]))
        if name == LAST:
            return "last checkpoint"
        chooser = self.config.score if self.config.selects_by_score else None
        return BEST_SCORED if chooser is None else f"{BEST_SCORED} by {chooser['metric']}"

    def _load_average(self) -> str:
        training = self.config.training
        folder = self.run.folder / CHECKPOINTS_FOLDER
        self._load(folder, on_main(self._snapshots.average))
        name = f"average of the last {len(self._snapshots.paths())} checkpoints"
        if batch_layers(self.model):
            how = training.average_statistics
            if how == "recalibrate":
                self.model.to(self.device)
                batches = self._first_batches(training.recalibration_batches)
                # Whole ones in every process, each in one: their sums are put together.
                own = batches[rank() :: num_processes()]
                report = calibrate(self.model, own, forward_features, way="one_pass")
                if all(row.action == "keep" for row in report.rows):
                    # Those of norms that train by them, such as PowerNorm.
                    how = "average"
            name += f", running statistics {how}d"
        if is_main():
            write_weights(folder / AVERAGE, self.model.state_dict())
        return name

    def _load(self, path: Path, weights: dict[str, Tensor]) -> None:
        check_weights(path, weights, self.model)
        self.model.load_state_dict(weights)

    def _metrics(self) -> dict[str, float | None]:
        metrics: dict[str, float | None] = {}
        for split in self._splits:
            likelihood = evaluate(
                self.model,
                own_evaluation(self.data.evaluation(split)),
                words_per_token=self.data.words_per_token(split),
                device=self.device,
            )
            metrics[f"{split}_perplexity"] = finite_or_none(likelihood.perplexity)
            metrics[f"{split}_loss"] = finite_or_none(likelihood.loss)
            for name, value in self.data.from_loss(likelihood.loss).items():
                metrics[f"{split}_{name}"] = finite_or_none(value)
        known = [name for name in METRICS if name in metrics]
        return {name: metrics[name] for name in dict.fromkeys([*known, *metrics])}

    def _scores(self, status: Status) -> Scores:
        if status != "finished":
            return Scores()
        run = self.run
        self.model.eval()
        self._listener(RunScored(run.label, run.seed))
        scores = (
            Scores()
            if run.is_trial
            else self._task.score(self.model, run.data, self.config, self.device)
        )
        wanted = [name for name in self._task.metrics if name not in scores.metrics]
        own: dict[str, float | None] = {}
        with torch.no_grad():
            for split in self._splits:
                if any(name.startswith(split) for name in wanted):
                    found = self.data.scores(split, self.model, self.device)
                    own |= {f"{split}_{name}": finite_or_none(found[name]) for name in found}
        own = {name: value for name, value in own.items() if name in wanted}
        return replace(scores, metrics={**own, **scores.metrics})

    def _write_files(self, scores: Scores) -> None:
        if scores.translations and is_main():
            write_rows(
                self.run.folder / TRANSLATIONS_FILE, [TRANSLATIONS_COLUMNS, *scores.translations]
            )
        if self.config.training.record_scales and not self.run.is_trial:
            self._write_scales()

    def _tid(self) -> TID | None:
        batches = self._first_batches(self.config.training.tid_batches)
        if not batches:
            return None
        tid = training_inference_discrepancy(self.model, batches, forward_features).summary()
        return tid if tid is not None and _is_finite(tid) else None

    def _first_batches(self, num_batches: int) -> list[Batch]:
        """Return training batches, in every process those of all."""
        return [self.data.batches.batch(i).to(self.device) for i in range(num_batches)]

    def _write_scales(self) -> None:
        """γ may be NaN in a run that diverged; such a layer's record is left out."""
        records = norm_scales(
            self.model,
            self._first_batches(self.config.training.tid_batches),
            forward_features,
        )
        sound = [r for r in records if all(map(math.isfinite, [*r["weight"], *r["deviation"]]))]
        if is_main():
            write_json(self.run.folder / SCALES_FILE, ScalesRecord(format=1, layers=sound))


def choose_device(config: ComparisonSettings) -> torch.device:
    """Return the device that the configuration asks for.

    Raises:
        InputError: a GPU is asked for and there is none.
    """
    wanted = config.training.accelerator
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError(
            "training.accelerator=gpu, but torch finds no CUDA device: use auto or cpu"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _is_finite(tid: TID) -> bool:
    values = (tid["mean_last"], tid["var_last"], tid["mean_avg"], tid["var_avg"])
    return all(math.isfinite(value) for value in values if value is not None)


def forward_features(model: Any, batch: Any) -> object:
    """Run the layers only: the logits are no part of any norm."""
    return model.features(**batch.inputs())


def _explain(status: Status, step: int) -> str:
    if status == "diverged":
        return "the valid loss ended above that of the unigram baseline"
    return f"the loss was NaN or infinite; stopped at step {step}"
