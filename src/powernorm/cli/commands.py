"""All commands: those of this distribution, then those of installed ones, by their entry points.

Heavy packages are imported inside a command. A command of another distribution replaces one of the
same name here.
"""

from typing import Annotated

import typer

import powernorm
from powernorm.cli import diagnose, machine, models
from powernorm.integrations.extras import COMMANDS, plugins

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


for _command in (machine.norms, models.swap, models.fold, diagnose.diagnose, machine.doctor):
    app.command()(_command)
for _plugin in plugins(COMMANDS):
    _plugin.load()(app)
