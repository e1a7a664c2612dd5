"""`powernorm swap` and `fold`: surgery of existing models."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from powernorm.cli.options import TrustCode, Wide, text_width
from powernorm.errors import InputError, printable

if TYPE_CHECKING:
    from torch import nn

    from powernorm.inspection.selection import Role, Side
    from powernorm.integrations.model_sources import ModelSource
    from powernorm.surgery import FoldReport, Where
    from powernorm.surgery.folding.api import Keep
    from powernorm.surgery.folding.solver import Centering, Tied


def swap(
    source: Annotated[
        str,
        typer.Argument(
            help="module:name of a model or of a function that builds one, or a Hugging Face "
            "config.json."
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            metavar="NORM", help="Short name, see `powernorm norms`, or your own as module:Class."
        ),
    ] = "rbn",
    names: Annotated[
        list[str] | None,
        typer.Option("--where", metavar="GLOB", help="Names of norms; can be given several times."),
    ] = None,
    role: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE", help="attention, feed-forward, final, embedding or other."),
    ] = None,
    side: Annotated[
        str | None,
        typer.Option(metavar="encoder|decoder", help="In a model with both; else the encoder."),
    ] = None,
    lowest: Annotated[
        int | None, typer.Option(metavar="K", help="Only norms inside the K lowest layers.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Option of the norm, e.g. momentum=0.05."),
    ] = None,
    wide: Wide = False,
) -> None:
    """Show what powernorm.swap would do to a model: each norm, its replacement, or why it stays.

    Nothing is changed. In Python: powernorm.swap(model, to=…).
    """
    from powernorm.option_values import parse_options
    from powernorm.surgery import plan_swap

    where = _selection(names, role, side, lowest)
    options = parse_options(assignments or [])
    plan = plan_swap(_built_model(source), to, where, **options)
    typer.echo(printable(plan.to_text(text_width(wide=wide))))


def _selection(
    names: Sequence[str] | None, roles: Sequence[str] | None, side: str | None, lowest: int | None
) -> "Where | None":
    """Return the selection of the options, None without any."""
    from powernorm.surgery import Where

    if names is None and roles is None and side is None and lowest is None:
        return None
    return Where(
        names,
        roles=cast("Sequence[Role] | None", roles),
        side=cast("Side | None", side),
        lowest=lowest,
    )


def _built_model(source: str) -> "nn.Module":
    """Build a model to inspect; its weights do not matter."""
    from torch import nn

    from powernorm.integrations.model_sources import result_of
    from powernorm.integrations.pretrained import build_from_config, is_configuration

    if is_configuration(Path(source)):
        return build_from_config(Path(source))
    if not all(source.partition(":")):
        raise InputError(
            f"{source!r} is neither module:name (a model, or a function that builds one) nor a "
            "Hugging Face config.json"
        )
    model = result_of(source)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{source!r} is a {type(model).__name__}, expected a torch.nn.Module, or a function "
            "that builds one"
        )
    return model


def fold(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="A run's folder (the weights that were scored), one of its checkpoints, a Hugging "
            "Face model's folder, or module:name of (model, batches)."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write the folded model into this folder, for powernorm.load; else only show the "
            "table.",
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify/--no-verify", help="Compare with the original model first."),
    ] = True,
    tied: Annotated[
        str | None,
        typer.Option(
            metavar="untie|keep",
            help="If embedding and head share one table: untie gives the head its own, keep leaves "
            "the norm in front of the head. Default: untie; keep with --keep statistics.",
        ),
    ] = None,
    keep: Annotated[
        str,
        typer.Option(
            metavar="nothing|statistics",
            help="nothing: static norms fold away; statistics: weights and biases of LayerNorm and "
            "RMSNorm fold too, their statistics stay.",
        ),
    ] = "nothing",
    centering: Annotated[
        str,
        typer.Option(
            metavar="keep|weights",
            help="weights, with --keep statistics: LayerNorms become RMSNorms if the layers that "
            "write to their stream can be centered.",
        ),
    ] = "keep",
    flash_norm: Annotated[
        bool,
        typer.Option(
            "--flash-norm",
            help="With --keep statistics, for a Hugging Face folder: declare in config.json that "
            "the weights of RMSNorms are 1, by the keys that loaders read.",
        ),
    ] = False,
    wide: Wide = False,
    trust_code: TrustCode = False,
) -> None:
    """Fold the norms of a trained model into its weights, so that none is left at inference.

    With --keep statistics only the weights and biases of LayerNorm and RMSNorm fold, and the model
    keeps its class: the result of a Hugging Face folder can be loaded by from_pretrained.
    """
    from powernorm.integrations.model_sources import open_source
    from powernorm.norms import named_layers
    from powernorm.surgery import plan_fold
    from powernorm.surgery.folding.api import check_options
    from powernorm.surgery.saving.storage import check_target

    named_layers.trust_code(trust_code)
    check_options(keep, centering, tied)
    if out is not None:
        check_target(out)
    source = open_source(str(checkpoint))
    if flash_norm and (source.kind != "pretrained" or keep != "statistics"):
        raise InputError(
            "--flash-norm needs a Hugging Face folder and --keep statistics: leave it out, or "
            "give both"
        )
    plan = plan_fold(
        source.model,
        source.example_inputs,
        keep=cast("Keep", keep),
        centering=cast("Centering", centering),
        tied=cast("Tied | None", tied),
    )
    width = text_width(wide=wide)
    if out is None:
        typer.echo(f"{printable(plan.to_text(width))}\nnothing was written: give --out FOLDER")
        return
    report = plan.apply(verify=verify)
    loader = _write(source, report, out, flash_norm=flash_norm)
    typer.echo(f"{printable(report.to_text(width))}\nfolded model: {out}, for {loader}")


def _write(source: "ModelSource", report: "FoldReport", out: Path, *, flash_norm: bool) -> str:
    """Write a folded model, and return how to load it."""
    from powernorm.integrations.folded_pretrained import write_folded
    from powernorm.integrations.saved_models import save

    path = Path(source.name)
    if source.kind == "pretrained":
        return write_folded(report, path, out, flash_norm=flash_norm)
    settings = source.settings
    save(report.model, out, config=settings)
    return "powernorm.load"
