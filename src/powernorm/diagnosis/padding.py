"""A check that padding does not change a model's output for a sequence.

Each sequence of a batch runs alone, without its padding, and is compared with its row of the batch.
A module *leaks* if its output for a row differs from that for the same values without padding: its
input is cut to the sequence and it runs again, while the modules that it calls return their outputs
in the batch, cut likewise. A leak is therefore found even if other modules before it or inside it
leak.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from powernorm.diagnosis.padded_rows import BatchRows
from powernorm.diagnosis.row_calls import TOLERANCE, CallRecorder, RowComparison
from powernorm.errors import InputError
from powernorm.inspection.examples import as_call
from powernorm.inspection.finder import looks_like_norm
from powernorm.norms.arguments import check_model
from powernorm.norms.preserved_state import by_itself, preserved_state


@dataclass(frozen=True)
class PaddingLeak:
    """A module that lets padding into the positions of a sequence.

    Attributes:
        module: dotted name; empty for the model itself.
        kind: name of its class.
        difference: largest change of its output, relative to the largest value of the output.
        reach: positions of a sequence that change, the most of any row; None if the output has
            no positions, as after a pool.
        advice: a fix.
    """

    module: str
    kind: str
    difference: float
    reach: int | None
    advice: str

    def __str__(self) -> str:
        """Return one sentence."""
        name = f"{self.kind} {self.module}" if self.module else f"{self.kind}, the model itself"
        frames = "position" if self.reach == 1 else "positions"
        where = "its output" if self.reach is None else f"{self.reach} {frames}"
        return (
            f"{name}: padding reaches {where}, changes up to {self.difference:.2g}; {self.advice}"
        )


@dataclass(frozen=True)
class PaddingReport:
    """The effect of padding on a model; `str` shows it.

    Attributes:
        difference: largest change of the model's output at valid positions, relative to its largest
            value; 0.0 if only rounding is left.
        changed_rows: rows whose largest output moves to another index, at any valid position: other
            classes, other tokens.
        num_rows: number of compared rows.
        first: dotted name of the module whose output differs first; None if none does.
        leaks: modules that let padding in, in the order in which they run.
        not_compared: modules whose outputs could not be compared, and why.
        counting: torch's BatchNorms that were called with the padding of the batch: training moves
            their running statistics by it, whether or not the outputs in evaluation change.
    """

    difference: float
    changed_rows: int
    num_rows: int
    first: str | None
    leaks: tuple[PaddingLeak, ...]
    not_compared: Mapping[str, str] = field(default_factory=dict)
    counting: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether each row gave the same result alone and in the batch, in evaluation."""
        return self.difference == 0.0 and not self.leaks and "" not in self.not_compared

    def __str__(self) -> str:
        """Return the verdict, and a line for each leak, BatchNorm and module not compared."""
        counting = [
            f"- {name or 'the model'}: this BatchNorm counts padding in its statistics in "
            "training; powernorm.mask_batch_norms(model) leaves it out"
            for name in self.counting
        ]
        if self.is_clean:
            when = " in evaluation" if counting else ""
            verdict = f"padding changes nothing{when}: {self.num_rows} rows are the same alone"
            return "\n".join([verdict, *counting])
        lines = [
            f"padding changes the output by up to {self.difference:.2g} of its largest value, and "
            f"the answer of {self.changed_rows} of {self.num_rows} rows"
            if self.difference
            else "the output could not be compared"
            if "" in self.not_compared
            else "padding changes inner positions, and not the output"
        ]
        lines += [f"- {leak}" for leak in self.leaks]
        lines += [f"- not compared: {name or 'the model'}: {why}" for name, why in self._unsure]
        return "\n".join([*lines, *counting])

    @property
    def _unsure(self) -> list[tuple[str, str]]:
        return [] if self.leaks else list(self.not_compared.items())


def padding_check(
    model: nn.Module, batch: object, lengths: Tensor | Sequence[int] | None = None
) -> PaddingReport:
    """Compare each sequence of a batch alone with its row of the padded batch, module by module.

    A model that ignores padding gives the same output for both. The check runs a copy of the model
    in float64 and evaluation mode, so that differences are not rounding. It needs no norms in the
    model, and no labels. BatchNorms of torch that would count padding in training are named, too.

    Args:
        model: any module.
        batch: sequences of different lengths in the model's format: keyword arguments, a tuple
            or list, or one tensor; (batch, length, …), (length, batch, …) or (batch, channels,
            length).
        lengths: valid positions of each row, (batch,); None reads them from the batch's mask or
            lengths, by the names that `powernorm.swap` knows (see `powernorm.declare_mask`).

    Raises:
        InputError: no row has padding, nothing marks padding, padding is in the middle of a
            row, or the model cannot run in float64 or a row alone.

    >>> report = padding_check(nn.Conv1d(1, 1, 3, padding=1), torch.ones(2, 1, 6), [6, 4])
    >>> report.leaks[0].reach
    1
    """
    check_model(model)
    with by_itself(model):
        twin = _in_float64(model)
        call = as_call(batch, twin, name="batch").converted(torch.float64)
        rows = BatchRows.of(twin, call, lengths)
        with preserved_state(twin, ()):
            recorder = CallRecorder(twin)
            try:
                whole = recorder.run(call)
            except (RuntimeError, AssertionError) as error:
                if not any(word in str(error) for word in ("dtype", "scalar type", "ouble")):
                    raise
                raise InputError(
                    f"a copy of {type(model).__name__} in float64, in which padding is checked, "
                    f"fails on the batch ({error}): if the model itself runs on it, a part fixes "
                    "the type of its results, such as float32; check the modules around that part"
                ) from error
            found = RowComparison(recorder, rows, whole)
            for row in rows.padded():
                found.add(row, recorder.run_alone(rows.alone(call, row), row))
    modules = {key.name: recorder.modules[key.name] for key in whole}
    counting = {
        key.name: None
        for key, call in whole.items()
        if call.args and _counts_padding(modules[key.name], call.args[0], rows)
    }
    return PaddingReport(
        found.difference if found.difference > TOLERANCE else 0.0,
        found.num_changed,
        found.num_rows,
        next((name for name in modules if name in found.differing), None),
        tuple(
            PaddingLeak(name, type(module).__name__, leak.relative, leak.reach, _advice(module))
            for name, module in modules.items()
            if (leak := found.leaks.get(name)) is not None
        ),
        found.not_compared,
        tuple(counting),
    )


def _counts_padding(module: nn.Module, x: object, rows: BatchRows) -> bool:
    """Return whether a BatchNorm of torch got the whole batch, not valid positions alone."""
    is_batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    if not is_batch_norm or module.running_mean is None or not isinstance(x, Tensor):
        return False
    num_rows = len(rows.lengths)
    return len(x) == (num_rows if x.ndim > 2 else num_rows * rows.longest)


def _in_float64(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model).double().eval()
    except (RuntimeError, TypeError, AssertionError) as error:
        raise InputError(
            f"{type(model).__name__} cannot be copied to float64, in which its padding is checked "
            f"({error}): give the model before it is compiled, quantized or sharded"
        ) from error


def _advice(module: nn.Module) -> str:
    """Return a fix for a module that leaks."""
    kind = type(module).__name__
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d):
        return (
            "set its input to 0 at padding, x.masked_fill(padding, 0); behind a BatchNorm "
            "powernorm.mask_batch_norms(model) does it"
        )
    if isinstance(module, nn.RNNBase):
        return "give it torch.nn.utils.rnn.pack_padded_sequence(x, lengths)"
    if "Attention" in kind:
        return "give it the mask of padding keys"
    if looks_like_norm(module):
        return "its statistics count padding: use a norm of each position, or a masked one"
    if "Pool" in kind:
        return "pool over the valid positions only"
    if any(True for _ in module.children()):
        return "its own forward mixes or counts positions (a mean, a softmax): mask it there"
    return "it mixes positions: give it the mask, or set its input to 0 at padding"
