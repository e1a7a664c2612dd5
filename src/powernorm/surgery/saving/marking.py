"""The record of a swapped Hugging Face model in its configuration.

The configuration becomes the `config.json` of all that Hugging Face's libraries write, so that
`powernorm.load` knows what was swapped. No forward reads the key. What is written is read off the
model at that moment: `to_dict` of a configuration copies its values, and a copy of the mark is the
record.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

from torch import nn

from powernorm.errors import InputError
from powernorm.surgery.saving.records import KEY, ModelRecord

_CONFIGURATION: Final = "PreTrainedConfig"
"""Class of the configurations of transformers."""
_MODEL: Final = "PreTrainedModel"
"""Class of its models."""


def mark(model: nn.Module) -> None:
    """Mark the configurations of a model that was changed, or take the mark from one that was not.

    Args:
        model: of Hugging Face, a model around it, or a part of it that has its configuration.
    """
    for owner in _pretrained_in(model) or [model]:
        config = getattr(owner, "config", None)
        if not any(cls.__name__ == _CONFIGURATION for cls in type(config).__mro__):
            continue
        known = vars(config).pop(KEY, None)
        owners = [*known.owners(), owner] if isinstance(known, RecordMark) else [owner]
        changed = [one for one in dict.fromkeys(owners) if _is_changed(one)]
        if changed:
            vars(config)[KEY] = RecordMark(changed)


def is_pretrained(model: nn.Module) -> bool:
    """Return whether a model is one of transformers' own kind."""
    return any(
        cls.__name__ == _MODEL and cls.__module__.startswith("transformers.")
        for cls in type(model).__mro__
    )


class RecordMark:
    """What stands in a configuration in place of the record.

    Args:
        owners: the modules that were changed.
    """

    def __init__(self, owners: list[nn.Module]) -> None:
        # A configuration may outlive its model.
        self._owners = [weakref.ref(owner) for owner in owners]

    def owners(self) -> list[nn.Module]:
        """Return the modules that are still there, without those inside another one."""
        alive = [owner for owner in (ref() for ref in self._owners) if owner is not None]
        return [
            owner
            for owner in alive
            if not any(owner is part for one in alive if one is not owner for part in one.modules())
        ]

    def written(self) -> dict[str, Any]:
        """Return the record as JSON values; of several modules the others are in the first."""
        try:
            records = [ModelRecord.of(owner).to_dict() for owner in self.owners()]
        except InputError as error:
            # Read, it says that it is no record, and why.
            return {"error": str(error)}
        first, *others = records or [{}]
        return {**first, "others": others} if others else first

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordMark | dict[str, Any]:
        """Return the record; in a copy of the whole model, a mark of the copy."""
        owners = self.owners()
        copies = [one for one in (memo.get(id(owner)) for owner in owners) if one is not None]
        return RecordMark(copies) if owners and len(copies) == len(owners) else self.written()

    def __getstate__(self) -> list[nn.Module]:
        return self.owners()

    def __setstate__(self, owners: list[nn.Module]) -> None:
        self._owners = [weakref.ref(owner) for owner in owners]

    def __repr__(self) -> str:
        return repr(self.written())


def _is_changed(model: nn.Module) -> bool:
    try:
        return not ModelRecord.of(model).is_empty
    except InputError:
        return True  # it has a norm without a name


def _pretrained_in(model: nn.Module) -> list[nn.Module]:
    """Return the outermost models of transformers in a model, which may be one itself."""
    if is_pretrained(model):
        return [model]
    return [found for child in model.children() for found in _pretrained_in(child)]
