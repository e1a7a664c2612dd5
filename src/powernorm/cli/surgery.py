"""`powernorm swap` and `powernorm fold`: what they would do, and a folded checkpoint."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast, get_args

from torch import nn

from powernorm.errors import InputError
from powernorm.inspection.selection import Role, Side
from powernorm.integrations.pretrained import build_from_config, is_configuration
from powernorm.surgery import Where, plan_fold, plan_swap
from powernorm.surgery.fold_solver import Tied
from powernorm.training.overrides import parse_options

_FOLDED: Final = (".safetensors", ".pt")


def swap_table(source: str, to: str, where: Where | None, options: Sequence[str]) -> str:
    """The plan of a swap as text.

    Args:
        source: `module:name` of a model or of a function that builds one, or a Hugging Face
            config.json or the folder that holds it.
        to: short name of the norm.
        where: which norms.
        options: of the norm, each `key=value`.

    Raises:
        InputError: a source that gives no model, or a plan that cannot be made.
    """
    return str(plan_swap(build_model(source), to, where, **parse_options(options)))


def choose(
    names: Sequence[str] | None, roles: Sequence[str] | None, side: str | None, lowest: int | None
) -> Where | None:
    """The selection that the options describe, None without any.

    Raises:
        InputError: a role, side or number that does not exist.
    """
    if names is None and roles is None and side is None and lowest is None:
        return None
    return Where(
        names, roles=cast(Sequence[Role] | None, roles), side=cast(Side | None, side), lowest=lowest
    )


def fold_run(path: Path, out: Path | None, *, verify: bool, tied: str) -> str:
    """Fold the model of a run; the table, the errors and where it was written, as text.

    Args:
        path: a run's folder or checkpoint.
        out: the file to be written, `.safetensors` or `.pt`; None only shows the table.
        verify: compare with the original first.
        tied: see `powernorm.plan_fold`.

    Raises:
        InputError: no such run, it cannot be folded, or the file's ending is none of those known.
    """
    if tied not in get_args(Tied):
        raise InputError(f"tied is {tied!r}, expected {' or '.join(get_args(Tied))}")
    # An unknown ending would be written as torch's format, whatever the name promises.
    if out is not None and out.suffix.lower() not in _FOLDED:
        raise InputError(
            f"--out {out}: expected a name that ends in {' or '.join(_FOLDED)}, such as "
            "folded.safetensors"
        )
    from powernorm.training.run_folders import read_json
    from powernorm.training.trained_models import load_trained
    from powernorm.training.vocabulary_files import SUBWORDS, VOCABULARY_FILE

    trained = load_trained(path)
    plan = plan_fold(trained.model, trained.example_inputs(), tied=cast(Tied, tied))
    if out is None:
        return f"{plan}\nnothing was written: give --out FILE"
    report = plan.apply(verify=verify)
    # With its subwords a folded model translates wherever it is taken.
    subwords = (path if path.is_dir() else path.parent.parent) / VOCABULARY_FILE
    own = {SUBWORDS: read_json(subwords)} if subwords.is_file() else {}
    report.save(out, {**trained.settings, **own})
    return f"{report}\nfolded model: {out}"


def build_model(source: str) -> nn.Module:
    """A model to look at; its weights do not matter.

    Raises:
        InputError: the source gives none.
    """
    if is_configuration(Path(source)):
        return build_from_config(Path(source))
    module_name, colon, name = source.partition(":")
    if not colon or not name:
        raise InputError(
            f"{source!r} is neither module:name (a model, or a function that builds one) nor a "
            "Hugging Face config.json"
        )
    # As `python -m` does: the user's own modules stand in the working directory.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever a user's module raises
        raise InputError(f"{source!r} cannot be loaded: {error}") from error
    model = found if isinstance(found, nn.Module) else _called(found, source)
    if not isinstance(model, nn.Module):
        raise InputError(f"{source!r} gives a {type(model).__name__}, expected a torch.nn.Module")
    return model


def _called(build: Any, source: str) -> object:
    if not callable(build):
        raise InputError(f"{source!r} is a {type(build).__name__}, expected a model or a function")
    try:
        return build()
    except Exception as error:
        raise InputError(
            f"{source}() failed ({type(error).__name__}: {error}): name a function without "
            "arguments that builds the model"
        ) from error
