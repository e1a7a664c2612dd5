"""Training and validation loss side by side, in a file."""

import csv
from pathlib import Path
from statistics import fmean

import pytest
from synthetic import write_comparison

from powernorm.errors import InputError
from powernorm.lab.report import pictures
from powernorm.lab.report.pictures import draw_training_curves
from powernorm.runs import METRICS_FILE


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
    with pytest.raises(InputError, match="holds neither"):
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
