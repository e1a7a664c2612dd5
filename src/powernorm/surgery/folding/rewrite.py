"""Computing how the weights of operations update, and which parameters are replaced."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from powernorm.surgery.folding.axes import Place, only_checks
from powernorm.surgery.folding.centering import CenteringConflictError, centered_behind
from powernorm.surgery.folding.operations import Operation, Slots, TensorPart, operation_of, part_of
from powernorm.surgery.folding.relations import Relations
from powernorm.surgery.folding.solution import FoldConflictError, Problem, Solution, nearest_norm
from powernorm.surgery.folding.trace import Trace


@dataclass(frozen=True)
class WeightUpdate:
    """New weights of an operation whose input and output are reparametrized.

    The original one is `y = W x + b`. With `x = A_in s + B_in` and `y = A_out t + B_out` its output
    in the folded model is `t = (W (A_in s + B_in) + b - B_out) / A_out = W' s + b'`, so
    `W' = diag(1/A_out) W diag(A_in)`, `b' = (b + W B_in - B_out) / A_out`. Parts are named by the
    slots that the operation reads. Scales (A) and shifts (B) are (C,) or 0-d, float64. With
    `centers` both are centered over the output features after that.

    The readers of a folded norm that centers also center: with V = W diag(A_in), they use V minus
    its row means, times A of the norm's own input (`before_centering`; None if nothing centers).
    """

    kind: str
    weight: TensorPart
    bias: TensorPart | None
    scale_in: Tensor
    shift_in: Tensor
    scale_out: Tensor
    shift_out: Tensor
    groups: int = 1
    axes: tuple[int, int] = (0, 1)
    centers: bool = False
    before_centering: Tensor | None = None

    @property
    def is_trivial(self) -> bool:
        """Whether weights and bias stay unchanged."""
        return (
            not self.centers
            and self.before_centering is None
            and bool((self.scale_in == 1).all() and (self.scale_out == 1).all())
            and not bool(self.shift_in.any())
            and not bool(self.shift_out.any())
        )

    def agrees(self, other: WeightUpdate) -> bool:
        """Return whether both updates demand the same of the same rows."""
        mine, others = vars(self), vars(other)
        return all(_alike(mine[name], others[name]) for name in mine)

    @property
    def parts(self) -> tuple[TensorPart, ...]:
        """The weight, and the bias if there is one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def on(self, device: torch.device) -> WeightUpdate:
        """Return the same update with its scales and shifts on a device."""
        values = vars(self).items()
        moved: Any = {name: one.to(device) for name, one in values if isinstance(one, Tensor)}
        return replace(self, **moved)

    def new_weight(self, weight: Tensor) -> Tensor:
        """Return W' from the rows of W that the operation reads, in float64."""
        new = self._new_weight(weight)
        return new - new.mean(self._output_axis, keepdim=True) if self.centers else new

    @property
    def _output_axis(self) -> int:
        """Dimension of the weight with the features of the output."""
        if self.kind in ("embedding", "value"):
            return -1
        if self.kind == "einsum":
            return self.axes[0]
        return 1 if self.weight.transposed else 0

    def _new_weight(self, weight: Tensor) -> Tensor:
        if self.kind in ("embedding", "value"):
            return (weight - self.shift_out) / self.scale_out
        if self.kind == "diagonal":
            return weight * self.scale_in / self.scale_out
        if self.kind == "einsum":
            outer, inner = self.axes
            return (
                weight
                * _along(self.scale_in, inner, weight)
                / _along(self.scale_out, outer, weight)
            )
        oriented = weight.transpose(0, 1) if self.weight.transposed else weight
        changed = oriented * self._inputs(self.scale_in, oriented)
        if self.before_centering is not None:
            changed = changed - changed.mean(1, keepdim=True)
            changed = changed * _along(self.before_centering, 1, oriented)
        changed = changed / _along(self.scale_out, 0, oriented)
        return changed.transpose(0, 1) if self.weight.transposed else changed

    def new_bias(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the new bias b' from the old weight and bias, in float64."""
        oriented = weight.transpose(0, 1) if self.weight.transposed else weight
        summed = oriented.flatten(2).sum(2) if oriented.ndim > 2 else oriented
        if self.groups > 1:
            added = (summed * self._inputs(self.shift_in, summed)).sum(1)
        else:
            added = summed @ self.shift_in.expand(summed.shape[1])
        new = (bias + added - self.shift_out) / self.scale_out
        return new - new.mean() if self.centers else new

    def _inputs(self, values: Tensor, weight: Tensor) -> Tensor:
        """Return one value per input feature as a factor of a weight (out, in / groups, …).

        Each group of rows reads the next part of the input features.
        """
        if not values.ndim or self.groups == 1:
            return _along(values, 1, weight)
        rows = weight.shape[0] // self.groups
        per_row = values.reshape(self.groups, -1).repeat_interleave(rows, 0)
        return per_row.reshape(*per_row.shape, *(1,) * (weight.ndim - 2))


def _along(values: Tensor, axis: int, weight: Tensor) -> Tensor:
    """Return one value per feature as a factor along an axis of a weight; 0-d ones as they are."""
    return values.reshape(-1, *(1,) * (weight.ndim - 1 - axis)) if values.ndim else values


@dataclass(frozen=True)
class Replacement:
    """New values for a parameter or buffer, which may be in several slots of the model.

    Args:
        names: the slots that get the same new tensor.
        updates: the updates of its rows, each once.
        size: size of a bias that is added, None if there was a tensor before.
        unties: whether it shared its tensor with other slots before.
    """

    names: tuple[str, ...]
    updates: tuple[WeightUpdate, ...]
    size: int | None = None
    unties: bool = False


def _alike(one: object, other: object) -> bool:
    """Return whether two values are equal, scales and shifts but for the order of the products."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return bool(torch.isclose(one, other, rtol=1e-12, atol=1e-14).all())
    return one is other or (type(one) is type(other) and one == other)


class Editor:
    """Converter of a solution into replacements of parameters."""

    def __init__(self, trace: Trace, slots: Slots, relations: Relations) -> None:
        self.trace = trace
        self.slots = slots
        self.relations = relations
        self.operations = self._operations()

    def _operations(self) -> dict[fx.Node, Operation]:
        """Return all operations of the graphs by their nodes, also those unrelated to any norm."""
        related = dict(self.relations.operations)
        for node in self.trace.nodes():
            operation = None if node in related else operation_of(node, self.trace)
            if operation is not None:
                related[node] = operation
        return related

    def replacements(
        self,
        solution: Solution,
        problem: Problem,
        *,
        untie: bool,
        centered: Collection[Place] = (),
    ) -> list[Replacement]:
        """Return the parameters that update.

        Args:
            solution: scales and shifts.
            problem: problem of that solution.
            untie: whether tied tensors may be separated.
            centered: features whose writers are centered.

        Raises:
            FoldConflictError: a parameter is shared by operations that need different updates.
            CenteringConflictError: the same of one that is centered.
        """
        read = centered_behind(self.relations, problem.centers)
        touched: dict[str, list[_Use]] = {}
        made: dict[str, int] = {}
        for operation in self.operations.values():
            update = self._update(operation, solution, operation.output in centered, read)
            for part in update.parts:
                name = part.name
                if name in self.slots.tensors:
                    name = self.slots.aliases(name)[0]
                elif update.is_trivial:
                    continue
                else:
                    bias = self.slots.bias_for(operation)
                    assert bias is not None
                    made[name] = bias[1]
                touched.setdefault(name, []).append(_Use(operation, update, part))
        found: list[Replacement] = []
        for name, uses in touched.items():
            if all(use.update.is_trivial for use in uses):
                continue
            try:
                found += self._replace(name, uses, made.get(name), untie)
            except _SharedError as shared:
                writes = {use.operation.output for use in uses if use.update.centers}
                if writes:
                    raise CenteringConflictError(writes, str(shared)) from None
                place = shared.operation.reads or shared.operation.output
                index = nearest_norm(problem, place, shared.operation.output)
                raise FoldConflictError(index, str(shared)) from None
        return found

    def _update(
        self,
        operation: Operation,
        solution: Solution,
        centers: bool,
        read: Mapping[Place, Place],
    ) -> WeightUpdate:
        reads, writes = operation.reads, operation.output
        scale_in, shift_in = solution.at(reads)
        scale_out, shift_out = solution.at(writes)
        weight, bias = (
            part and replace(part, name=self.slots.read_at(part.name, operation.path))
            for part in (operation.weight, operation.bias)
        )
        assert weight is not None
        if bias is None and bool(shift_in.any() or shift_out.any()):
            found = self.slots.bias_for(operation)
            bias = found[0] if found else None
        moves = scale_in, shift_in, scale_out, shift_out
        groups, axes = operation.groups, operation.axes
        centered_from = None if reads is None else read.get(reads)
        before = None if centered_from is None else solution.at(centered_from)[0]
        return WeightUpdate(operation.kind, weight, bias, *moves, groups, axes, centers, before)

    def _replace(
        self,
        name: str,
        uses: list[_Use],
        size: int | None,
        untie: bool,
    ) -> Iterator[Replacement]:
        by_slot: dict[str, list[_Use]] = {}
        for use in uses:
            by_slot.setdefault(use.part.name, []).append(use)
        if size is not None:
            yield Replacement((name,), _agreed(name, uses), size)
            return
        if self._is_read_elsewhere(name):
            changed = next(use.operation for use in uses if not use.update.is_trivial)
            raise _SharedError(changed, f"{name} is also read by other operators")
        agreed = {slot: _agreed(slot, group) for slot, group in by_slot.items()}
        aliases = self.slots.aliases(name)
        first, *others = agreed.values()
        of_biases = all(use.part is use.update.bias for use in uses)
        if all(_ask_the_same(first, other, of_biases=of_biases) for other in others):
            yield Replacement(tuple(aliases), first)
            return
        if not untie:
            raise _SharedError(
                _changed(uses),
                f"{name} is tied: {', '.join(aliases)} (fold with tied='untie' to separate them)",
            )
        for slot, updates in agreed.items():
            if not all(update.is_trivial for update in updates):
                yield Replacement((slot,), updates, unties=True)

    def _is_read_elsewhere(self, name: str) -> bool:
        """Return whether operators other than operations with weights read the tensor."""
        return any(
            not self._is_weight(node, user)
            for node in self.trace.nodes()
            if (target := self.trace.tensor_of(node)) is not None
            and self.slots.aliases(target)[0] == name
            and node not in self.operations
            for user in node.users
        )

    def _is_weight(self, value: fx.Node, user: fx.Node) -> bool:
        """Return whether an operator reads a parameter, or a part, only as a weight or bias."""
        if only_checks(user):
            return True
        if user in self.operations:
            reads = self.operations[user].reads
            return reads is None or reads.node is not value
        # A split has no part of its own, its pieces have.
        pieces = isinstance(user.meta.get("val"), tuple | list)
        if part_of(user, self.trace) is None and not pieces:
            return False
        return all(self._is_weight(user, after) for after in user.users)


class _Use(NamedTuple):
    """An operation, its update, and the part of its weights that belongs to the tensor."""

    operation: Operation
    update: WeightUpdate
    part: TensorPart


class _SharedError(Exception):
    def __init__(self, operation: Operation, reason: str) -> None:
        super().__init__(reason)
        self.operation = operation


def _changed(uses: list[_Use]) -> Operation:
    """Return the operation that demands a update, the last one if there are several."""
    return [use.operation for use in uses if not use.update.is_trivial][-1]


def _agreed(slot: str, uses: list[_Use]) -> tuple[WeightUpdate, ...]:
    """Return the updates of one slot, each once.

    Raises:
        _SharedError: two operations demand different updates of the same rows.
    """
    kept: list[WeightUpdate] = []
    for update in (use.update for use in uses):
        if any(update.agrees(other) for other in kept):
            continue
        if any(_overlap(update, other, slot) for other in kept):
            if update.is_trivial and all(other.is_trivial for other in kept):
                continue
            paths = sorted({use.operation.path or "the model" for use in uses})
            raise _SharedError(
                _changed(uses), f"{slot} is used several times, in {' and '.join(paths)}"
            )
        kept.append(update)
    return tuple(kept)


def _overlap(update: WeightUpdate, other: WeightUpdate, slot: str) -> bool:
    rows = [part.rows for item in (update, other) for part in item.parts if part.name == slot]
    (start, stop), (other_start, other_stop) = rows[:2]
    return start < other_stop and other_start < stop


def _ask_the_same(
    first: tuple[WeightUpdate, ...], second: tuple[WeightUpdate, ...], *, of_biases: bool
) -> bool:
    def bare(update: WeightUpdate) -> WeightUpdate:
        if of_biases and bool(update.shift_in.any()):
            return replace(update, bias=None)  # b' depends on the weight
        none = TensorPart("", update.weight.rows, update.weight.transposed)
        return replace(update, weight=none, bias=None)

    if all(update.is_trivial for update in (*first, *second)):
        return True
    return len(first) == len(second) and all(
        bare(a).agrees(bare(b)) for a, b in zip(first, second, strict=True)
    )


def compute(replacement: Replacement, read: Mapping[str, Tensor]) -> Tensor:
    """Return the new tensor in float64.

    Args:
        replacement: the replacement of a parameter or buffer.
        read: the model's original tensors by name.
    """
    name = replacement.names[0]
    if replacement.size is None:
        new = read[name].detach().double().clone()
    else:
        weight = read[replacement.updates[0].weight.name]
        new = torch.zeros(replacement.size, dtype=torch.float64, device=weight.device)
    for update in replacement.updates:
        old = read[update.weight.name].detach().double()
        moved = update.on(old.device)
        rows = slice(*update.weight.rows)
        if update.weight.name in replacement.names:
            new[rows] = moved.new_weight(old[rows])
        else:
            assert update.bias is not None
            place = slice(*update.bias.rows)
            new[place] = moved.new_bias(old[rows], new[place].clone())
    return new
