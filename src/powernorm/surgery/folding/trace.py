"""The graphs of a model's evaluation, with the norms that may fold as separate nodes.

A static norm is one node. A per-token norm is two: its statistic, which is opaque, and its weight
and bias, which are an affine map per feature like a static norm.

In-place operators around a norm are recorded: a norm writes a new tensor, but a folded norm
returns its input itself, so an in-place operator on its output would change its input too,
and vice versa.
"""

from __future__ import annotations

import io
import operator
import sys
import warnings
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize, prune

from powernorm.errors import InputError
from powernorm.inspection.examples import Examples, kept_buffers, tensors_in
from powernorm.inspection.modules import ReplacedForward
from powernorm.norms import current_padding_mask
from powernorm.surgery.changes import Changes, tensors_of
from powernorm.surgery.folding.axes import operator_name

_LIBRARY: Final = torch.library.Library("powernorm_surgery", "DEF")
for _name, _arguments in (("marked_norm", "int index, bool masked"), ("statistic", "int index")):
    _LIBRARY.define(f"{_name}(Tensor x, {_arguments}) -> Tensor")
    torch.library.register_fake(
        f"powernorm_surgery::{_name}", lambda x, *_: torch.empty_like(x), lib=_LIBRARY
    )

MARK: Final = torch.ops.powernorm_surgery.marked_norm.default
"""Operator for a norm in the graph: (x, index of the norm, whether a padding mask was given)."""

STATISTIC: Final = torch.ops.powernorm_surgery.statistic.default
"""Operator for a per-token norm before its weight and bias: (x, the norm's index)."""

_ROOT: Final = "model"


@dataclass(frozen=True)
class TracedNorm:
    """A call of a marked norm in the graph."""

    x: fx.Node
    index: int
    is_masked: bool


def mark_of(node: fx.Node) -> TracedNorm | None:
    """Return the arguments of a marked norm's call, None for every other node."""
    if node.target is not MARK:
        return None
    x, index, is_masked = node.args
    assert isinstance(x, fx.Node)
    assert isinstance(index, int)
    return TracedNorm(x, index, bool(is_masked))


def statistic_of(node: fx.Node) -> int | None:
    """Return the index of the norm whose statistic a node is, None for every other node."""
    if node.target is not STATISTIC:
        return None
    index = node.args[1]
    assert isinstance(index, int)
    return index


@dataclass(frozen=True)
class Effects:
    """Effects of a model that the graphs of its runs do not show.

    Args:
        written: names of the parameters and buffers that its forward writes, in place or by
            putting another tensor there; they are not constants.
        read: the attribute of a norm that other modules read, by the norm's name. Mamba converts
            its stream to the type of `norm.weight`, and would fail without the norm.
    """

    written: frozenset[str] = frozenset()
    read: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """Runs of a model, each as a functional graph of torch's operators."""

    graphs: tuple[fx.Graph, ...]
    tensors: Mapping[fx.Node, str]
    """Names of the model's parameters and persistent buffers by the graphs' inputs."""
    inplace_neighbors: Mapping[int, str]
    """In-place operator that would write through a norm, once folded, to another value, by norm."""
    adapters: Collection[str] = ()
    """Names of the modules that PEFT put around others."""
    computed: Mapping[str, str] = field(default_factory=dict)
    """Fix for each module whose weights are computed at each call, by name."""
    effects: Effects = field(default_factory=Effects)

    def nodes(self) -> Iterator[fx.Node]:
        """Yield the nodes of all graphs, in order."""
        return chain.from_iterable(graph.nodes for graph in self.graphs)

    def tensor_of(self, node: fx.Node) -> str | None:
        """Return the name of the constant parameter or buffer that a node is, else None."""
        return None if self.written_at(node) else self.tensors.get(node)

    def written_at(self, node: fx.Node) -> str:
        """Return the name of the parameter or buffer that a node is if it is written, else ""."""
        name = self.tensors.get(node, "")
        return name if name in self.effects.written else ""

    def adapter_of(self, node: fx.Node) -> str:
        """Return the name of the adapter that a node was called in, "" if there is none."""
        if not self.adapters:
            return ""
        paths = (_strip(name) for name, _ in _callers(node))
        return next((path for path in paths if path in self.adapters), "")


def _callers(node: fx.Node) -> list[tuple[str, object]]:
    """Return name and class of the modules that a node was called in, the innermost last."""
    return list((node.meta.get("nn_module_stack") or {}).values())


def path_of(node: fx.Node) -> str:
    """Return the name of the module that a node was called in, `""` for the model itself."""
    callers = _callers(node)
    return _strip(callers[-1][0]) if callers else ""


def is_of_torch(node: fx.Node) -> bool:
    """Return whether a node was called in a module of torch itself, which holds its numbers."""
    callers = _callers(node)
    return bool(callers) and str(callers[-1][1]).startswith("torch.nn.modules.")


def describe(node: fx.Node) -> str:
    """Return an operator and the module that calls it, for the user."""
    path, note = path_of(node), str(node.meta.get("note", ""))
    if statistic_of(node) is not None:
        return f"the statistic of {path}{note}"
    return operator_name(node) + (f" in {path}" if path else "") + note


def adapter_reason(name: str) -> str:
    """Return why norms next to an adapter of PEFT do not fold."""
    return (
        f"{name!r} is an adapter of PEFT, and merging or disabling it later would be wrong with "
        "folded weights: merge it first, model = model.merge_and_unload()"
    )


def trace(model: nn.Module, runs: Sequence[Trace], effects: Effects) -> Trace:
    """Combine several runs of a model.

    Args:
        model: model in evaluation mode.
        runs: runs of the model.
        effects: its effects besides its output.
    """
    tensors = {node: name for one in runs for node, name in one.tensors.items()}
    neighbors = dict(ChainMap(*(dict(one.inplace_neighbors) for one in runs)))
    graphs = tuple(graph for one in runs for graph in one.graphs)
    return Trace(graphs, tensors, neighbors, _adapters_in(model), _computed_in(model), effects)


def _adapters_in(model: nn.Module) -> frozenset[str]:
    """Return the names of the modules that PEFT put around others (LoRA and its relatives)."""
    return frozenset(
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if {"base_layer", "original_module"} & module._modules.keys()
        and any(cls.__module__.partition(".")[0] == "peft" for cls in type(module).__mro__)
    )


def _computed_in(model: nn.Module) -> dict[str, str]:
    """Return, by module, the call that makes its computed weights plain parameters."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if parametrize.is_parametrized(module):
            weight = next(iter(module.parametrizations))
            found[name] = f"parametrize.remove_parametrizations(module, {weight!r})"
        for hook in module._forward_pre_hooks.values():
            kind, weight = type(hook).__name__, getattr(hook, "name", "weight")
            if isinstance(hook, prune.BasePruningMethod):
                names = [one for one, _ in module.named_parameters(recurse=False)]
                weight = next(one for one in names if one.endswith("_orig"))
                found[name] = f"prune.remove(module, {weight.removesuffix('_orig')!r})"
            elif kind in ("WeightNorm", "SpectralNorm"):
                norm = "weight_norm" if kind == "WeightNorm" else "spectral_norm"
                found[name] = f"remove_{norm}(module, {weight!r})"
    return found


def run(model: nn.Module, norms: Mapping[nn.Module, tuple[int, bool]], example: Examples) -> Trace:
    """Run a model in evaluation and record its operators.

    Args:
        model: model in evaluation mode; it is unchanged afterwards.
        norms: the norms to mark, with their index, and whether the mark comes after their
            statistic.
        example: the call.

    Raises:
        InputError: torch.export cannot trace the model.
    """
    note = example.note
    recorder = _Recorder(model)
    with torch.no_grad(), quiet_export():
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        marks = [_Mark(norm, *index) for norm, index in norms.items()]
        try:
            program = torch.export.export(
                recorder, (example.args, dict(example.kwargs)), strict=False
            )
            inplace_neighbors = _inplace_neighbors(program.graph)
            # Removes in-place operators, so that each node is a value, and dropout.
            program = program.run_decompositions({})
        except Exception as error:
            raise InputError(
                f"{type(model).__name__} cannot be planned: torch.export cannot trace it on the "
                f"example inputs{note}: {reason_of(error)}; fold the parts that it can trace, each "
                "on inputs of its own (powernorm.fold(model.encoder, …))"
            ) from error
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
            for mark in marks:
                mark.remove()
    signature = program.graph_signature
    persistent = {
        name: target
        for name, target in signature.inputs_to_buffers.items()
        if target not in signature.non_persistent_buffers
    }
    named = {**signature.inputs_to_parameters, **persistent}
    for node in program.graph.nodes:
        node.meta["note"] = note  # for the description of an operator
    known = tensors_of(model)  # a quantized weight is traced as the tensors inside
    tensors = {
        node: name
        for node in program.graph.nodes
        if node.op == "placeholder" and (name := _strip(named.get(node.name, ""))) in known
    }
    return Trace((program.graph,), tensors, inplace_neighbors)


def effects_of(
    model: nn.Module, norms: Mapping[str, nn.Module], examples: Sequence[Examples]
) -> Effects:
    """Run a model once per example, with each norm behind a stand-in that passes calls on.

    Args:
        model: in evaluation mode; it is unchanged afterwards.
        norms: the norms that may fold, by name.
        examples: calls.

    Raises:
        InputError: the model fails on an example.
    """
    stand_ins = {norm: _StandIn(norm).eval() for norm in norms.values()}
    written: set[str] = set()
    for position, example in enumerate(examples):
        changes = Changes()
        note_writes = _watch_writes(model, written)
        for parent in list(model.modules()):
            for attribute, child in list(parent._modules.items()):
                if child in stand_ins:
                    changes.set_module(parent, attribute, stand_ins[child])
        hook = model.register_forward_hook(note_writes)
        try:
            # Buffers of the norms are not among the model's while a stand-in replaces them.
            with kept_buffers(nn.ModuleList(stand_ins)):
                example.call(model)
        except Exception:  # if the stand-ins cause this, it shows when the folded model runs
            changes.undo()
            _run_alone(model, example, position)
        else:
            changes.undo()
        finally:
            hook.remove()
    read = {name: stand_ins[norm].__dict__["read"] for name, norm in norms.items()}
    return Effects(frozenset(written), {name: found[0] for name, found in read.items() if found})


def _run_alone(model: nn.Module, example: Examples, position: int) -> None:
    name = f"more_examples[{position - 1}]" if position else "the example inputs"
    try:
        example.call(model)
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} fails on {name}: {type(error).__name__}: {error}; give "
            "inputs that it takes"
        ) from error


def _watch_writes(model: nn.Module, written: set[str]) -> Callable[..., None]:
    """Return a forward hook that adds the names of tensors written since this call."""
    slots = [
        (f"{path}.".lstrip("."), slots)
        for path, module in model.named_modules(remove_duplicate=False)
        for slots in (module._parameters, module._buffers)
    ]

    def versions() -> dict[str, tuple[Tensor, float]]:
        return {
            f"{prefix}{name}": (tensor, _version(tensor))
            for prefix, tensors in slots
            for name, tensor in tensors.items()
            if tensor is not None
        }

    before = versions()

    def note(*_: object) -> None:
        for name, (tensor, version) in versions().items():
            known = before.get(name)
            if known is None or known[0] is not tensor or known[1] != version:
                written.add(name)

    return note


def _version(tensor: Tensor) -> float:
    # Tensors made in inference mode have none.
    return float(tensor.double().sum()) if tensor.is_inference() else tensor._version


class _StandIn(nn.Module):
    """A module that passes calls on to a norm, and records which of its attributes are read."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.__dict__["norm"] = norm  # not a child while the stand-in replaces it
        self.__dict__["read"] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the norm's output."""
        return self.__dict__["norm"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Record that an attribute of the norm is read."""
        value = getattr(self.__dict__["norm"], name)
        self.__dict__["read"].append(name)
        return value


@contextmanager
def quiet_export() -> Iterator[None]:
    """Silence torch.export, which warns and, before some errors, prints its graph to stderr."""
    printed = io.StringIO()
    with warnings.catch_warnings(), redirect_stderr(printed):
        warnings.simplefilter("ignore")
        yield
    sys.stderr.write(printed.getvalue())  # the model's own


def reason_of(error: BaseException) -> str:
    """Return the kind of an error of torch.export, its first line and those on sizes below it."""
    first, *more = str(error).strip().splitlines() or [""]
    sizes = takewhile(lambda line: line.startswith(("  ", "Suggested fixes:")), more)
    return "\n".join([f"{type(error).__name__}: {first}".removesuffix(": "), *sizes])


def _strip(name: str) -> str:
    return name.removeprefix(_ROOT).removeprefix(".")


class _Recorder(nn.Module):
    """Wrapper that returns the tensors in the model's output and state, for any container."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        before = dict(self.model.named_buffers())
        found = list(tensors_in(self.model(*args, **kwargs)))
        # Buffers that were replaced; those written in place are outputs anyway.
        new = (one for name, one in self.model.named_buffers() if one is not before.get(name))
        return (*found, *new)


class _Mark(ReplacedForward):
    """Forward of a norm that marks its position in the graph, as one operator or two."""

    def __init__(self, norm: nn.Module, index: int, has_statistic: bool) -> None:
        super().__init__(norm)
        self.index = index
        self.has_statistic = has_statistic

    def __call__(
        self,
        x: Tensor | None = None,
        padding_mask: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        input: Tensor | None = None,  # noqa: A002  (torch's name for it)
        **named: Tensor,  # names in other libraries, such as hidden_states
    ) -> Tensor | tuple[Tensor, Tensor]:
        x = next(iter(named.values()), input) if x is None else x
        assert x is not None
        masked = padding_mask is not None or current_padding_mask() is not None
        total = x if residual is None else x + residual
        inner = STATISTIC(total, self.index) if self.has_statistic else total
        marked: Tensor = MARK(inner, self.index, masked)
        return marked if residual is None else (marked, total)


def _inplace_neighbors(graph: fx.Graph) -> dict[int, str]:
    """Return the norms that must not return their input itself, with the in-place operator.

    Args:
        graph: as traced, before in-place operators are made functional.
    """
    memory = _Memory(graph)
    found: dict[int, str] = {}
    for order, node in enumerate(graph.nodes):
        for written in _written(node):
            for index in memory.norms_in_the_way(written, order):
                found.setdefault(index, operator_name(node))
    return found


class _Memory:
    """Which nodes share memory before folding, and which norms would join them."""

    def __init__(self, graph: fx.Graph) -> None:
        self.block: dict[fx.Node, fx.Node] = {}
        """First node in the same memory, by node."""
        self.last_use: dict[fx.Node, int] = {}
        self.norms: list[tuple[fx.Node, fx.Node, int, int]] = []
        """Blocks before and after each norm, its index and its position in the graph."""
        for order, node in enumerate(graph.nodes):
            mark = mark_of(node)
            aliased = None if mark is not None else _aliased(node)
            self.block[node] = node if aliased is None else self.block[aliased]
            for used in node.all_input_nodes:
                self.last_use[self.block[used]] = order
            # A statistic writes a new tensor, whatever is folded.
            if mark is not None and statistic_of(mark.x) is None:
                self.norms.append((self.block[mark.x], node, mark.index, order))

    def norms_in_the_way(self, written: fx.Node, order: int) -> Iterator[int]:
        """Yield norms that keep a write from memory that is read later or belongs to the user."""
        changed = self.block[written]
        norms = [norm for norm in self.norms if norm[3] < order]
        joined = [changed]  # blocks that share memory with it once all norms are folded
        for here in joined:
            for before, behind, *_ in norms:
                if here in (before, behind):
                    joined += [one for one in (before, behind) if one not in joined]
        for block in joined[1:]:
            if block.op == "placeholder" or self.last_use.get(block, -1) > order:
                yield from (
                    index
                    for before, behind, index, _ in norms
                    if changed in (before, behind) or block in (before, behind)
                )


def _aliased(node: fx.Node) -> fx.Node | None:
    """Return the operand whose memory the output may share, or None."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target is operator.getitem or operator_name(node) in ("dropout", "feature_dropout"):
        return node.args[0]
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    returned = [value.alias_info for value in node.target._schema.returns]
    return node.args[0] if any(info is not None for info in returned) else None


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operands that an operator changes in place."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    for position, argument in enumerate(node.target._schema.arguments):
        info = argument.alias_info
        if info is None or not info.is_write:
            continue
        value = node.args[position] if position < len(node.args) else None
        value = node.kwargs.get(argument.name, value)
        if isinstance(value, fx.Node):
            yield value
