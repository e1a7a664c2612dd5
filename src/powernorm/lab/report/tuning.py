"""How each number was tuned: budgets, ranges, what was chosen, and what the trials say."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path

from markupsafe import Markup
from matplotlib.axes import Axes

from powernorm.files import read_text
from powernorm.lab.report.document import part
from powernorm.lab.report.drawing import (
    DrawnFigure,
    add_legend,
    figure,
    hover_name,
    inline_svg,
    legend_label,
    line_style,
    logarithmic_scale,
    name_rows,
    plain_axes,
)
from powernorm.lab.report.lines import Band, Panel, draw_panels
from powernorm.lab.report.measures import own_heading
from powernorm.lab.report.numerals import NOTHING, STATUS_WORDS, counted, printable
from powernorm.lab.report.records import Comparison
from powernorm.lab.report.tables import Table
from powernorm.runs import TRIALS_COLUMNS, TRIALS_FILE, NormTuning, TuningRecord


@dataclass(frozen=True)
class _Trial:
    """One line of `trials.csv`."""

    norm: str
    number: str
    status: str
    value: float | None
    """What it is judged by; None where it did not come to its end."""
    settings: Mapping[str, str]
    """By dotted key, those that were searched."""


def tuning_sentence(tuning: TuningRecord) -> str:
    """The budget and the rule of choice, in a sentence."""
    way = "lowest" if tuning["select_by"]["direction"] == "min" else "highest"
    pruned = "some given up early" if tuning["pruner"] else "none given up early"
    return (
        f"Every norm had {counted(tuning['num_trials'], 'trial')} ({pruned}, all counted) over its "
        f"ranges, with the seed {tuning['seed']}; the settings of the trial with the {way} "
        f"{own_heading(tuning['select_by']['metric'])} were trained with other seeds and scored."
    )


def budget_table(tuning: TuningRecord) -> Table:
    """What the trials of each norm came to."""
    name = own_heading(tuning["select_by"]["metric"])
    headings = ["norm", "trials", f"{name}, untuned", f"{name}, best", "trial", "chosen settings"]
    return Table(
        headings,
        [False, False, True, True, True, False],
        [list(_budget_line(norm, one)) for norm, one in tuning["norms"].items()],
        wide="chosen settings",
    )


def _budget_line(norm: str, one: NormTuning) -> Iterator[str]:
    best = one["best"]
    words: dict[str, str] = {str(status): word for status, word in STATUS_WORDS.items()}
    yield printable(norm)
    yield ", ".join(f"{number} {words.get(key, key)}" for key, number in one["trials"].items())
    yield _number(one["untuned"])
    yield _number(None if best is None else best["value"])
    yield NOTHING if best is None else str(best["trial"])
    yield (
        NOTHING
        if best is None
        else ", ".join(
            f"{_short(key, norm)} {_setting(value)}" for key, value in best["settings"].items()
        )
    )


def ranges_table(tuning: TuningRecord) -> Table:
    """What was searched of each norm, and how much it mattered."""
    lines = []
    for norm, one in tuning["norms"].items():
        chosen = {} if one["best"] is None else one["best"]["settings"]
        for key, text in one["search"].items():
            part_of_one = one["importance"].get(key)
            lines.append(
                [
                    printable(norm),
                    printable(_short(key, norm)),
                    printable(text),
                    _setting(chosen[key]) if key in chosen else NOTHING,
                    NOTHING if part_of_one is None else f"{100 * part_of_one:.0f} %",
                ]
            )
    headings = ["norm", "setting", "range", "chosen", "importance"]
    return Table(headings, [False, False, False, True, True], lines)


def tuning_contents(comparison: Comparison) -> list[Markup]:
    """The section of the report; empty where nobody tuned."""
    tuning = comparison.tuning
    if tuning is None:
        return []
    prefix = f"{comparison.anchor}tuning"
    trials = _read_trials(comparison.folder / TRIALS_FILE)
    caption = (
        "Trials are judged on the valid split, with one seed: their best value is the best of many "
        "and says less than the table of results. The first trial has the untuned settings."
    )
    importance = (
        "Importance: which setting told good trials from bad ones in these ranges (PED-ANOVA of "
        "Optuna), of a few trials a hint at most."
    )
    rules = f"Sampler: {tuning['sampler']}."
    if tuning["pruner"]:
        rules += f" Given up by the {tuning['pruner']}."
    drawn = [*_curves(tuning, prefix), *_importances(tuning, prefix)]
    contents = [
        part("paragraph", tuning_sentence(tuning)),
        budget_table(tuning).html("Trials", caption),
        ranges_table(tuning).html("Ranges", importance),
        part("gallery", drawn),
    ]
    slices = list(_slices(tuning, trials, prefix))
    if slices:
        contents += [part("heading", "Every trial, by setting"), part("gallery", slices)]
    return [*contents, part("paragraph", printable(rules), kind="soft")]


def _curves(tuning: TuningRecord, prefix: str) -> Iterator[DrawnFigure]:
    """The best value after 1 … T trials."""
    bands = []
    for style, (norm, one) in enumerate(tuning["norms"].items()):
        points = [(n, v) for n, v in enumerate(one["curve"], start=1) if v is not None]
        if points:
            bands.append(Band(norm, style, [n for n, _ in points], [v for _, v in points]))
    if not bands:
        return
    name = own_heading(tuning["select_by"]["metric"])
    svg = draw_panels(
        [Panel("Budget", f"best {name}", bands)],
        x_label="trials",
        prefix=f"{prefix}-budget",
        description=f"Best {name} after so many trials, by norm",
    )
    yield DrawnFigure(
        svg,
        f"Best {name} after so many trials of a norm. A line that still moves at its end wants "
        "more trials.",
    )


def _importances(tuning: TuningRecord, prefix: str) -> Iterator[DrawnFigure]:
    """Bars of the importance, by norm and setting."""
    rows = [
        (f"{norm}: {_last(key)}", style, value)
        for style, (norm, one) in enumerate(tuning["norms"].items())
        if len(one["importance"]) > 1
        for key, value in one["importance"].items()
    ]
    if not rows:
        return
    names = [printable(name) for name, _, _ in rows]
    with figure(0.65 + 0.16 * len(rows)) as drawn:
        axes = drawn.subplots()
        plain_axes(axes, "Importance", "% of the norm's", "")
        for place, (_, style, value) in enumerate(rows):
            axes.barh(place, 100 * value, height=0.7, color=line_style(style)[0])
        name_rows(axes, names, 6.5)
        svg = inline_svg(drawn, f"{prefix}-importance", "Importance of each setting, by norm")
    yield DrawnFigure(svg, "How much of what told trials apart goes with a setting.")


def _slices(tuning: TuningRecord, trials: Sequence[_Trial], prefix: str) -> Iterator[DrawnFigure]:
    """Value against setting, a figure a setting, a point a trial."""
    keys = dict.fromkeys(key for one in tuning["norms"].values() for key in one["search"])
    name = own_heading(tuning["select_by"]["metric"])
    for index, key in enumerate(keys):
        points = {
            norm: [
                (place, row.value)
                for row in trials
                if row.norm == norm
                and row.value is not None
                and (place := _as_number(row.settings.get(key))) is not None
            ]
            for norm in tuning["norms"]
        }
        known = {norm: pairs for norm, pairs in points.items() if len(pairs) > 1}
        if known:
            is_log = any(
                one["search"].get(key, "").startswith("log:") for one in tuning["norms"].values()
            )
            svg = _slice(tuning, known, key, name, is_log=is_log, prefix=f"{prefix}-slice-{index}")
            yield DrawnFigure(svg, f"The {name} of trials that came to their end, by {key}.")


def _slice(
    tuning: TuningRecord,
    known: Mapping[str, Sequence[tuple[float, float]]],
    key: str,
    name: str,
    *,
    is_log: bool,
    prefix: str,
) -> Markup:
    styles = {norm: style for style, norm in enumerate(tuning["norms"])}
    with figure(2.2) as drawn:
        axes: Axes = drawn.subplots()
        plain_axes(axes, _last(key), "", name)
        for norm, pairs in known.items():
            best = tuning["norms"][norm]["best"]
            color = line_style(styles[norm])[0]
            (line,) = axes.plot(
                [x for x, _ in pairs],
                [y for _, y in pairs],
                "o",
                markersize=4,
                color=color,
                alpha=0.8,
                label=legend_label(norm),
            )
            line.set_gid(hover_name(norm))
            chosen = nan if best is None else _as_number(str(best["settings"].get(key)))
            if best is not None and chosen is not None and isfinite(chosen):
                axes.plot(
                    [chosen], [best["value"]], "o", markersize=9, color=color, fillstyle="none"
                )
        places = [x for pairs in known.values() for x, _ in pairs]
        if is_log and min(places) > 0:
            logarithmic_scale(axes.xaxis)
        add_legend(drawn, [axes])
        return inline_svg(drawn, prefix, f"{name} against {key}", unit=_last(key))


def _short(key: str, norm: str) -> str:
    """A setting without the norm that it is of."""
    return key.removeprefix(f"norm_options.{norm}.")


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4g}"


def _setting(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else printable(str(value))


def _read_trials(path: Path) -> list[_Trial]:
    """The rows of a `trials.csv`; an empty list where the file does not exist, or is another's.

    Raises:
        InputError: it is not UTF-8 or cannot be read.
    """
    if not path.exists():
        return []
    reader = csv.DictReader(read_text(path).splitlines())
    if not set(TRIALS_COLUMNS) <= set(reader.fieldnames or ()):
        return []
    return [
        _Trial(
            norm=row["norm"],
            number=row["trial"],
            status=row["status"],
            value=_as_number(row["value"]),
            settings={k: v for k, v in row.items() if k not in TRIALS_COLUMNS and v},
        )
        for row in reader
        if None not in row and None not in row.values()
    ]


def _as_number(text: str | None) -> float | None:
    """The finite number that a cell holds, or None."""
    try:
        number = float(text or "nan")
    except ValueError:
        return None
    return number if isfinite(number) else None
