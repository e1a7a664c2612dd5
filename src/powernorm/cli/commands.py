"""The commands: parse, call the library, print. Heavy imports happen inside the command."""

import sys
from pathlib import Path
from typing import Annotated

import typer

import powernorm
from powernorm.cli import data_sets, machine_commands, model_commands, result_commands
from powernorm.cli.launching import INTERRUPTED
from powernorm.data.embedded import EMBEDDED
from powernorm.data.treebanks import TREEBANKS
from powernorm.errors import InputError
from powernorm.recipes import RECIPES, recipe, verdict
from powernorm.recipes.studies import STUDIES, study_config
from powernorm.training.overrides import override

app = typer.Typer(
    help="Normalization for Transformers beyond LayerNorm.",
    no_args_is_help=True,
    add_completion=False,
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


@app.command()
def compare(
    task: Annotated[
        str,
        typer.Argument(
            help=f"What to train: {', '.join(RECIPES)}; or {verdict.TASK}: {verdict.SUMMARY}."
        ),
    ],
    norms: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            help="Short names (see `powernorm norms`), module:Class of your own, or labels of the "
            "preset's variants; else the preset's.",
        ),
    ] = None,
    placement: Annotated[
        str | None, typer.Option(metavar="pre|post", help="Where the norms stand.")
    ] = None,
    preset: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"Size of the experiment: {', '.join(RECIPES['lm'])}, or another of "
            "`powernorm recipes`.",
        ),
    ] = "demo",
    study: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Train the variants of a study and draw its figure: "
            + "; ".join(f"{name}: {item.summary}" for name, item in STUDIES.items())
            + ".",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Train with seeds 0 … N-1.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="A text file, a folder with ….train.txt, ….valid.txt and ….test.txt, or a text "
            f"that comes with powernorm ({', '.join(EMBEDDED)}); for tag CoNLL-U files with "
            f"such names or {', '.join(TREEBANKS)}; for translation a folder with train.de, "
            "train.en, valid.de …, sentence pairs in columns between tabs, or hf:NAME; what the "
            "other tasks take `powernorm data` lists; else the recipe's.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where the runs go; else runs/TASK-PRESET or TASK-STUDY-PRESET."
        ),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a setting; may be given several times."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Delete the runs that DIR holds first.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the runs that DIR holds.")
    ] = False,
    devices: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Train every run in N processes, each on a GPU of its own or a part of the CPUs; "
            "over several machines start this command with torchrun instead.",
        ),
    ] = 1,
) -> None:
    """Train the same model with each norm, or with the variants of a study, and compare them.

    Ends in a table and in DIR/report.html.
    """
    options = {
        "norms": norms,
        "model.placement": placement,
        "seeds": None if seeds is None else ",".join(map(str, range(seeds))),
        "data.path": data,
    }
    if task == verdict.TASK:
        if devices > 1:
            raise InputError(f"--devices {devices}: {verdict.TASK} runs in one process.")
        _compare_verdict(preset, out, assignments, study, options, resume=resume, force=force)
        return
    chosen = [f"{key}={value}" for key, value in options.items() if value is not None]
    chosen += assignments or []
    if study is None:
        config = override(recipe(task, preset), chosen)
    else:
        config = study_config(task, study, preset, chosen)
    folder = out or Path("runs") / "-".join([task, *([study] if study else []), preset])
    from powernorm.cli.comparing import compare_and_report, say_what_is_kept

    try:
        compare_and_report(config, folder, resume=resume, force=force, devices=devices)
    except KeyboardInterrupt:
        say_what_is_kept(folder)


def _compare_verdict(
    preset: str,
    out: Path | None,
    assignments: list[str] | None,
    study: str | None,
    options: dict[str, str | None],
    *,
    resume: bool,
    force: bool,
) -> None:
    from powernorm.cli.comparing import say_what_is_kept
    from powernorm.cli.verdict import compare_verdict

    folder = out or Path("runs") / f"{verdict.TASK}-{preset}"
    names = {"norms": "--norms", "model.placement": "--placement", "data.path": "--data"}
    others = {names.get(key, f"--{key}"): value for key, value in options.items()}
    try:
        compare_verdict(
            preset,
            folder,
            assignments or [],
            resume=resume,
            force=force,
            others={**others, "--study": study},
        )
    except KeyboardInterrupt:
        say_what_is_kept(folder)


@app.command()
def translate(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="A run's folder (the weights that were scored), one of its checkpoints, or a file "
            "of `powernorm fold`."
        ),
    ],
    beam: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Size of the beam; else the run's.")
    ] = None,
    length_penalty: Annotated[
        float | None, typer.Option(metavar="α", help="Length penalty; else the run's.")
    ] = None,
    n_best: Annotated[
        int, typer.Option(min=1, metavar="N", help="Translations of each sentence.")
    ] = 1,
    scores: Annotated[
        bool, typer.Option("--scores", help="Put the score and a tab before each translation.")
    ] = False,
    tokens: Annotated[
        bool,
        typer.Option(
            "--tokens",
            help="Of a model of tokenised text: take and give tokens; else text is split by Moses' "
            "rules, and put together again.",
        ),
    ] = False,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to search.")] = "auto",
) -> None:
    """Translate the sentences of standard input, one a line, to standard output."""
    from powernorm.cli.translation import Options, translate_stream

    options = Options(beam, length_penalty, n_best, scores, tokens, device)
    # As the text that comes in, whatever the machine's own encoding is.
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    try:
        translate_stream(checkpoint, options, sys.stdin.buffer, sys.stdout)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


@app.command()
def norms() -> None:
    """Show the table of norms."""
    from powernorm.cli.norm_table import print_norms

    print_norms()


@app.command()
def recipes(
    task: Annotated[
        str | None, typer.Argument(help=f"Only those of {', '.join(RECIPES)}; else all.")
    ] = None,
) -> None:
    """List the presets of `compare` with what they need, cost and repeat."""
    from powernorm.cli.recipe_table import print_recipes

    print_recipes(task)


@app.command()
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUNS…", help="Folders of comparisons, of single runs, or several."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The page; else report.html in the folder, of several in the folder that holds "
            "them all, or in the current one where that is a comparison.",
        ),
    ] = None,
) -> None:
    """Build report.html again from the run folders alone."""
    from powernorm.report import write_reports

    typer.echo(f"report: {write_reports(folders, out)}")


app.add_typer(data_sets.app, name="data")
# Without a name of their own: their commands stand beside those of this module.
app.add_typer(model_commands.app)
app.add_typer(result_commands.app)
app.add_typer(machine_commands.app)
