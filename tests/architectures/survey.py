"""The steps of each architecture, as a row: swap, mask, training, calibration, fold.

Nothing here trusts what the library says of itself: statistics are compared between batches that
differ in padding alone, and folded models with the unfolded ones on inputs that were no examples.
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

import powernorm
from powernorm.errors import InputError
from powernorm.inspection.mask_checks import MaskWarning
from powernorm.norms import BatchStatisticsNorm

Inputs = dict[str, Any]
Row = dict[str, Any]

LENGTHS: Final = (8, 6)
"""Valid positions of the two rows of a padded batch."""
SQUARE: Final = (8, 6, 8, 5, 4, 8, 7, 3)
EXTRA: Final = 4
"""Further padded positions of the batch that has to give the same statistics."""


@dataclass(frozen=True)
class Request:
    """The batch that an architecture is asked for.

    Attributes:
        lengths: valid positions of each row.
        extra: padded positions behind the longest row.
        seed: of the values.
        masked: whether the call says what is padding.
        left: whether padding comes before the tokens.
        loud: whether padded vectors are large.
    """

    lengths: tuple[int, ...] = (8, 8)
    extra: int = 0
    seed: int = 0
    masked: bool = False
    left: bool = False
    loud: bool = True


@dataclass(frozen=True)
class Architecture:
    """A small random model and its inputs.

    Attributes:
        name: row's name.
        library: whose model it is.
        build: makes the model, in evaluation mode.
        inputs: makes keyword arguments of a call.
        takes_mask: whether its inputs can be padded and masked.
        takes_lengths: whether it takes inputs of other lengths.
        note: what is special.
        pads: how batches with the same tokens differ: padded further, or with louder values where
            the model takes no more frames than the longest row has.
    """

    name: str
    library: str
    build: Callable[[], nn.Module]
    inputs: Callable[[Request], Inputs]
    takes_mask: bool = False
    takes_lengths: bool = False
    note: str = ""
    pads: Literal["further", "louder"] = "further"


@dataclass
class _Findings:
    """Results of an architecture so far."""

    row: Row
    wrong: list[str] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)
    """Messages, and the stages that met them."""


def survey(architecture: Architecture) -> Row:
    """Return the architecture's row."""
    findings = _Findings({"name": architecture.name, "library": architecture.library})
    if architecture.note:
        findings.row["note"] = architecture.note
    for stage in _STAGES:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            _attempt(stage, architecture, findings)
    row = findings.row
    row["refused"] = [f"{', '.join(names)}: {text}" for text, names in findings.refused.items()]
    row["wrong"] = findings.wrong
    row["status"] = "wrong" if findings.wrong else "refused" if findings.refused else "ok"
    return row


def _attempt(
    stage: Callable[[Architecture, _Findings], None],
    architecture: Architecture,
    findings: _Findings,
) -> None:
    name = stage.__name__.strip("_")
    try:
        stage(architecture, findings)
    except InputError as error:
        findings.row[name] = "refused"
        findings.refused.setdefault(_shortened(str(error)), []).append(name)
    except Exception as error:  # any other error is one that a user should not meet
        findings.row[name] = "crashed"
        text = _shortened(f"{type(error).__name__}: {error}")
        findings.wrong.append(f"{name}: crashed with {text}")


# Swap


def _swap(architecture: Architecture, findings: _Findings) -> None:
    model = architecture.build()
    plan = powernorm.plan_swap(model, "bn")
    row, rows = findings.row, plan.rows
    row["norms"] = len(rows)
    row["swapped"] = sum(one.action == "swap" for one in rows)
    row["without_mask"] = sum(one.action == "swap" and one.mask is None for one in rows)
    row["kept"] = _counted(one.reason for one in rows if one.action == "keep")
    known = {name for one in rows for name in (one.name, *one.shared)}
    missed = [
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if _looks_like_norm(module) and not _is_inside(name, known)
    ]
    if missed:
        row["unlisted"] = _listed(missed)
    idle = _idle(copy.deepcopy(model), architecture.inputs(Request()))
    if idle:
        findings.wrong.append(
            f"swap: {len(idle)} new norms are not called where the old ones were: {_listed(idle)}"
        )
    before = _output(model, architecture.inputs(Request()))
    swapped = plan.apply()
    swapped.undo()
    if not torch.equal(before, _output(model, architecture.inputs(Request()))):
        findings.wrong.append("swap: undo does not bring the outputs back")


def _idle(model: nn.Module, inputs: Inputs) -> list[str]:
    """Return the norms whose successors a forward does not reach, of all that can be swapped."""
    rows = powernorm.plan_swap(model, "bn", where="*").rows
    names = [one.name for one in rows if one.action == "swap"]
    called = _called(model, {name: model.get_submodule(name) for name in names}, inputs)
    new = powernorm.swap(model, "bn", where="*").norms
    reached: set[nn.Module] = set()
    for norm in new.values():
        # Old and new norms share their hooks: what counts is which of them is called.
        norm.register_forward_pre_hook(lambda module, _: reached.add(module))
    _output(model, inputs)
    return [name for name in called if new[name] not in reached]


def _looks_like_norm(module: nn.Module) -> bool:
    name = type(module).__name__
    return bool(
        re.search(r"(?<!_Weight)(?<!^Spectral)Norm(?!aliz)|^LN|RMS|^BN|GRN", name)
    ) and not any(True for _ in module.children())


def _is_inside(name: str, known: Iterable[str]) -> bool:
    return any(
        name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")
        for other in known
    )


def _same_kind(architecture: Architecture, findings: _Findings) -> None:
    """Swap each norm to this library's norm of the same kind: nothing may change."""
    model, inputs = in_float64(architecture, architecture.inputs(Request()))
    expected = _output(model, inputs)
    rows = [one for one in powernorm.plan_swap(model, "bn", where="*").rows if one.action == "swap"]
    for kind, to in (("layer", "ln"), ("rms", "rms")):
        names = {one.name for one in rows if one.kind == kind}
        if names:
            powernorm.swap(model, to, where=lambda name, _, names=names: name in names)
    error = _relative_error(_output(model, inputs), expected)
    # Many an RMSNorm computes in float32 whatever it is given, or has an eps of another meaning.
    tolerance = 1e-3
    if error > tolerance:
        findings.wrong.append(f"swap: by norms of the same kind the outputs change, by {error:.0e}")


# Masks


def _mask(architecture: Architecture, findings: _Findings) -> None:
    if not architecture.takes_mask:
        findings.row["mask"] = "takes none"
        return
    pads = architecture.pads
    even = tuple(max(LENGTHS) for _ in LENGTHS)
    uneven = (Request(LENGTHS, masked=True), Request(LENGTHS, EXTRA, masked=True))
    whole = (Request(even, masked=True), Request(even, EXTRA, masked=True))
    if pads == "louder":
        uneven = (Request(LENGTHS, masked=True, loud=False), Request(LENGTHS, masked=True))
    model, _ = in_float64(architecture, architecture.inputs(uneven[0]))
    comparisons = [(None, "train", uneven), (None, "calibrate", uneven)]
    if pads != "louder":
        comparisons.append((None, "train", whole))
        # As many rows as positions: a mask the wrong way round fits too.
        square = (Request(SQUARE, masked=True), Request(SQUARE, EXTRA, masked=True))
        comparisons.append((None, "train", square))
    if _selected(model) is not None:
        comparisons.append(("*", "train", uneven))
    results = [
        _same_statistics(architecture, model, where, way, *batches, findings)
        for where, way, batches in comparisons
    ]
    findings.row["mask"] = next((one for one in results if one != "ok"), "ok")


def _same_statistics(
    architecture: Architecture,
    model: nn.Module,
    where: str | None,
    way: str,
    less: Request,
    more: Request,
    findings: _Findings,
) -> str:
    """Compare the statistics of batches that differ in padding alone."""
    dtype = next(model.parameters()).dtype
    first, second = (_cast(architecture.inputs(request), dtype) for request in (less, more))
    plan = powernorm.plan_swap(model, "bn", where=where)
    names = [one.name for one in plan.rows if one.action == "swap"]
    masks = {one.name: one.mask for one in plan.rows}
    fickle = _not_invariant(model, names, first, second, less.lengths)
    a, _ = _statistics(model, where, way, first)
    b, said = _statistics(model, where, way, second)
    tolerance = 1e-5 if dtype == torch.float64 else 1e-3
    wrong = [name for name in a if name in b and _distance(a[name], b[name]) > tolerance]
    warned = [name for name in wrong if any(_names(text, name) for text in said)]
    if any(name not in warned and name not in fickle for name in wrong):
        # A LayerNorm takes away how loud padding is, a BatchNorm does not, and convolutions see it.
        # What counts is the first norm whose statistics change while its tokens do not.
        swapped = copy.deepcopy(model)
        powernorm.swap(swapped, "bn", where=where)
        fickle |= _not_invariant(swapped.train(), names, first, second, less.lengths)
    own = [name for name in wrong if name not in warned and name in fickle]
    silent = [name for name in wrong if name not in warned and name not in own]
    if silent:
        what = _listed([f"{name} (mask: {masks.get(name) or 'none'})" for name in silent])
        finding = (
            f"mask: {len(silent)} of {len(a)} norms count padding in silence"
            f" ({'all sides, ' if where else ''}{way}): {what}"
        )
        if not any(one.startswith("mask:") and "silence" in one for one in findings.wrong):
            findings.wrong.append(finding)
        return "silent"
    if warned:
        return "warned"
    return "not invariant itself" if own else "ok"


def _statistics(
    model: nn.Module, where: str | None, way: str, inputs: Inputs
) -> tuple[dict[str, tuple[Tensor, Tensor]], list[str]]:
    model = copy.deepcopy(model)
    swapped = powernorm.swap(model, "bn", where=where, momentum=1.0)
    with warnings.catch_warnings(record=True) as caught, torch.random.fork_rng():
        warnings.simplefilter("always")
        torch.manual_seed(3)
        if way == "train":
            model.train()
            with torch.no_grad():
                model(**inputs)
        else:
            powernorm.calibrate(model, [inputs], names=_called(model, swapped.norms, inputs))
    said = [str(one.message) for one in caught if issubclass(one.category, MaskWarning)]
    return {
        name: (norm.running_mean.clone(), norm.running_var.clone())
        for name, norm in swapped.norms.items()
        if isinstance(norm, BatchStatisticsNorm) and int(norm.num_batches_tracked) > 0
    }, said


def _names(text: str, norm: str) -> bool:
    """Return whether a warning is about a norm: it names it, or all of them."""
    return norm in text or any(part in text for part in ("the swapped norms",))


def _distance(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> float:
    deviation = (a[1] + 1e-12).sqrt()
    moved = ((a[0] - b[0]).abs() / (deviation + 1e-6 * a[0].abs() + 1e-9)).max()
    spread = ((a[1] - b[1]).abs() / (a[1] + 1e-9)).max()
    return float(torch.maximum(moved, spread).nan_to_num(float("inf")))


def _not_invariant(
    model: nn.Module,
    names: Iterable[str],
    first: Inputs,
    second: Inputs,
    lengths: tuple[int, ...],
) -> set[str]:
    """Return the norms whose inputs at valid positions change with padding in the model itself."""
    seen = [_norm_inputs(model, names, inputs) for inputs in (first, second)]
    fickle = set()
    for name in names:
        pairs = list(zip(seen[0][name], seen[1][name], strict=False))
        if len(seen[0][name]) != len(seen[1][name]) or not all(
            _agree(*pair, lengths) for pair in pairs
        ):
            fickle.add(name)
    return fickle


def _agree(a: Tensor, b: Tensor, lengths: tuple[int, ...]) -> bool:
    """Return whether the valid part of each row is the same in both, as far as rows show."""
    rows = len(lengths)
    # The batch is the dimension that both have alike: another one is longer by the padding.
    if b.shape[0] != rows and a.ndim > 1 and b.shape[1] == rows:
        a, b = a.transpose(0, 1), b.transpose(0, 1)
    if a.shape[0] != rows and a.shape[0] % rows == 0:
        a, b = (x.reshape(rows, -1, *x.shape[1:]) for x in (a, b))
    if len(a) != rows or len(b) != rows:
        return True
    longest = max(lengths)
    return all(
        _row_agrees(x, y, length / longest) for x, y, length in zip(a, b, lengths, strict=True)
    )


def _row_agrees(a: Tensor, b: Tensor, valid: float) -> bool:
    for dim in range(a.ndim):
        size = min(a.shape[dim], b.shape[dim])
        a, b = a.narrow(dim, 0, size), b.narrow(dim, 0, size)
    if a.ndim > 1:
        size = max(1, int(a.shape[0] * valid))
        a, b = a[:size], b[:size]
    tolerance = 1e-6 if a.dtype == torch.float64 else 1e-3
    return bool(torch.allclose(a, b, rtol=tolerance, atol=tolerance))


def _norm_inputs(model: nn.Module, names: Iterable[str], inputs: Inputs) -> dict[str, list[Tensor]]:
    seen: dict[str, list[Tensor]] = {name: [] for name in names}

    def note(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs: seen[name].append(
            next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)).detach().clone()
        )

    handles = [
        model.get_submodule(name).register_forward_pre_hook(note(name), with_kwargs=True)
        for name in seen
    ]
    # torch's fused layers do not call their norms.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        _output(model, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    for handle in handles:
        handle.remove()
    return seen


# Training


def _train(architecture: Architecture, findings: _Findings) -> None:
    model = architecture.build()
    inputs = architecture.inputs(Request(masked=architecture.takes_mask))
    swapped = powernorm.swap(model, "bn")
    model.train()
    loss = sum(x.float().square().mean() for x in tensors_of(model(**inputs)) if x.requires_grad)
    if not isinstance(loss, Tensor):
        findings.row["training"] = "no gradient"
        return
    loss.backward()
    called = {name for name, norm in swapped.norms.items() if int(norm.num_batches_tracked) > 0}
    weights = {name: swapped.norms[name].weight for name in called}  # some have none, as before
    grads = {name: weight.grad for name, weight in weights.items() if weight is not None}
    without = [name for name, grad in grads.items() if grad is None]
    infinite = [name for name, g in grads.items() if g is not None and not bool(g.isfinite().all())]
    findings.row["training"] = "ok"
    findings.row["called"] = len(called)
    if without:
        findings.row["training"] = f"{len(without)} norms without a gradient"
    if infinite or not bool(loss.isfinite()):
        findings.row["training"] = "not finite"
        findings.wrong.append(f"train: not finite: loss {loss.item()}, {_listed(infinite)}")


# Calibration and folding


def _fold(architecture: Architecture, findings: _Findings) -> None:
    row = findings.row
    example = architecture.inputs(Request())
    model, example = in_float64(architecture, example)
    called = _called_norms(model, example)
    swapped = powernorm.swap(model, "bn", where=lambda name, _: name in called)
    batches = [architecture.inputs(Request(seed=seed)) for seed in (1, 2, 3)]
    batches = [_cast(batch, next(model.parameters()).dtype) for batch in batches]
    row["calibrate"] = "refused"
    powernorm.calibrate(model, batches)
    row["calibrate"] = "ok"
    before = _config(model)
    report = powernorm.fold(model, example, inplace=False)
    rows = [one for one in report.rows if one.name in swapped.norms]
    row["folded"] = sum(one.action == "fold" for one in rows)
    row["multiply_adds"] = sum(one.action == "simplify" for one in rows)
    row["fold_kept"] = sum(one.action == "keep" for one in rows)
    row["fold_reasons"] = _counted(one.reason for one in rows if one.reason)
    row["fold"] = "ok"
    _compare_folded(architecture, model, report.model, findings)
    for what, after in (("the original's", _config(model)), ("the", _config(report.model))):
        changed = [name for name in after if after[name] != before.get(name)]
        if changed:
            findings.wrong.append(f"fold: {what} config changed: {_listed(changed)}")
    tie = getattr(report.model, "tie_weights", None)
    if tie is not None:
        before = _output(report.model, example)
        tie()
        error = _relative_error(_output(report.model, example), before)
        if error > 1e-9:
            findings.wrong.append(f"fold: tie_weights() changes the folded model, by {error:.0e}")


def _compare_folded(
    architecture: Architecture,
    model: nn.Module,
    folded: nn.Module,
    findings: _Findings,
) -> None:
    cases = {"the example": Request(), "another batch size": Request((8, 8, 8), seed=5)}
    if architecture.takes_lengths:
        cases["another length"] = Request((11, 11), seed=6)
    if architecture.takes_mask:
        cases["padding"] = Request((10, 7), 3, seed=7, masked=True)
        cases["padding on the left"] = Request((10, 7), 3, seed=8, masked=True, left=True)
    dtype = next(model.parameters()).dtype
    bound = 1e-9 if dtype == torch.float64 else 1e-4
    errors = {}
    for what, request in cases.items():
        inputs = _cast(architecture.inputs(request), dtype)
        try:
            expected = _valid(_outputs(model, inputs), inputs)
        except Exception:  # the model itself does not take such inputs
            continue
        actual = _valid(_outputs(folded, inputs), inputs)
        pairs = zip(expected, actual, strict=True)
        errors[what] = max(_relative_error(b, a) for a, b in pairs)
    row = findings.row
    row["fold_error"] = _bound(max(errors.values()))
    row["dtype"] = str(dtype).removeprefix("torch.")
    off = {what: error for what, error in errors.items() if not error <= bound}
    if off:
        text = ", ".join(f"{error:.0e} on {what}" for what, error in off.items())
        findings.wrong.append(f"fold: outputs differ, by {text}")


def _bound(error: float) -> str:
    """Return a round bound, the same on machines that round otherwise."""
    bounds = (1e-13, 1e-9, 1e-6, 1e-5, 1e-4)
    return next((f"{bound:.0e}" for bound in bounds if error <= bound), "large")


def _called(model: nn.Module, norms: Mapping[str, nn.Module], inputs: Inputs) -> list[str]:
    """Return the norms that a forward calls: a text alone leaves those for images out."""
    called: list[str] = []
    handles = [
        norm.register_forward_pre_hook(lambda *_, name=name: called.append(name))
        for name, norm in norms.items()
    ]
    _output(model, inputs)
    for handle in handles:
        handle.remove()
    return list(dict.fromkeys(called))


def _selected(model: nn.Module) -> str | None:
    """Return the selection that takes the norms of both sides of an encoder-decoder."""
    rows = powernorm.plan_swap(model, "bn").rows
    return "*" if any(one.side is not None for one in rows) else None


def _called_norms(model: nn.Module, inputs: Inputs) -> set[str]:
    """Return the norms that can be swapped and that a forward calls."""
    rows = powernorm.plan_swap(model, "bn", where=_selected(model)).rows
    names = [one.name for one in rows if one.action == "swap"]
    norms = {name: model.get_submodule(name) for name in names}
    return set(_called(model, norms, inputs))


def _config(model: nn.Module) -> dict[str, Any]:
    config = getattr(model, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    # What was swapped, by which `powernorm.load` knows it, changes with the model.
    return _flat({name: value for name, value in values.items() if name != "powernorm"})


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


# Save and load


def _save(architecture: Architecture, findings: _Findings) -> None:
    """Compare a model that was saved and loaded: outputs, and statistics after a step."""
    inputs = architecture.inputs(Request(masked=architecture.takes_mask))
    model, other = architecture.build(), architecture.build()
    powernorm.swap(model, "bn", where=_selected(model))
    _step(model, inputs)
    with tempfile.TemporaryDirectory() as folder:
        powernorm.save(model, folder)
        known = json.loads((Path(folder) / "config.json").read_bytes()).get("architectures")
        loaded = powernorm.load(folder) if known else powernorm.load(folder, other)
    findings.row["save"] = "by its configuration" if known else "into a given model"
    same = torch.equal(_output(model, inputs), _output(loaded, inputs))
    for one in (model, loaded):
        _step(one, inputs)
    state, again = model.state_dict(), loaded.state_dict()
    changed = [name for name in state if not torch.equal(state[name], again[name])]
    if not same or state.keys() != again.keys() or changed:
        findings.row["save"] = "another model"
        findings.wrong.append(f"save: outputs equal: {same}; statistics: {_listed(changed)}")


def _step(model: nn.Module, inputs: Inputs) -> None:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(4)
        model.train()(**_cast(inputs, next(model.parameters()).dtype))
    model.eval()


# Shared


def in_float64(architecture: Architecture, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    """Return the model and its inputs in float64, or in float32 where its code knows no other."""
    model = architecture.build()
    wide, wide_inputs = copy.deepcopy(model).double().eval(), _cast(inputs, torch.float64)
    try:
        y = _output(wide, wide_inputs)
        # Masks that are added twice overflow in float64, and give NaN.
        if y.dtype == torch.float64 and bool(y.isfinite().all()):
            return wide, wide_inputs
    except Exception:  # float32 is tried next
        pass
    return model, inputs


def _cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def _output(model: nn.Module, inputs: Inputs) -> Tensor:
    outputs = _outputs(model, inputs)
    return next(x for x in outputs if x.is_floating_point())


@torch.no_grad()
def _outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    # Models that draw random numbers in evaluation, too, draw the same.
    with torch.random.fork_rng():
        torch.manual_seed(9)
        dtype = next(model.parameters()).dtype
        answer = model(**_cast(inputs, dtype))
    return list(tensors_of(answer))


def _valid(outputs: list[Tensor], inputs: Inputs) -> list[Tensor]:
    """Return the outputs without those of padded positions, which mean nothing."""
    masks = [x for name, x in inputs.items() if name.endswith("attention_mask")]
    return [_without_padding(x, masks) for x in outputs]


def _without_padding(x: Tensor, masks: list[Tensor]) -> Tensor:
    for mask in masks:
        if x.ndim > 1 and len(x) == len(mask) and mask.shape[1] % x.shape[1] == 0:
            return x[mask[:, :: mask.shape[1] // x.shape[1]].bool()]
    return x


def tensors_of(value: Any) -> Iterable[Tensor]:
    """Return the floating point tensors of an answer, the one that it is about first."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
        return
    if isinstance(value, Mapping):
        first = [name for name in ("logits", "last_hidden_state") if value.get(name) is not None]
        for name in (*first, *(name for name in value if name not in first)):
            yield from tensors_of(value[name])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)


def _relative_error(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    both = a.isfinite() & b.isfinite()
    if not bool((a.isfinite() == b.isfinite()).all()):
        return float("inf")
    scale = b[both].abs().max() if bool(both.any()) else b.new_ones(())
    difference = (a[both] - b[both]).abs().max() if bool(both.any()) else b.new_zeros(())
    return float(difference / scale.clamp_min(1e-30))


def _counted(reasons: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for reason in reasons:
        key = _shortened(reason)
        counts[key] = counts.get(key, 0) + 1
    return dict(sorted(counts.items()))


def _shortened(text: str, size: int = 500) -> str:
    text = " ".join(text.split())
    # Layers and places of one kind count as one.
    text = re.sub(r"\b\d+(?=\.)", "*", text)
    return text if len(text) <= size else f"{text[: size - 1]}…"


def _listed(items: Iterable[str], shown: int = 3) -> str:
    items = list(items)
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return ", ".join(items[:shown]) + more


_STAGES: Final = (_swap, _same_kind, _mask, _train, _fold, _save)
"""Steps of each architecture, in this order."""
