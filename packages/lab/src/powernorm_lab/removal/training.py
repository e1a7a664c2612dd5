"""Training of a removal: loop, losses and validations."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.inspection.observer import NormCall, observe
from powernorm.integrations.stock_models import check_fits_stock
from powernorm.norms import Norm
from powernorm.surgery.folding.api import plan_fold
from powernorm.surgery.removal import (
    Removal,
    build_removal,
    call_order,
    deviation_anchor,
    hidden_state_error,
    logit_divergence,
)
from powernorm_lab.engine.between_steps import evaluating
from powernorm_lab.engine.events import Notice
from powernorm_lab.engine.run import Run
from powernorm_lab.removal.originals import Original
from powernorm_lab.removal.settings import (
    LONG_DISTILLATION,
    LONG_SHARE,
    DistillationSettings,
    RemovalSettings,
)
from powernorm_lab.training.optimization import build_optimizer, rate_factor
from powernorm_lab.training.precision import autocast

NOTICE_SECONDS: Final = 20.0
"""Seconds between progress messages of the fit."""

Values = dict[str, float | None]


@dataclass
class Seen:
    """Observed tensors of a forward pass.

    Attributes:
        outputs: outputs of the model.
        states: output of each norm, by the norm's name.
        last_input: input of the final norm, if requested.
    """

    outputs: Any = None
    states: dict[str, Tensor] = field(default_factory=dict)
    last_input: Tensor | None = None


class RemovalTraining:
    """Training of a copy of the original while its norms are removed.

    Args:
        run: run of the engine, with `RemovalSettings`.
        original: the model and its batches.
        stock: whether the class of transformers has to support the result, which then need not
            fold.

    Raises:
        InputError: the method does not fit the model.
    """

    def __init__(self, run: Run, original: Original, *, stock: bool = False) -> None:
        self._run = run
        self._stock = stock
        self._settings: RemovalSettings = run.settings
        self._original = original
        assert run.num_steps is not None
        self._num_steps = run.num_steps
        self._optimizer = self._settings.optimizer.resolved(original.learning_rate)
        # The original is not trained, so that its parameters need no gradients.
        self._teacher = copy.deepcopy(original.model).requires_grad_(False).to(run.device)
        student = copy.deepcopy(original.model).to(run.device)
        student.requires_grad_(True)
        method = self._settings.method
        self.removal: Removal = build_removal(
            method.name,
            student,
            self._num_steps,
            momentum=method.momentum,
            accumulation=self._optimizer.accumulation,
        )
        first = self._batch(0)
        order = call_order(student, self.removal.sites, first, original.run)
        self._final = order[-1]
        self._final_centers = self.removal.sites[self._final].norm.kind != "rms"
        self._order = order
        self._distillation, self._share = _chosen_distillation(
            self._settings.distillation,
            original,
            self._num_steps * self._optimizer.accumulation,
        )
        self.model = student

    def train(self) -> None:
        """Train to the end.

        Raises:
            InputError: the norms cannot all be folded, or a checkpoint cannot be written.
            Stopped: after a scheduler's signal, with the state saved.
        """
        run, settings = self._run, self._settings
        _ = run.norm  # the engine requires that a run reads it
        self.removal.install()
        if not run.is_resumed:
            self._fit()
        optimizer = build_optimizer(self.model, self._optimizer)
        losses = _Losses()
        run.track(model=self.model, optimizer=optimizer, removal=self.removal, losses=losses)
        if not run.is_resumed:
            self._begin()
        every = max(1, round(self._num_steps / settings.training.validations))
        run.evaluate_every(every, self._validate)
        self._set_training_mode()
        for step, position in run.steps(
            range(self._num_steps), checkpoint_every=every, shard=False
        ):
            gone = self.removal.step(step - 1)
            if gone and step > 1:
                run.listener(Notice(f"{', '.join(gone)}: constant from step {step}"))
            rate = self._update(optimizer, step - 1, position, losses)
            if step % settings.training.log_every == 0 or step == self._num_steps:
                run.log(step, train_loss=losses.mean(), learning_rate=rate)
        self.removal.step(self._num_steps)
        self.model.eval()
        self.removal.finish(self._first_batches(), self._original.run)

    @torch.no_grad()
    def measure(
        self, model: nn.Module, batches: Iterable[Any], *, with_original: bool = True
    ) -> Values:
        """Measure the loss of a model and the distance of its outputs from the original's.

        Args:
            model: model in evaluation mode, on the run's device.
            batches: batches of the original.
            with_original: whether to measure the original's loss, too.

        Returns:
            `loss` and `original_loss`, nats per target, if the task's loss is known; with logits
            `divergence`, KL(original ‖ model) in nats per position; otherwise `error`, the squared
            error of the outputs relative to their variance, and for a text encoder `cosine` and
            `lowest_cosine`, mean and minimum over rows of the cosine between the embeddings of both
            models. Empty without batches.
        """
        original, sums, lowest = self._original, _Sums(), list[float]()
        for batch in batches:
            moved = original.to(batch, self._run.device)
            outputs = original.run(model, moved)
            expected = original.run(self._teacher, moved)
            if original.has_loss:
                sums.add("loss", *original.nll(model, outputs, moved))
                if with_original:
                    sums.add("original_loss", *original.nll(self._teacher, expected, moved))
            sums.add(*self._distance(outputs, expected, original.valid(moved)))
            vectors = [original.embeddings(one, moved) for one in (outputs, expected)]
            if vectors[0] is not None and vectors[1] is not None:
                cosines = F.cosine_similarity(vectors[0], vectors[1], dim=-1)
                sums.add("cosine", cosines.sum(), float(len(cosines)))
                lowest.append(float(cosines.min()))
        return sums.means() | ({"lowest_cosine": min(lowest)} if lowest else {})

    def check_result(self) -> None:
        """Raise an InputError unless all layers fold when they are static.

        With `stock`, raise one unless the class of transformers supports them.
        """
        probe = copy.deepcopy(self.removal)
        probe.settle()
        model = probe.model.eval().cpu()
        if self._stock:
            check_fits_stock(model)
            return
        plan = plan_fold(model, self._original.example_inputs())
        kept = [row for row in plan.rows if row.action == "keep"]
        if kept:
            raise InputError(
                f"method.name={self.removal.name} does not fit {self._original.name}: "
                f"{kept[0].name} could not be folded afterwards ({kept[0].reason}); "
                "method.name=match works for every norm"
            )

    def _set_training_mode(self) -> None:
        """Set the model to training mode; without dropout, only its norms."""
        self.model.train()
        if self._settings.training.dropout:
            return
        for part in self.model.modules():
            # cuDNN computes gradients of recurrent layers in training mode only.
            if not isinstance(part, Norm | nn.RNNBase):
                part.training = False

    # One update

    def _update(
        self,
        optimizer: torch.optim.Optimizer,
        done: int,
        position: int,
        losses: _Losses,
    ) -> float:
        config = self._optimizer
        optimizer.zero_grad()
        for part in range(config.accumulation):
            batch = self._batch(position * config.accumulation + part)
            with autocast(self._run.device, self._settings.training.precision):
                loss = self._loss(batch)
            (loss / config.accumulation).backward()
            losses.add(loss.detach())
        factor = rate_factor(self._settings.schedule, done, self._num_steps)
        rate: float = config.learning_rate * factor
        for group in optimizer.param_groups:
            group["lr"] = rate
        if config.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm)
        optimizer.step()
        return rate

    def _loss(self, batch: Any) -> Tensor:
        original, settings = self._original, self._settings
        name = self._distillation
        share = self._share
        seen = self._forward(self.model, batch, states=name == "hidden", last=True)
        valid = original.valid(batch)
        loss = torch.zeros((), device=self._run.device)
        if share < 1:
            nll, num_targets = original.nll(self.model, seen.outputs, batch)
            loss = loss + (1 - share) * nll / max(num_targets, 1)
        if share:
            with torch.no_grad():
                taught = self._forward(self._teacher, batch, states=name == "hidden")
            loss = loss + share * self._distilled(seen, taught, valid)
        if settings.anchor.weight and seen.last_input is not None:
            x = seen.last_input
            penalty, _ = deviation_anchor(x, center=self._final_centers, valid=_fitting(valid, x))
            loss = loss + settings.anchor.weight * penalty
        return loss

    def _distilled(self, seen: Seen, taught: Seen, valid: Tensor | None) -> Tensor:
        ours, theirs = (self._original.logits(one.outputs) for one in (seen, taught))
        if self._distillation == "logits":
            return logit_divergence(ours, theirs, _fitting(valid, ours))
        names = [name for name in self._order if name in seen.states and name in taught.states]
        return hidden_state_error(
            [*(seen.states[name] for name in names), ours],
            [*(taught.states[name] for name in names), theirs],
            valid,
        )

    def _forward(
        self, model: nn.Module, batch: Any, *, states: bool = False, last: bool = False
    ) -> Seen:
        """Run a model and return its outputs with the requested tensors."""
        seen = Seen()
        watched = {name: model.get_submodule(name) for name in self._order} if states else {}
        wants_last = last and self._settings.anchor.weight > 0
        final = {self._final: model.get_submodule(self._final)} if wants_last else {}

        def keep_state(name: str, output: Any) -> None:
            seen.states[name] = output[0] if isinstance(output, tuple) else output

        def keep_input(call: NormCall) -> None:
            seen.last_input = call.x

        with (
            _without_fast_path(active=bool(watched)),
            observe(watched, on_output=keep_state),
            observe(final, on_input=keep_input),
        ):
            seen.outputs = self._original.run(model, batch)
        return seen

    # Before and between

    def _fit(self) -> None:
        original, batches = self._original, self._first_batches()
        self._run.listener(
            Notice(
                f"fitting {len(self._order)} norms of {original.name} on {len(batches)} batches; "
                f"then training with {self._goal}"
            )
        )
        last_notice = time.monotonic()

        def notify(done: int, passes: int) -> None:
            nonlocal last_notice
            if done < passes and time.monotonic() - last_notice > NOTICE_SECONDS:
                last_notice = time.monotonic()
                self._run.listener(Notice(f"fitted {done} of {passes} norms"))

        self.removal.fit(self._teacher, batches, original.run, notify)
        self.check_result()

    @property
    def _goal(self) -> str:
        taught = {"logits": "the original's logits", "hidden": "the original's hidden states"}
        parts = {taught.get(self._distillation): self._share, "the task's loss": 1 - self._share}
        return " and ".join(f"{what} ({weight:g})" for what, weight in parts.items() if weight)

    def _begin(self) -> None:
        """Measure and save the fitted model before any training."""
        self.removal.step(0)
        with evaluating(self.model):
            # The original's loss, too, which is the reference line of the curve.
            self._run.log(0, **self._validate(with_original=True))
        self._run.checkpoint(0)

    def _validate(self, *, with_original: bool = False) -> Values:
        tokens = self._settings.training.validation_tokens
        batches = self._original.evaluation("valid", tokens)
        return on_split(self.measure(self.model, batches, with_original=with_original), "valid")

    def _first_batches(self) -> list[Any]:
        return [self._batch(index) for index in range(self._settings.method.batches)]

    def _batch(self, position: int) -> Any:
        return self._original.to(self._original.batch(position), self._run.device)

    def _distance(
        self, outputs: Any, expected: Any, valid: Tensor | None
    ) -> tuple[str, Tensor, float]:
        """Return the name of a distance, its sum over positions, and their number."""
        ours, theirs = self._original.logits(outputs), self._original.logits(expected)
        valid = _fitting(valid, ours)
        number = ours[..., 0].numel() if valid is None else int(valid.sum())
        if self._original.has_logits:
            return "divergence", number * logit_divergence(ours, theirs, valid), number
        return "error", number * hidden_state_error([ours], [theirs], valid), number


def _fitting(valid: Tensor | None, x: Tensor) -> Tensor | None:
    """Return the mask if it fits the positions of (…, C), else None."""
    return valid if valid is not None and valid.shape == x.shape[:-1] else None


def on_split(values: Values, split: str) -> Values:
    """Prefix names with a split, as in `valid_loss` and `original_valid_loss`."""
    named = {f"{split}_{name}": value for name, value in values.items()}
    if "original_loss" in values:
        named[f"original_{split}_loss"] = named.pop(f"{split}_original_loss")
    return named


def _chosen_distillation(
    settings: DistillationSettings, original: Original, num_batches: int
) -> tuple[str, float]:
    """Return the kind of distillation that fits a model, and its weight in the loss.

    Args:
        settings: requested distillation.
        original: the model.
        num_batches: number of batches of the removal.

    Raises:
        InputError: the requested kind does not fit the model, or there would be no loss.
    """
    name, share = settings.name, settings.share
    if name == "auto":
        # Logits of a few classes carry little information about the hidden states.
        name = "logits" if original.has_logits and original.has_loss else "hidden"
    if name == "logits" and not original.has_logits:
        raise InputError(
            f"distillation.name=logits does not fit {original.name}, whose outputs are not logits: "
            "set distillation.name=hidden"
        )
    if not original.has_loss and (name == "none" or (share is not None and share < 1)):
        key = "name=none" if name == "none" else f"share={share}"
        raise InputError(
            f"distillation.{key}: the loss of {original.name} is not known, so that it can only "
            "learn from the original: leave out distillation.share and distillation.name"
        )
    if name == "none":
        return name, 0.0
    if share is None:
        known = original.num_steps if original.has_loss else None
        is_long = known is not None and num_batches >= round(LONG_SHARE * known)
        share = LONG_DISTILLATION if is_long else 1.0
    return name, share


class _Losses:
    """Losses since the last row of the log; part of the checkpoints."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []

    def add(self, value: Tensor) -> None:
        self._values.append(value)

    def mean(self) -> Tensor:
        """Return the mean and reset."""
        values, self._values = self._values, []
        return torch.stack(values).mean()

    def state_dict(self) -> dict[str, list[Tensor]]:
        return {"values": list(self._values)}

    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        self._values = list(state["values"])


class _Sums:
    """Sums of values and weights by name."""

    def __init__(self) -> None:
        self._totals: dict[str, tuple[float, float]] = {}

    def add(self, name: str, value: Tensor, weight: float) -> None:
        total, number = self._totals.get(name, (0.0, 0.0))
        self._totals[name] = total + float(value), number + weight

    def means(self) -> Values:
        return {name: total / max(n, 1) for name, (total, n) in self._totals.items()}


@contextmanager
def _without_fast_path(*, active: bool) -> Iterator[None]:
    """Disable torch's fused Transformer layers, which do not call their norms, in the block."""
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        if active:
            torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
