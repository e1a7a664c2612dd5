"""Two passes over the data: pooled statistics of the norms' inputs, then the batches' distances."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isnan
from typing import Any, Final

import torch
from torch import Tensor, nn

from powernorm.diagnosis.distances import (
    NUM_SUMS,
    RAW_SQUARES,
    SQUARES,
    TIDS,
    TOTAL,
    Statistics,
    batch_discrepancies,
    statistics_of,
    sums_per_token,
)
from powernorm.diagnosis.measures import (
    CovarianceSums,
    PositionEnergy,
    TokenShares,
    loud_features,
)
from powernorm.diagnosis.regrouping import Regrouping
from powernorm.diagnosis.targets import Target, observing
from powernorm.errors import InputError
from powernorm.inspection.batches import Forward, Progress, numbered, repeated_random_numbers
from powernorm.inspection.devices import has_float64
from powernorm.inspection.observer import NormCall
from powernorm.integrations.library_masks import takes_length_first, turns_round

_FEWEST: Final = 2
"""Fewest batches of a size for which an expectation is reported."""

_LEAST: Final = 0.25
"""Share of the average tokens below which a batch, such as the last of a loader, is left out of the
expectation: its own deviation, perhaps 0, is in the denominator and would dominate the mean."""

_ROUNDING: Final = 1e-9
"""Largest discrepancy of identical batches, whose sums are in float64."""

_CHUNK: Final = 1 << 20
"""Number of values of an input that are processed at a time, which limits memory."""


@dataclass(eq=False)
class Expectation:
    """Mean over batches of their discrepancies."""

    total: Tensor
    count: int = 0

    @classmethod
    def empty(cls) -> Expectation:
        """Return the expectation of no batch."""
        return cls(torch.zeros(len(TIDS), dtype=torch.float64, device="cpu"))

    def add(self, values: Tensor) -> None:
        """Add the discrepancies of a batch."""
        self.total += values.cpu()
        self.count += 1

    def cells(self) -> dict[str, float | None]:
        """Return the means by column; None for one that does not exist."""
        means = (self.total / self.count).tolist()  # NaN without a batch
        return {name: None if isnan(mean) else mean for name, mean in zip(TIDS, means, strict=True)}


class Observed:
    """Measurements of one norm."""

    def __init__(
        self,
        target: Target,
        sizes: Sequence[int],
        *,
        length_first: bool,
        conditioning: bool,
    ) -> None:
        self.target = target
        self.count = 0
        self.num_positions = 0
        self.num_calls = 0
        self.num_left_out = 0
        """Number of calls with too few tokens to be compared."""
        self.sums = torch.zeros(0, dtype=torch.float64, device="cpu")
        """Sums over the valid tokens, and over all positions, (2, NUM_SUMS, C)."""
        self.energy = PositionEnergy()
        self.shares = TokenShares(target.site.norm.module)
        self.covariance = CovarianceSums() if conditioning else None
        self.discrepancy = Expectation.empty()
        self.padded = Expectation.empty()
        self.by_size = {size: Expectation.empty() for size in sizes}
        self._length_first = length_first
        self._regrouping = Regrouping(sizes, self._take_group) if sizes else None

    @property
    def has_padding(self) -> bool:
        """Whether any position was padding."""
        return self.count < self.num_positions

    @property
    def is_constant(self) -> bool:
        """Whether no call differed from the population by more than rounding."""
        return all((tid or 0.0) < _ROUNDING for tid in self.discrepancy.cells().values())

    def pool(self, x: Tensor, padding_mask: Tensor | None) -> bool:
        """Add a call to the population (first pass); return whether all its values are finite."""
        x, padding_mask = self._sequence_by_sequence(x, padding_mask)
        count, num_positions, sums = self._add_up(x, padding_mask)
        self.sums = self.sums + sums if self.num_calls else sums
        self.count += count
        self.num_positions += num_positions
        self.num_calls += 1
        tokens = _tokens(x, padding_mask)
        self.energy.add(x, padding_mask)
        self.shares.add(tokens)
        if self.covariance is not None:
            self.covariance.add(tokens)
        return bool(sums[0].isfinite().all())

    def compare(self, x: Tensor, padding_mask: Tensor | None) -> None:
        """Add the distance of a call from the population (second pass)."""
        x, padding_mask = self._sequence_by_sequence(x, padding_mask)
        add = None if self._regrouping is None else self._regrouping.add
        count, num_positions, sums = self._add_up(x, padding_mask, add)
        if count < _LEAST * self.count / self.num_calls:
            self.num_left_out += bool(count)
            return
        population, padded_population = self._populations
        self.discrepancy.add(batch_discrepancies(self.target, population, count, sums[0]))
        if self.has_padding:
            padded = batch_discrepancies(self.target, padded_population, num_positions, sums[1])
            self.padded.add(padded)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return the variance of the norm's input, and the mean of x², (C,) each.

        Without centering the first is the quadratic mean.
        """
        means = self.sums[0] / self.count
        square = means[SQUARES]
        if self.target.centered:
            square = (square - means[TOTAL].square()).clamp(min=0)
        return square, means[RAW_SQUARES]

    def measures(self) -> dict[str, float | None]:
        """Return the columns of `powernorm.records.LayerMeasures` that have a value."""
        padded = self.padded.cells()
        return {
            **self.discrepancy.cells(),
            "padded_mean_tid": padded["mean_tid"],
            "padded_var_tid": padded["var_tid"],
            **loud_features(self.moments()[1]),
            **self.energy.cells(),
            **self.shares.cells(),
            **({} if self.covariance is None else self.covariance.cells()),
        }

    def sizes(self) -> Mapping[int, Expectation]:
        """Return the expectations of the sizes with enough batches."""
        return {size: item for size, item in self.by_size.items() if item.count >= _FEWEST}

    def _sequence_by_sequence(
        self, x: Tensor, padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return (batch, length, C) and its mask, so that tokens of a sequence are adjacent."""
        if not self._length_first or x.ndim != 3:
            return x, padding_mask
        return x.transpose(0, 1), None if padding_mask is None else padding_mask.T

    def _add_up(
        self,
        x: Tensor,
        padding_mask: Tensor | None,
        receive: Callable[[Tensor], None] | None = None,
    ) -> tuple[int, int, Tensor]:
        """Return the numbers of valid tokens and of positions, and the sums over both.

        Args:
            x: (..., C), of which some tokens are processed at a time.
            padding_mask: `x.shape[:-1]`.
            receive: gets the terms of the valid tokens.

        Returns:
            (tokens, positions, sums): sums is (2, NUM_SUMS, C).
        """
        tokens = x.reshape(-1, x.shape[-1])
        sums = x.new_zeros(2, NUM_SUMS, x.shape[-1], dtype=torch.float64)
        valid = None if padding_mask is None else ~padding_mask.reshape(-1)
        size = max(1, _CHUNK // x.shape[-1])
        for start in range(0, tokens.shape[0], size):
            part = slice(start, start + size)
            terms = sums_per_token(self.target, tokens[part])
            kept = terms if valid is None else terms[valid[part]]
            added = kept.sum(0)
            sums[0] += added
            sums[1] += added if valid is None else terms.sum(0)
            if receive is not None:
                receive(kept)
        count = tokens.shape[0] if valid is None else int(valid.sum())
        return count, tokens.shape[0], sums

    @cached_property
    def _populations(self) -> list[list[Statistics]]:
        """Statistics of the valid tokens and of all positions, after the first pass."""
        counts = (self.count, self.num_positions)
        pairs = zip(counts, self.sums, strict=True)
        return [statistics_of(self.target, count, sums) for count, sums in pairs]

    def _take_group(self, size: int, sums: Tensor) -> None:
        found = batch_discrepancies(self.target, self._populations[0], size, sums)
        self.by_size[size].add(found)


class Survey:
    """Measurement of norms in two passes over the data.

    Args:
        model: a model in the modes that it should run in, see `powernorm.norms.preserved_state`.
        targets: the norms.
        batches: the data.
        forward: runs the model on a batch.
        sizes: batch sizes to regroup the tokens to; may be empty.
        conditioning: whether to compute covariances.
        on_progress: called after every batch.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Sequence[Target],
        batches: Iterable[Any],
        forward: Forward,
        sizes: Sequence[int],
        conditioning: bool,
        on_progress: Progress | None,
    ) -> None:
        self._model = model
        self._targets = targets
        self._batches = batches
        self._forward = forward
        self._on_progress = on_progress
        self._num_done = 0
        self._batch = 0
        self.num_batches = 0
        self.notes: dict[str, None] = {}
        """Remarks for the report, in order, each once."""
        self._sizes = sizes
        self._length_first = takes_length_first(model) or turns_round(model)
        self._conditioning = conditioning
        self.observed: dict[Target, Observed] = {}
        """Measurements by norm, in the order of the first calls."""

    def run(self) -> None:
        """Run both passes.

        Raises:
            InputError: fewer than two batches, batches of one token, of equal statistics or of
                different structure, a value that is not finite, no norm that was called, no valid
                token.
        """
        self.num_batches = self._go_through(self._pool)
        self._check_called()
        if self.num_batches < _FEWEST:
            raise InputError(
                "batches holds a single batch, which is its own population: give at least two, "
                "better dozens"
            )
        if all(seen.count <= seen.num_calls for seen in self.observed.values()):
            raise InputError(
                "every batch holds a single token, whose variance is 0: give batches of the "
                "training's size, on which TID depends"
            )
        second = self._go_through(self._compare)
        if all(seen.is_constant for seen in self.observed.values()):
            raise InputError(
                f"the {self.num_batches} batches have the same statistics at every norm, as if one "
                "were repeated: give different batches of the training data"
            )
        left_out = max(seen.num_left_out for seen in self.observed.values())
        if left_out:
            self.notes[
                f"{left_out} batches with fewer than {100 * _LEAST:.0f} % of the average tokens "
                "are left out of TID"
            ] = None
        if second != self.num_batches:
            raise InputError(
                f"batches gave {self.num_batches} batches at first and {second} the second time: "
                "give a list or a DataLoader, which gives the same in every pass"
            )

    def _go_through(self, receive: Callable[[Target, NormCall], None]) -> int:
        count = 0
        with (
            repeated_random_numbers(),
            observing(self._model, self._targets, receive, self.notes),
        ):
            for number, batch in numbered(self._batches):
                self._batch = number
                self._forward(self._model, batch)
                count += 1
                self._report()
        return count

    def _pool(self, target: Target, call: NormCall) -> None:
        if target not in self.observed:
            self.observed[target] = Observed(
                target,
                self._sizes,
                length_first=self._length_first,
                conditioning=self._conditioning,
            )
        if not self.observed[target].pool(*_measured(call)):
            raise InputError(
                f"the input of {target.name} holds NaN or infinite values in batch {self._batch}: "
                "the weights or this batch are broken; powernorm.diagnosis.first_nonfinite(model, "
                "batch) names the module that they come from"
            )

    def _compare(self, target: Target, call: NormCall) -> None:
        if target in self.observed:
            self.observed[target].compare(*_measured(call))

    def _check_called(self) -> None:
        if not self.observed:
            raise InputError(
                f"none of the {len(self._targets)} norms was called (the first is "
                f"{self._targets[0].name!r}); give a `forward` that runs the model"
            )
        for target, seen in self.observed.items():
            if not seen.count:
                raise InputError(
                    f"the batches hold no valid token for {target.name!r}: every position is "
                    "padding; check that padding_mask is True at padding, not at tokens"
                )

    def _report(self) -> None:
        self._num_done += 1
        if self._on_progress is not None:
            self._on_progress(self._num_done, 2 * self.num_batches)


def _measured(call: NormCall) -> tuple[Tensor, Tensor | None]:
    """Return the input and mask of a call, on a device with float64."""
    x, mask = call.x.detach(), call.padding_mask
    if has_float64(x.device):
        return x, mask
    return x.cpu(), None if mask is None else mask.cpu()


def _tokens(x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Return the valid tokens, (tokens, C)."""
    return x.reshape(-1, x.shape[-1]) if padding_mask is None else x[~padding_mask]
