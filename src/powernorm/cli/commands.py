"""All commands, in the order of the help. What is heavy is imported inside a command."""

from collections.abc import Callable
from typing import Annotated

import typer

import powernorm
from powernorm.cli import (
    compare,
    data,
    diagnose,
    machine,
    models,
    recipes,
    remove,
    results,
    tune,
    work,
)

app = typer.Typer(
    help="Normalization for Transformers beyond LayerNorm.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"powernorm {powernorm.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    del version


def _add(group: typer.Typer, *commands: Callable[..., None]) -> None:
    for command in commands:
        group.command()(command)


app.command(cls=compare.CompareCommand)(compare.compare)
_add(app, tune.tune, work.work, machine.norms, recipes.recipes, results.report)
app.add_typer(data.app, name="data")
# In a group without a name: typer puts an app's own commands before its groups, such as `data`.
_rest = typer.Typer()
_add(_rest, models.swap, models.fold, remove.remove, diagnose.diagnose)
_add(_rest, results.results, machine.doctor)
app.add_typer(_rest)
