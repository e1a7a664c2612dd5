"""Losses and scores over the training side by side, in a file."""

import csv
import json
from pathlib import Path
from statistics import fmean

import pictures
import pytest
from lab.tests.report.synthetic import write_comparison
from pictures import draw_fluctuation, draw_training_curves

from powernorm.errors import InputError
from powernorm_lab.report import read_comparison
from powernorm_lab.report.figures import Axis, learning_curves
from powernorm_lab.runs import METRICS_FILE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_comparison(tmp_path / "demo")


def _texts(picture: Path) -> str:
    return picture.read_text(encoding="utf-8")


def test_a_line_for_each_norm_that_is_named(folder: Path, tmp_path: Path) -> None:
    picture = draw_training_curves([folder], tmp_path / "figures" / "curves.svg", ["rbn", "ln"])
    text = _texts(picture)
    assert text.startswith("<?xml")
    assert "<!-- rbn -->" in text
    assert "<!-- ln -->" in text
    assert "<!-- bn -->" not in text
    assert text.index("<!-- rbn -->") < text.index("<!-- ln -->")
    assert "<!-- Training loss -->" in text
    assert "<!-- Validation loss -->" in text


def test_the_same_twice(folder: Path, tmp_path: Path) -> None:
    first = draw_training_curves([folder], tmp_path / "a.svg")
    assert first.read_bytes() == draw_training_curves([folder], tmp_path / "b.svg").read_bytes()


def test_a_line_is_the_mean_of_the_seeds(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "_BLOCKS", 1)
    drawn = {}
    monkeypatch.setattr(pictures, "_save", lambda figure, out: drawn.update(f=figure) or out)
    draw_training_curves([folder], tmp_path / "a.svg", ["ln"])
    (line,) = drawn["f"].axes[1].lines
    wanted = []
    for run in folder.glob("ln-pre-seed*"):
        with (run / METRICS_FILE).open(encoding="utf-8") as stream:
            values = [
                float(row["valid_loss"]) for row in csv.DictReader(stream) if row["valid_loss"]
            ]
        wanted.append(fmean(values))
    assert len(wanted) > 1
    assert line.get_ydata()[0] == pytest.approx(fmean(wanted))


def test_bad_input(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no run of pn2: it has .*rbn"):
        draw_training_curves([folder], tmp_path / "a.svg", ["ln", "pn2"])
    with pytest.raises(InputError, match="has neither"):
        draw_training_curves([tmp_path], tmp_path / "a.svg")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"a\.svg cannot be written"):
        draw_training_curves([folder], tmp_path / "file" / "a.svg")


def test_results_without_their_runs_have_no_curves(folder: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    (folder / "results.json").rename(alone / "results.json")
    with pytest.raises(InputError, match="no losses over the training"):
        draw_training_curves([alone], tmp_path / "a.svg")
    assert not (tmp_path / "a.svg").exists()


@pytest.mark.parametrize(("last", "scale"), [(0.04, "log"), (0.06, "linear"), (0.0, "linear")])
def test_a_loss_that_falls_far_has_a_logarithmic_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: float, scale: str
) -> None:
    folder = write_comparison(tmp_path / "demo", norms=("ln",), seeds=(0,))
    (metrics,) = folder.glob(f"*/{METRICS_FILE}")
    header = "step,epoch,tokens,seconds,learning_rate,train_loss,valid_loss,valid_perplexity"
    metrics.write_text(f"{header}\n1,0,8,1,0.1,1.0,1.0,2\n2,0,16,2,0.1,{last},0.9,2\n")
    drawn = {}
    monkeypatch.setattr(pictures, "_save", lambda figure, out: drawn.update(f=figure) or out)
    draw_training_curves([folder], tmp_path / "a.svg")
    assert [axes.get_yscale() for axes in drawn["f"].axes] == [scale, "linear"]


COLUMNS = (
    "step,epoch,tokens,train_loss,valid_loss,valid_perplexity,valid_score,seconds,learning_rate"
)


def _write_scores(folder: Path, seed: int, scores: list[float], *, epoch_length: int = 4) -> None:
    """A validation every two steps; an epoch has so many steps."""
    lines = [COLUMNS]
    for step in range(1, 2 * len(scores) + 1):
        validation = "" if step % 2 else str(scores[step // 2 - 1])
        epoch = (step - 1) // epoch_length
        lines.append(f"{step},{epoch},{100 * step},1.0,2.0,7.0,{validation},1.0,0.1")
    (path,) = folder.glob(f"ln*seed{seed}/{METRICS_FILE}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def scored(tmp_path: Path) -> Path:
    folder = write_comparison(tmp_path / "scored", norms=("ln",), seeds=(0, 1))
    _write_scores(folder, 0, [10.0, 20.0, 30.0, 40.0])
    _write_scores(folder, 1, [12.0, 24.0, 36.0, 48.0])
    results = json.loads((folder / "results.json").read_text())
    results["preset"] = "another"
    results["score"] = {"metric": "valid_bleu", "direction": "max"}
    (folder / "results.json").write_text(json.dumps(results))
    return folder


@pytest.mark.parametrize("measure", ["valid_bleu", "valid_score"])
@pytest.mark.parametrize(
    ("axis", "places"),
    [("step", [2, 4, 6, 8]), ("tokens", [200, 400, 600, 800]), ("epoch", [0.5, 1, 1.5, 2])],
)
def test_a_score_is_drawn_by_steps_tokens_or_epochs(
    scored: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    measure: str,
    axis: Axis,
    places: list[float],
) -> None:
    """Wang et al. 2022, Figure 1, has epochs."""
    drawn = {}
    monkeypatch.setattr(pictures, "_save", lambda figure, out: drawn.update(f=figure) or out)
    draw_training_curves([scored], tmp_path / "a.svg", measures=[measure], against=axis)
    (axes,) = drawn["f"].axes
    assert axes.get_title(loc="left") == "Validation BLEU"
    assert axes.get_ylabel() == "BLEU (higher is better)"
    assert axes.get_xlabel() == axis
    assert list(axes.lines[0].get_xdata()) == places
    assert list(axes.lines[0].get_ydata()) == [11, 22, 33, 44]
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (min(band), max(band)) == (10, 48)


def test_losses_and_score_stand_side_by_side_unless_others_are_named(
    scored: Path, tmp_path: Path
) -> None:
    text = _texts(draw_training_curves([scored], tmp_path / "a.svg"))
    assert all(f"<!-- Validation {what} -->" in text for what in ("loss", "BLEU"))
    runs = sorted(scored.glob("ln*"))
    same = draw_training_curves(runs, tmp_path / "b.svg", measures=["train_loss", "valid_loss"])
    assert "<!-- Validation BLEU -->" not in _texts(same)


def test_what_was_not_logged_cannot_be_drawn(scored: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.svg"
    with pytest.raises(InputError, match=r"logged no valid_accuracy: it has .*valid_bleu"):
        draw_training_curves([scored], out, measures=["valid_accuracy"])
    for seed in (0, 1):
        _write_scores(scored, seed, [1.0, 2.0], epoch_length=9)
    with pytest.raises(InputError, match="no run that logged the end of an epoch"):
        draw_training_curves([scored], out, against="epoch")
    with pytest.raises(InputError, match="are 2 comparisons, which differ in more than"):
        draw_training_curves([scored, folder], out)


def test_the_page_draws_the_mean_of_the_seeds_by_epoch(scored: Path) -> None:
    *_, drawn = learning_curves(read_comparison(scored))
    assert ">epoch</text>" in drawn.svg
    assert ">Validation BLEU</text>" in drawn.svg
    assert "BLEU on the validation data; higher is better." in drawn.caption
    assert "mean of the seeds that finished" in drawn.caption


def test_fluctuation_of_several_runs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "figures" / "fluctuation.svg"
    named = [f"A={folder / 'bn-pre-seed0'}", f"B={folder / 'rbn-pre-seed0'}"]
    pictures.main(["fluctuation", *named, "--out", str(picture)])
    assert capsys.readouterr().out == f"written: {picture}\n"
    text = _texts(picture)
    assert text.startswith("<?xml")
    assert text.count("<!-- A -->") == text.count("<!-- B -->") == 1


def test_runs_without_batch_statistics_have_no_fluctuation(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no statistics of batches"):
        draw_fluctuation({"A": folder / "ln-pre-seed0"}, tmp_path / "a.svg")
    with pytest.raises(InputError, match="is no run"):
        draw_fluctuation({"A": folder}, tmp_path / "a.svg")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"a\.svg cannot be written"):
        draw_fluctuation({"A": folder / "bn-pre-seed0"}, tmp_path / "file" / "a.svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fluctuation", "runs/a"], "is not of the form NAME=RUN"),
        (["fluctuation", "a=x", "a=x"], "a names two runs"),
        (["curves", "none", "--norms", "x"], "none is not a folder"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=message):
        pictures.main(arguments)


def test_pictures_as_a_command(folder: Path, tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    more = ["--norms", "ln, rbn", "--measure", "train_loss,valid_loss", "--out", str(picture)]
    pictures.main(["curves", str(folder), *more])
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        pictures.main(["curves", str(folder), "--out", "a.pdf"])
