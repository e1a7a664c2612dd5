"""`powernorm swap`, `fold` and `diagnose`: surgery and diagnosis of models that exist."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast, get_args

import typer

from powernorm.cli.launching import INTERRUPTED
from powernorm.cli.progress import progress_bar
from powernorm.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from powernorm.diagnosis import Diagnosis
    from powernorm.inspection.selection import Role, Side
    from powernorm.surgery import Where
    from powernorm.surgery.fold_solver import Tied

_PAGE: Final = "diagnosis.html"
_PASSES: Final = 2
"""Over the batches."""
_TEXT: Final = "rt"
"""For a pretrained model: sentences, documents of a length that a batch is made of."""


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
            metavar="NORM", help="Short name, see `powernorm norms`, or module:Class of your own."
        ),
    ] = "rbn",
    names: Annotated[
        list[str] | None,
        typer.Option("--where", metavar="GLOB", help="Names of norms; may be given several times."),
    ] = None,
    role: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE", help="attention, feed-forward, final, embedding or other."),
    ] = None,
    side: Annotated[
        str | None,
        typer.Option(metavar="encoder|decoder", help="Of a model with both; else the encoder."),
    ] = None,
    lowest: Annotated[
        int | None, typer.Option(metavar="K", help="Only norms inside the K lowest layers.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Option of the norm, e.g. momentum=0.05."),
    ] = None,
) -> None:
    """Show what powernorm.swap would do to a model: each norm, what becomes of it, and why not.

    Nothing is changed; in Python: powernorm.swap(model, to=…).
    """
    from powernorm.lab.settings.overrides import parse_options
    from powernorm.surgery import plan_swap

    where = _selection(names, role, side, lowest)
    options = parse_options(assignments or [])
    typer.echo(str(plan_swap(_built_model(source), to, where, **options)))


def _selection(
    names: Sequence[str] | None, roles: Sequence[str] | None, side: str | None, lowest: int | None
) -> "Where | None":
    """The selection that the options describe, None without any."""
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
    """A model to look at; its weights do not matter."""
    from torch import nn

    from powernorm.integrations.pretrained import build_from_config, is_configuration
    from powernorm.norms.named_layers import imported

    if is_configuration(Path(source)):
        return build_from_config(Path(source))
    if not all(source.partition(":")):
        raise InputError(
            f"{source!r} is neither module:name (a model, or a function that builds one) nor a "
            "Hugging Face config.json"
        )
    found = imported(source)
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


def fold(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="A run's folder (the weights that were scored) or one of its checkpoints."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write the folded model into this folder, for powernorm.load and `powernorm "
            "translate`; else only show the table.",
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify/--no-verify", help="Compare with the original model first."),
    ] = True,
    tied: Annotated[
        str,
        typer.Option(
            metavar="untie|keep",
            help="Where embedding and head are one table: give the head its own, or keep one "
            "multiply-add in front of it.",
        ),
    ] = "untie",
) -> None:
    """Fold the norms of a trained model into its weights, so that none is left at inference."""
    from powernorm.integrations.saved_models import save
    from powernorm.surgery import plan_fold
    from powernorm.surgery.fold_solver import Tied
    from powernorm.surgery.storage import check_folder

    if tied not in get_args(Tied):
        raise InputError(f"tied is {tied!r}, expected {' or '.join(get_args(Tied))}")
    if out is not None:
        check_folder(out)
    from powernorm.lab.own_models import is_own_run, load_own_run
    from powernorm.lab.tasks.trained_models import load_trained

    settings: dict[str, Any] = {}
    if is_own_run(checkpoint):
        own = load_own_run(checkpoint)
        plan = plan_fold(own.model, own.batches[0], tied=cast("Tied", tied))
    else:
        trained = load_trained(checkpoint)
        plan = plan_fold(trained.model, trained.example_inputs(), tied=cast("Tied", tied))
        settings = {**trained.settings, **_own_subwords(checkpoint)}
    if out is None:
        typer.echo(f"{plan}\nnothing was written: give --out FOLDER")
        return
    report = plan.apply(verify=verify)
    save(report.model, out, config=settings)
    typer.echo(f"{report}\nfolded model: {out}")


def _own_subwords(checkpoint: Path) -> dict[str, Any]:
    """Those of a run, with which a folded model translates wherever it is taken."""
    from powernorm.lab.engine.folders import read_json
    from powernorm.lab.tasks.translation.vocabulary_files import SUBWORDS, VOCABULARY_FILE

    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent.parent
    file = folder / VOCABULARY_FILE
    return {SUBWORDS: read_json(file)} if file.is_file() else {}


def diagnose(
    source: Annotated[
        str,
        typer.Argument(
            metavar="model",
            help="A run's folder (the weights that were scored), one of its checkpoints, a folder "
            "with a Hugging Face model, or module:name of (model, batches) or of a function that "
            "returns them.",
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Another text than the run's, as `compare --data`."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page; for a run else RUN/diagnosis.html."),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the table of layers there, too.")
    ] = None,
    batches: Annotated[
        int, typer.Option(min=2, metavar="N", help="Training batches in each pass.")
    ] = 50,
    sequences: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Of a Hugging Face model: rows in a batch (32)."),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Of a Hugging Face model: tokens in a row (128)."),
    ] = None,
) -> None:
    """Say whether batch statistics (would) work in a trained model, layer by layer.

    In Python, for any model: powernorm.diagnose(model, batches).
    """
    from powernorm.integrations.pretrained import is_pretrained

    model = Path(source)
    keeps_it = model.is_dir() and data is None and not is_pretrained(model)
    if keeps_it:
        out = out or model / _PAGE
    for target in (out, csv):
        _check_target(target)
    try:
        with progress_bar() as progress:
            task = progress.add_task("diagnosing", total=_PASSES * batches)
            report = _diagnosis(
                *(model, data, batches, sequences, length),
                lambda done, _: progress.update(task, completed=done),
            )
    except KeyboardInterrupt:
        typer.echo("interrupted: nothing was written", err=True)
        raise typer.Exit(INTERRUPTED) from None
    _print_diagnosis(report, model if keeps_it else None, out, csv)


def _diagnosis(
    path: Path,
    data: str | None,
    num_batches: int,
    sequences: int | None,
    length: int | None,
    on_progress: Callable[[int, int], None],
) -> "Diagnosis":
    """Load a run, one of its checkpoints or a folder in Hugging Face's layout, and look."""
    from powernorm.integrations.pretrained import diagnose_pretrained, is_pretrained
    from powernorm.lab.own_models import diagnose_own, is_own_run, load_own_run, model_by_name

    is_named = ":" in str(path) and not path.exists()
    if is_named or is_own_run(path):
        given = {"--data": data, "--sequences": sequences, "--length": length}
        for option, value in given.items():
            if value is not None:
                raise InputError(f"{path} has batches of its own: leave out {option}")
        own = model_by_name(str(path)) if is_named else load_own_run(path)
        return diagnose_own(own, path.name, num_batches, on_progress)
    if is_pretrained(path):
        from powernorm.lab.data.readers import load_corpus

        return diagnose_pretrained(
            path,
            load_corpus(data or _TEXT).documents["train"],
            num_batches=num_batches,
            batch_size=sequences or 32,
            length=length or 128,
            on_progress=on_progress,
        )
    if sequences is not None or length is not None:
        raise InputError(
            f"{path} is a run, which has batches of its own: leave out --sequences and --length, "
            "which are for a folder with a Hugging Face model"
        )
    from powernorm.lab.tasks.run_diagnosis import diagnose_run

    return diagnose_run(path, data=data, num_batches=num_batches, on_progress=on_progress)


def _print_diagnosis(
    report: "Diagnosis", run: Path | None, out: Path | None, csv: Path | None
) -> None:
    """Print the table and the verdict, and write what is asked for.

    Args:
        report: what was found.
        run: the folder of a run that keeps it; None where nobody does.
        out: the page.
        csv: the table of layers.
    """
    from powernorm.lab.report.diagnosis_page import write_diagnosis_page
    from powernorm.lab.report.diagnosis_words import evaluation_words
    from powernorm.runs import DIAGNOSIS_FILE

    typer.echo(str(report))
    words = evaluation_words(report.to_json()["evaluation"])
    if words:
        typer.echo(words)
    if run is not None:
        report.write_json(run / DIAGNOSIS_FILE)
        typer.echo(f"written: {run / DIAGNOSIS_FILE}")
    if csv is not None:
        report.write_csv(csv)
        typer.echo(f"written: {csv}")
    if out is not None:
        typer.echo(f"report: {write_diagnosis_page(report.to_json(), out)}")


def _check_target(target: Path | None) -> None:
    """Before the minutes that it takes, not after."""
    if target is None:
        return
    if target.is_dir():
        raise InputError(f"{target} is a folder: give the name of a file")
    if not target.resolve().parent.is_dir():
        raise InputError(f"{target} cannot be written: {target.resolve().parent} is no folder")
