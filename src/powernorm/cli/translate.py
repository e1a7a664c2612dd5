"""`powernorm translate`: standard input, translated by a run's model."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final

import typer

from powernorm.cli.launching import INTERRUPTED
from powernorm.cli.options import TrustCode
from powernorm.errors import InputError

if TYPE_CHECKING:
    from powernorm.lab.tasks.translation.translator import Translator

PORTION: Final = 512
"""Sentences that are sorted by length and searched together."""


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
            help="Of a model of tokenized text: take and give tokens; else text is split by Moses' "
            "rules, and put together again.",
        ),
    ] = False,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to search.")] = "auto",
    trust_code: TrustCode = False,
) -> None:
    """Translate the sentences of standard input, one a line, to standard output."""
    from powernorm.lab.tasks.translation.translator import load_translator
    from powernorm.norms import named_layers

    named_layers.trust_code(trust_code)
    _check_streams()
    # As the text that comes in, whatever the machine's own encoding is.
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    try:
        translator = load_translator(
            checkpoint,
            beam_size=beam,
            length_penalty=length_penalty,
            num_best=n_best,
            tokens=tokens,
            device=device,
        )
        _translate_lines(translator, sys.stdin.buffer, with_scores=scores)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _check_streams() -> None:
    """Raise before the model is loaded where there is nothing to read from or to write to."""
    # The ones that the process was started with; `main` puts others in the place of closed ones.
    for name, stream in (("input", sys.__stdin__), ("output", sys.__stdout__)):
        if stream is None:
            raise InputError(
                f"standard {name} is closed: powernorm translate RUN < sentences > translations"
            )


def _translate_lines(translator: "Translator", source: BinaryIO, *, with_scores: bool) -> None:
    """Print each translation in a line; an empty line gives an empty one.

    At a terminal each line is translated when it is there.
    """
    done = 0
    for lines in _portions(_lines(source), 1 if source.isatty() else PORTION):
        say_cut = partial(_say_cut, done, translator.max_length)
        done += len(lines)
        for ranked in translator.translate(lines, say_cut):
            for text, score in ranked:
                print(f"{score:.4f}\t{text}" if with_scores else text)  # noqa: T201
        sys.stdout.flush()


def _say_cut(before: int, max_length: int, number: int, length: int) -> None:
    print(  # noqa: T201
        f"standard input, line {before + number + 1}: {length} subwords, of which the first "
        f"{max_length} are translated",
        file=sys.stderr,
    )


def _lines(source: BinaryIO) -> Iterator[str]:
    number = 0
    while line := _line(source):
        number += 1
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise InputError(
                f"standard input, line {number}: byte 0x{line[error.start]:02x} is not UTF-8 text; "
                "convert it to UTF-8"
            ) from error


def _line(source: BinaryIO) -> bytes:
    try:
        return source.readline()
    except OSError as error:
        raise InputError(
            f"standard input cannot be read ({error.strerror or error}): give a file or a pipe "
            "with one sentence a line"
        ) from error


def _portions(lines: Iterator[str], size: int) -> Iterator[list[str]]:
    portion: list[str] = []
    for line in lines:
        portion.append(line)
        if len(portion) == size:
            yield portion
            portion = []
    if portion:
        yield portion
