"""Commands of the laboratory, which `powernorm` loads by an entry point."""

import typer

from powernorm_lab.cli import compare, data, diagnose, recipes, remove, results, tune, work


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the app of `powernorm`; `diagnose` replaces the core's."""
    app.command(cls=compare.CompareCommand)(compare.compare)
    for command in (
        tune.tune,
        work.work,
        recipes.recipes,
        results.report,
        results.results,
        remove.remove,
        diagnose.diagnose,
    ):
        app.command()(command)
    app.add_typer(data.app, name="data")
