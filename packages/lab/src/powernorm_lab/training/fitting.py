"""The training loop of the built-in tasks, on a `Run`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from powernorm.inspection.batches import Forward
from powernorm.inspection.modules import batch_layers
from powernorm.inspection.observer import NormCall, observe
from powernorm.norms import set_loss_scale
from powernorm.norms.models import forget_penalties
from powernorm.norms.preserved_state import preserved_state
from powernorm.records import ScaleRecord
from powernorm_lab.engine.distribution import accumulating, optimized, whole
from powernorm_lab.engine.folders import EARLY
from powernorm_lab.engine.processes import gather, num_processes, rank
from powernorm_lab.engine.run import Evaluation, Run
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.settings.training import Precision
from powernorm_lab.training.batches import RunData, own_evaluation
from powernorm_lab.training.evaluation import gap_cells, summed_nll, word_perplexity
from powernorm_lab.training.losses import TaskModel
from powernorm_lab.training.precision import autocast

# γ of every norm layer and the standard deviation of its batches (Shen et al. 2020, App. B.1).


def norm_scales(model: nn.Module, batches: Iterable[Any], forward: Forward) -> list[ScaleRecord]:
    """Return γ and the mean standard deviation of the batches for each feature.

    By Lemma 2 of Shen et al. the loss is smoother where |γ| ≤ ψ_B. The norm layers normalize as in
    training, all other modules as in evaluation; the model's state is restored afterwards.

    Args:
        model: the model; layers with batch statistics and a weight get a record, in call order.
        batches: batches on the model's device.
        forward: runs the model on a batch.
    """
    layers = batch_layers(model)
    deviations: dict[str, list[Tensor]] = {}

    def keep(call: NormCall) -> None:
        layer = layers[call.name]
        if layer.training:
            moments = call.moments()
            square = moments.var if layer.centered else moments.second_moment
            deviations.setdefault(call.name, []).append(square.sqrt())

    with observe(layers, on_input=keep), preserved_state(model, layers.values()):
        for batch in batches:
            forward(model, batch)
    return [
        ScaleRecord(
            layer=name,
            weight=weight.detach().float().cpu().tolist(),
            deviation=torch.stack(values).mean(0).float().cpu().tolist(),
        )
        for name, values in deviations.items()
        if (weight := layers[name].weight) is not None
    ]


# Validations of a built-in task's run.


class Validations:
    """Measures the valid split during the training; its results are part of the checkpoint.

    Args:
        run: run of the engine, with `ComparisonSettings` as its settings.
        model: model in training.
        data: batches of the run.

    Attributes:
        losses: losses of all validations so far, nats per token.
        scores: the task's scores of those validations that computed them.
    """

    def __init__(self, run: Run, model: TaskModel, data: RunData[Any]) -> None:
        self._run = run
        self._config: ComparisonSettings = run.settings
        self._model = model
        self._data = data
        self.losses: list[float] = []
        self.scores: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the checkpoint."""
        return {"losses": list(self.losses), "scores": list(self.scores)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.losses, self.scores = list(state["losses"]), list(state["scores"])

    def tokens(self, step: int) -> dict[str, float]:
        """Return the cell with the number of tokens of `step` updates."""
        per_update = self._data.batches.tokens_per_batch * self._config.optimizer.accumulation
        return {"tokens": round(step * per_update)}

    def validate(self) -> dict[str, float]:
        """Return the cells of metrics.csv of a validation, for a model in evaluation mode."""
        data, model, device = self._data, self._model, self._run.device
        batches = data.validation()
        with autocast(device, self._config.training.precision):
            own = own_evaluation(batches)
            nll, num_targets = summed_nll(model, own, device, torch.float32)
        loss = nll / num_targets
        cells = self.tokens(self._run.step) | {
            "valid_loss": loss,
            "valid_perplexity": word_perplexity(loss, data.words_per_token("valid")),
        }
        score = self._score(loss)
        self.losses.append(loss)
        if score is not None:
            self.scores.append(score)
            cells["valid_score"] = score
        # All processes use the same batches; the parts of some processes may be smaller.
        return cells | gap_cells(model, batches, device)

    def _score(self, loss: float) -> float | None:
        """Return the task's score; None if it is not due."""
        data, name, every = self._data, self._config.score_name, self._config.score_every
        if name is None or name in (derived := data.from_loss(loss)):
            return None if name is None else derived[name]
        is_last = self._run.is_last_evaluation(valid_loss=loss)
        if not every or not (is_last or (len(self.losses) + 1) % every == 0):
            return None
        with whole(self._model):
            score = data.scores("valid", self._model, self._run.device, brief=True)[name]
        # The score of the first process, since running statistics may differ between processes.
        return gather(score)[0]


def fit(
    run: Run,
    model: nn.Module,
    batches: Callable[[int], Iterable[Sequence[Any]]],
    loss: nn.Module,
    evaluate: Evaluation,
    *,
    optimizer: torch.optim.Optimizer,
    learning_rate: Callable[[int], float],
    penalty: Callable[[Any], Tensor | None],
    cells: Callable[[int], Mapping[str, float]],
    precision: Precision,
    clip_norm: float | None,
    log_every: int,
    evaluate_every: int,
    monitor_every: int,
    count_rows: bool,
    early_step: int | None,
) -> None:
    """Train a model to the end of the run, from the last checkpoint if there is one.

    Every process calls it. A checkpoint is written after every evaluation.

    Args:
        run: run of the engine.
        model: model on the run's device; trained in place.
        batches: returns, for a number of updates done, the micro-batches of each further update; a
            micro-batch has `num_tokens`, `targets` and `to(device)`.
        loss: module around the model that returns the minimized loss of a micro-batch (in one of
            several processes its share) and the logged loss, both 0-d.
        evaluate: returns values by name.
        optimizer: optimizer of the model's parameters.
        learning_rate: returns the learning rate for a number of updates done.
        penalty: returns the penalty of a micro-batch after its forward, or None.
        cells: returns further cells of metrics.csv for a number of updates done.
        precision: precision in which the layers compute.
        clip_norm: largest norm of the gradient; None does not clip.
        log_every: updates between two rows of metrics.csv.
        evaluate_every: updates between two evaluations.
        monitor_every: updates between two rows of a layer in norms.csv; 0 for none.
        count_rows: whether to measure the throughput in rows, too.
        early_step: update after which checkpoints/early.ckpt is written; None writes none.
    """
    device = run.device
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "float16")
    wrapped = run.wrap(loss)
    # Gradients are averaged over processes: each multiplies its share of the loss by their number.
    set_loss_scale(model, num_processes(), scaler=scaler if scaler.is_enabled() else None)
    losses = _RecentLosses()
    run.track(model=model, optimizer=optimizer, losses=losses)
    if scaler.is_enabled():
        run.track(scaler=scaler)
    if monitor_every:
        run.monitor(monitor_every, scaler=scaler, scale=num_processes())
    run.evaluate_every(evaluate_every, evaluate)
    model.train()
    for step, parts in run.steps(batches, checkpoint_every=evaluate_every, shard=False):
        for part, batch in enumerate(parts):
            moved = batch.to(device)
            forget_penalties(model)
            # Processes average their gradients once, at the last micro-batch.
            with nullcontext() if part == len(parts) - 1 else accumulating(wrapped):
                with autocast(device, precision):
                    minimized, logged = wrapped(moved)
                added = penalty(moved)
                whole = minimized if added is None else minimized + added.to(minimized)
                scaler.scale(whole / len(parts)).backward()
            losses.values.append(logged)
            run.count(batch.num_tokens, len(batch.targets) if count_rows else 0)
        rate = learning_rate(step - 1)
        _optimizer_step(optimizer, scaler, rate, clip_norm)
        if step % log_every == 0 or step == run.num_steps:
            run.log(step, **cells(step), learning_rate=rate, train_loss=losses.values)
            losses.values.clear()
        if step == early_step:
            run.checkpoint(keep=Path(EARLY).stem)


def _optimizer_step(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    rate: float,
    clip_norm: float | None,
) -> None:
    """Update the weights, and reset the gradients."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    scaler.unscale_(optimizer)
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(optimized(optimizer), clip_norm)
    # In float16 the scaler skips steps with overflowing gradients.
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


class _RecentLosses:
    """This process's losses of the micro-batches since the last row of the log."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        return {"by_process": gather([float(loss) for loss in self.values])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        by_process: list[list[float]] = state["by_process"]
        if len(by_process) == num_processes():
            own = by_process[rank()]
        else:
            own = [sum(values) / len(values) for values in zip(*by_process, strict=True)]
        self.values = [torch.tensor(loss) for loss in own]
