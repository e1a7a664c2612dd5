"""A model as a function of tensors, as a file of ONNX is one, and how well two of them agree."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from powernorm.errors import InputError
from powernorm.inspection.examples import Examples, as_call
from powernorm.lab.model_outputs import answer_in

_SMALLEST: Final = 1e-300
"""Instead of outputs that are all 0."""


@dataclass(frozen=True)
class Agreement:
    """Outputs of a quantized file beside those of torch in float32.

    Attributes:
        error: root mean square of the differences over that of the outputs.
        cosine: mean over all vectors of outputs; NaN where the quantized file puts out NaN.
        same_largest: part of the vectors whose largest entry is at the same place: for logits, how
            often the same is predicted.
        vectors: number of them, without padding.
        inputs: `random`, or what they are batches of.
    """

    error: float
    cosine: float
    same_largest: float
    vectors: int
    inputs: str


class TensorCall(nn.Module):
    """A model as a function of the tensors in its inputs, which gives the tensors in its outputs.

    Args:
        model: in evaluation mode.
        inputs: an example: a tensor, a tuple of positional arguments or a dict of keyword ones.
        answer_only: of a Hugging Face model, give its logits or last hidden states alone.
    """

    def __init__(self, model: nn.Module, inputs: object, *, answer_only: bool = False) -> None:
        super().__init__()
        self.model = model
        self._answer_only = answer_only
        call = as_call(inputs, model)
        self._leaves, self._spec = _pytree.tree_flatten((call.args, dict(call.kwargs)))
        # A view would bring its base into what torch.export asserts of the inputs.
        self.example = [leaf.clone() for leaf in self._leaves if isinstance(leaf, Tensor)]
        self.names = [*_names(model, call)]
        self.eval()

    def forward(self, *tensors: Tensor) -> Any:
        """Return what the model does, from the tensors of its inputs."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        args, kwargs = _pytree.tree_unflatten(leaves, self._spec)
        outputs = self.model(*args, **kwargs)
        answer = answer_in(outputs) if self._answer_only else None
        return outputs if answer is None else answer

    def tensors_of(self, inputs: object) -> list[Tensor]:
        """Return the tensors in inputs of the example's form, in its order."""
        call = as_call(inputs, self.model)
        named = dict(call.kwargs)
        known = _pytree.tree_unflatten(self._leaves, self._spec)[1]
        ordered = {name: named.pop(name) for name in known if name in named} | named
        leaves, spec = _pytree.tree_flatten((call.args, ordered))
        if spec != self._spec:
            raise InputError(
                f"a batch has {_form(spec)}, where the first one has {_form(self._spec)}: all need "
                "the same arguments"
            )
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def runnable(
        self, inputs: Sequence[Sequence[Tensor]], *, is_fixed: bool
    ) -> list[Sequence[Tensor]]:
        """Return the inputs that a file takes: where sizes are fixed, those of the example's."""
        if not is_fixed:
            return list(inputs)
        sizes = [tensor.shape for tensor in self.example]
        found = [one for one in inputs if [tensor.shape for tensor in one] == sizes]
        return found if found else [self.example]

    def outputs(self, *tensors: Tensor) -> list[Tensor]:
        """Return the tensors in the outputs, without gradients.

        Raises:
            InputError: the model fails.
        """
        try:
            with torch.no_grad():
                found = self(*(tensor.clone() for tensor in tensors))
        except Exception as error:  # a model may raise anything
            sizes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise InputError(
                f"{type(self.model).__name__} fails on inputs of sizes {sizes}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return [leaf for leaf in _pytree.tree_leaves(found) if isinstance(leaf, Tensor)]

    def first(self, *tensors: Tensor) -> Tensor:
        """Return the first tensor in the outputs: for most models the logits."""
        return self.outputs(*tensors)[0]

    def padding(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Return which positions are padding, as the inputs say; None where they do not."""
        named = dict(zip(self.names, tensors, strict=True))
        if "attention_mask" in named:
            return named["attention_mask"] == 0
        return named.get("padding_mask")


def agreement_of(
    run: Callable[..., Tensor],
    call: TensorCall,
    examples: Sequence[Sequence[Tensor]],
    origin: str,
) -> Agreement:
    """Return how well other outputs agree with those of a model.

    Args:
        run: gives the other outputs from the tensors of the inputs.
        call: the model.
        examples: tensors of inputs.
        origin: what they are.
    """
    square = wanted_square = cosines = same = 0.0
    vectors = 0
    for tensors in examples:
        wanted, found = call.first(*tensors).double(), run(*tensors).double()
        padding = call.padding(tensors)
        if padding is not None and padding.shape == wanted.shape[:-1]:
            wanted, found = wanted[~padding], found[~padding]
        # What both rule out, as masked logits do, agrees.
        same_infinite = wanted.isinf() & (wanted == found)
        wanted, found = (_vectors(one.masked_fill(same_infinite, 0)) for one in (wanted, found))
        square += float((found - wanted).square().sum())
        wanted_square += float(wanted.square().sum())
        cosines += float(torch.cosine_similarity(found, wanted, dim=-1).sum())
        same += int((found.argmax(-1) == wanted.argmax(-1)).sum())
        vectors += len(wanted)
    return Agreement(
        error=(square / max(wanted_square, _SMALLEST)) ** 0.5,
        cosine=cosines / max(vectors, 1),
        same_largest=same / max(vectors, 1),
        vectors=vectors,
        inputs=origin,
    )


def _vectors(outputs: Tensor) -> Tensor:
    """Return outputs as vectors, (number, C); of one number for each row these are one vector."""
    return outputs.reshape(-1, outputs.shape[-1] if outputs.ndim > 1 else max(outputs.numel(), 1))


def _form(spec: _pytree.TreeSpec) -> str:
    """Return the arguments of a call in words."""
    args, kwargs = _pytree.tree_unflatten(range(spec.num_leaves), spec)
    return ", ".join([f"{len(args)} positional arguments"] * bool(args) + list(kwargs)) or "none"


def _names(model: nn.Module, call: Examples) -> Iterator[str]:
    """Yield a name for each tensor in the arguments of a call: that of its argument."""
    parameters = list(inspect.signature(model.forward).parameters)
    positional = [*parameters, *(f"input_{n}" for n in range(len(parameters), len(call.args)))]
    for name, value in (*zip(positional, call.args, strict=False), *call.kwargs.items()):
        found = sum(isinstance(leaf, Tensor) for leaf in _pytree.tree_leaves(value))
        yield from [name] if found == 1 else [f"{name}_{number}" for number in range(found)]
