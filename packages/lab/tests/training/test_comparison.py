import csv
import json
import signal
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tensorboard.backend.event_processing import event_accumulator
from tiny_training import TRAINING, Configure, compare
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.records import NORMS_COLUMNS
from powernorm_lab.engine.events import (
    DataPrepared,
    Event,
    Measured,
    RunEnded,
    RunStarted,
    StepsDone,
)
from powernorm_lab.engine.folders import read_json
from powernorm_lab.engine.grid_training import compare_grid
from powernorm_lab.runs import METRICS_COLUMNS, ComparisonResults, RunResult
from powernorm_lab.schema import read_record, written
from powernorm_lab.settings.comparison import ComparisonSettings, Notes, to_json
from powernorm_lab.settings.training import OptimizerSettings
from powernorm_lab.tasks.builtin import grid_of
from powernorm_lab.tasks.trained_models import scored_step
from powernorm_lab.training import norms, training

TIMES = ("seconds",)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def without_times(path: Path) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows(path)]


def measured(result: RunResult) -> dict[str, Any]:
    """Return the parts of a result that must not depend on interruptions."""
    kept = ("norm", "seed", "status", "metrics", "tid", "parameters")
    return {name: getattr(result, name) for name in kept}


def interrupt_at(step: int, norm: str) -> Any:
    def listen(event: Event) -> None:
        if isinstance(event, StepsDone) and (event.norm, event.step) == (norm, step):
            signal.raise_signal(signal.SIGINT)

    return listen


@pytest.fixture(scope="module")
def module_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("comparisons")


@pytest.fixture
def whole(configure: Configure, module_folder: Path) -> tuple[ComparisonSettings, Path]:
    """Train a comparison of three norms and two seeds without interruptions, once."""
    config = configure(norms=("ln", "rbn", "pn"), seeds=(0, 1))
    out = module_folder / "whole"
    if not out.exists():
        compare_grid(replace(grid_of(config, Notes()), log_to=("tensorboard",)), out)
    return config, out


def results_of(out: Path) -> ComparisonResults:
    return read_record(ComparisonResults, out / "results.json", "", exact=True)


def test_results_hold_every_run_and_how_it_was_made(whole: tuple[ComparisonSettings, Path]) -> None:
    config, out = whole
    results = results_of(out)
    assert read_json(out / "results.json") == written(results)
    names = [(run.norm, run.seed) for run in results.runs]
    assert names == [(norm, seed) for norm in ("ln", "rbn", "pn") for seed in (0, 1)]
    for run in results.runs:
        assert run.status == "finished"
        assert run.placement == "pre"
        assert all(value is not None for value in run.metrics.values())
        assert run.seconds > 0
        assert run.tokens_per_second is not None
        assert (run.tid is None) == (run.norm == "ln")
        assert read_json(out / run.folder / "result.json") == written(run)
    pn = results.runs[-1].tid
    assert pn is not None
    assert pn["mean_last"] is None
    assert pn["var_last"] > 0
    settings = results.settings
    assert settings["optimizer"] == to_json(config)["optimizer"]
    assert settings["norm_options"]["pn"] == {"warmup_steps": 1}
    assert settings["versions"]["torch"] == torch.__version__
    assert settings["machine"]["num_threads"] == 1
    assert results.data["splits"]["test"]["words"] == 30 * 9
    assert results.data["splits"]["test"]["documents"] == 30
    assert [row["name"] for row in results.baselines] == ["unigram", "bigram"]


def test_training_learns(whole: tuple[ComparisonSettings, Path]) -> None:
    _, out = whole
    unigram = results_of(out).baselines[0]["metrics"]["test_loss"]
    for run in results_of(out).runs:
        losses = [float(row["train_loss"]) for row in rows(out / run.folder / "metrics.csv")]
        assert losses[-1] < losses[0] - 0.5
        assert run.metrics["test_loss"] is not None
        assert unigram is not None


def test_run_folder_follows_its_contract(whole: tuple[ComparisonSettings, Path]) -> None:
    _, out = whole
    folder = out / "rbn-pre-seed1"
    metrics = rows(folder / "metrics.csv")
    assert tuple(metrics[0]) == METRICS_COLUMNS
    assert [int(row["step"]) for row in metrics] == [2, 4, 6, 8, 10, 12]
    validated = [int(row["step"]) for row in metrics if row["valid_loss"]]
    assert validated == [4, 8, 12]
    assert [int(row["tokens"]) for row in metrics] == [int(r["step"]) * 8 * 12 for r in metrics]
    assert all(row["train_loss"] and row["learning_rate"] for row in metrics)
    norms = rows(folder / "norms.csv")
    assert tuple(norms[0]) == NORMS_COLUMNS
    assert [int(row["step"]) for row in norms] == [s for s in (3, 6, 9, 12) for _ in range(3)]
    assert {row["norm"] for row in norms} == {"rbn"}
    assert {row["layer"] for row in norms} >= {"final_norm"}
    assert all(row["mean_tid"] and row["var_distance"] for row in norms)
    assert all(row["gradient_norm"] and row["var_gradient_norm"] for row in norms)
    gaps = [row for row in metrics if row["gap_running_loss"]]
    assert gaps == [row for row in metrics if row["valid_loss"]]
    # The split is small enough that the gap is measured on all of its batches.
    assert all(
        float(row["gap_running_loss"]) == pytest.approx(float(row["valid_loss"]), rel=1e-5)
        for row in gaps
    )
    assert all(row["gap_batch_loss"] != row["gap_running_loss"] for row in gaps)
    others = out / "ln-pre-seed0"
    plain = rows(others / "norms.csv")
    assert [int(row["step"]) for row in plain] == [s for s in (3, 6, 9, 12) for _ in range(3)]
    assert all(row["gradient_norm"] and not row["var_tid"] for row in plain)
    assert not any(row["gap_batch_loss"] for row in rows(others / "metrics.csv"))
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"last.ckpt", "best.ckpt"}
    scalars = event_accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    seen = {tag for tag in scalars.Tags()["scalars"] if tag.startswith("norm/final_norm/")}
    assert seen >= {f"norm/final_norm/{name}" for name in ("mean_tid", "var_gradient_norm")}
    entries = scalars.Scalars("norm/final_norm/gradient_norm")
    assert [entry.step for entry in entries] == [3, 6, 9, 12]
    assert [entry.value for entry in entries] == pytest.approx(
        [float(row["gradient_norm"]) for row in norms if row["layer"] == "final_norm"], rel=1e-5
    )
    assert json.loads((folder / "config.json").read_text())["norm"] == "rbn"


def test_the_penalty_is_trained_with(configure: Configure, tmp_path: Path) -> None:
    """Without the penalty a run would equal one of batch normalization."""
    losses = []
    for strength in (0.0, 30.0):
        options = {"rbn": {"mean_penalty": strength, "var_penalty": strength}}
        out = tmp_path / str(strength)
        compare(configure(norms=("rbn",), norm_options=options), out)
        losses.append([row["train_loss"] for row in rows(out / "rbn-pre-seed0" / "metrics.csv")])
    (_, *without), (_, *with_it) = losses
    assert all(one != other for one, other in zip(without, with_it, strict=True))


def test_learning_rates_on_record_are_those_of_the_schedule(
    whole: tuple[ComparisonSettings, Path],
) -> None:
    from powernorm_lab.training.optimization import rate_factor

    config, out = whole
    for row in rows(out / "ln-pre-seed0" / "metrics.csv"):
        factor = rate_factor(config.schedule, int(row["step"]) - 1, config.training.max_steps)
        assert float(row["learning_rate"]) == pytest.approx(1e-2 * factor)


def test_validation_on_record_is_that_of_the_result(whole: tuple[ComparisonSettings, Path]) -> None:
    _, out = whole
    for run in results_of(out).runs:
        validated = [r for r in rows(out / run.folder / "metrics.csv") if r["valid_loss"]]
        best = min(validated, key=lambda row: float(row["valid_loss"]))
        assert float(best["valid_loss"]) == pytest.approx(run.metrics["valid_loss"], rel=1e-5)
        perplexity = run.metrics["valid_perplexity"]
        assert float(best["valid_perplexity"]) == pytest.approx(perplexity, rel=1e-4)


def test_equal_seeds_start_alike_and_others_do_not(whole: tuple[ComparisonSettings, Path]) -> None:
    _, out = whole

    def first_loss(name: str) -> float:
        return float(rows(out / name / "metrics.csv")[0]["train_loss"])

    assert first_loss("ln-pre-seed0") != first_loss("ln-pre-seed1")


def test_an_interrupted_comparison_goes_on_in_the_run_that_was_stopped(
    configure: Configure, tmp_path: Path
) -> None:
    config = configure(norms=("ln", "rbn", "pn"), seeds=(0,))
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        compare(config, tmp_path, on_event=interrupt_at(6, "rbn"))
    assert signal.getsignal(signal.SIGINT) is handler
    interrupted = results_of(tmp_path).runs
    assert [(run.norm, run.status) for run in interrupted] == [
        ("ln", "finished"),
        ("rbn", "interrupted"),
    ]
    events: list[Event] = []
    results = compare(config, tmp_path, resume=True, on_event=events.append)
    assert [run.status for run in results.runs] == ["finished"] * 3
    skipped = [event.result.norm for event in events
               if isinstance(event, RunEnded) and event.skipped]  # fmt: skip
    assert skipped == ["ln"]
    started = [(e.norm, e.first_step) for e in events if isinstance(e, RunStarted)]
    assert started == [("rbn", 4), ("pn", 0)]


class Poison(nn.Module):
    """The identity until a given forward in training, NaN from then on."""

    def __init__(self, healthy: int) -> None:
        super().__init__()
        self.healthy = healthy
        self.calls = 0

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        del padding_mask
        self.calls += self.training
        return x if self.calls <= self.healthy else x * float("nan")


def with_broken_norm(broken: Any) -> Any:
    """Build `none` as the given norm and every other as usual."""
    real = norms.build_norm

    def build(norm: str, num_features: int, **options: Any) -> nn.Module:
        made: nn.Module = broken() if norm == "none" else real(norm, num_features, **options)
        return made

    return patch.object(norms, "build_norm", build)


def test_a_run_that_turns_nan_is_marked_and_the_others_go_on(
    configure: Configure, tmp_path: Path
) -> None:
    config = configure(norms=("none", "bn"))
    with with_broken_norm(lambda: Poison(5)):
        results = compare(config, tmp_path)
    bad, good = results.runs
    assert bad.status == "nonfinite"
    assert set(bad.metrics.values()) == {None}
    assert bad.tid is None
    assert "stopped at step 8" in bad.message
    assert good.status == "finished"
    metrics = rows(tmp_path / "none-pre-seed0" / "metrics.csv")
    assert metrics[0]["train_loss"] != "nan"
    assert metrics[-1]["train_loss"] == metrics[-1]["valid_loss"] == "nan"
    json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    # Runs that are over are not trained again.
    events: list[Event] = []
    compare(config, tmp_path, resume=True, on_event=events.append)
    assert [type(e) for e in events] == [DataPrepared, RunEnded, RunEnded]


def test_a_run_with_a_huge_learning_rate_is_marked(configure: Configure, tmp_path: Path) -> None:
    config = configure(
        norms=("ln",), optimizer=OptimizerSettings(learning_rate=2.0, clip_norm=None)
    )
    (run,) = compare(config, tmp_path).runs
    assert run.status == "diverged"
    # The numbers are those of the last weights, not of an earlier checkpoint.
    loss, unigram = run.metrics["valid_loss"], results_of(tmp_path).baselines[0]["metrics"]
    assert loss is not None
    assert unigram["valid_loss"] is not None
    assert loss > unigram["valid_loss"]
    last = rows(tmp_path / "ln-pre-seed0" / "metrics.csv")[-1]
    assert float(last["valid_loss"]) == pytest.approx(loss, rel=1e-4)
    assert "unigram" in run.message
    assert scored_step(tmp_path / "ln-pre-seed0") == int(last["step"])


def test_a_run_that_raises_is_marked_and_the_others_go_on(
    configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Raising(nn.Module):
        def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
            del x, padding_mask
            raise RuntimeError("out of luck")

    config = configure(norms=("none", "ln"))
    with with_broken_norm(Raising):
        results = compare(config, tmp_path)
    bad, good = results.runs
    assert (bad.status, bad.message) == ("failed", "RuntimeError: out of luck")
    assert good.status == "finished"
    assert "none-pre-seed0 failed" in caplog.text
    # A failed run is retried.
    again = compare(config, tmp_path, resume=True).runs
    assert [run.status for run in again] == ["finished", "finished"]


def early_stopping(configure: Configure) -> ComparisonSettings:
    return configure(
        training=replace(TRAINING, max_steps=60, validate_every=2, patience=2),
        optimizer=OptimizerSettings(learning_rate=0.3, clip_norm=None),  # noisy enough
    )


def test_early_stop(configure: Configure, tmp_path: Path) -> None:
    (run,) = compare(early_stopping(configure), tmp_path).runs
    metrics = rows(tmp_path / "ln-pre-seed0" / "metrics.csv")
    losses = [float(row["valid_loss"]) for row in metrics if row["valid_loss"]]
    best = losses.index(min(losses))
    assert len(losses) == best + 1 + 2, "two validations without a better loss"
    last_step = int(metrics[-1]["step"])
    assert last_step < 60
    assert run.status == "finished"
    assert run.message == f"stopped early after step {last_step}"
    assert run.metrics["valid_loss"] == pytest.approx(min(losses), rel=1e-5)


@pytest.mark.parametrize("early", [False, True])
def test_interruption_after_the_last_step(
    configure: Configure, tmp_path: Path, early: bool
) -> None:
    config = early_stopping(configure) if early else configure()
    (expected,) = compare(config, tmp_path / "whole").runs
    with (
        patch.object(training, "evaluate", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        compare(config, tmp_path / "parts")
    assert results_of(tmp_path / "parts").runs[0].status == "interrupted"
    events: list[Event] = []
    (run,) = compare(config, tmp_path / "parts", resume=True, on_event=events.append).runs
    assert measured(run) == measured(expected)
    assert run.message == expected.message
    assert not [event for event in events if isinstance(event, StepsDone)]
    name = "ln-pre-seed0/metrics.csv"
    assert without_times(tmp_path / "parts" / name) == without_times(tmp_path / "whole" / name)


def test_folder_with_other_runs_is_not_overwritten(
    whole: tuple[ComparisonSettings, Path],
) -> None:
    config, out = whole
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with pytest.raises(InputError, match=r"holds other runs \(ln-pre-seed0.*--resume.*--force"):
        compare(config, out)
    with pytest.raises(InputError, match="choose one"):
        compare(config, out, resume=True, force=True)
    other = replace(config, optimizer=OptimizerSettings(learning_rate=0.5))
    with pytest.raises(InputError, match=r"optimizer.learning_rate 0.01 → 0.5"):
        compare(other, out, resume=True)
    option = replace(config, norm_options={"rbn": {"mean_penalty": 7.0}})
    with pytest.raises(InputError, match=r"rbn-pre.*norm_options.mean_penalty None → 7.0"):
        compare(option, out, resume=True)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_force_deletes_runs_and_nothing_else(configure: Configure, tmp_path: Path) -> None:
    compare(configure(norms=("ln",)), tmp_path)
    (tmp_path / "report.html").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder").mkdir()
    results = compare(configure(norms=("rms",)), tmp_path, force=True)
    assert [run.norm for run in results.runs] == ["rms"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "notes.txt",
        "folder",
        "rms-pre-seed0",
        "comparison.json",
        "results.json",
        "work.json",
    }


def test_resume_adds_norms_to_a_comparison(configure: Configure, tmp_path: Path) -> None:
    compare(configure(norms=("ln",)), tmp_path)
    results = compare(configure(norms=("rms",)), tmp_path, resume=True)
    assert [run.norm for run in results.runs] == ["rms", "ln"]


def test_damaged_result_is_named(configure: Configure, tmp_path: Path) -> None:
    config = configure()
    compare(config, tmp_path)
    for content in ("", "{", "[]", "{}"):
        (tmp_path / "ln-pre-seed0" / "result.json").write_text(content)
        with pytest.raises(InputError, match=r"result.json.*remove"):
            compare(config, tmp_path, resume=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norms": ("ln", "batchnorm")}, "unknown norm 'batchnorm'"),
        ({"norm_options": {"pn": {"speed": 3}}}, "speed"),
        ({"norm_options": {"layer": {}}}, "unknown norm 'layer'"),
        ({"norms": ("bn",), "norm_options": {"bn": {"groups": 3}}}, "3"),
    ],
)
def test_bad_norms_are_found_before_any_work(
    configure: Configure, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError, match=message):
        compare(configure(**changes), out)
    assert not out.exists()


def test_bad_data_and_folders_are_found_before_any_work(
    configure: Configure, tmp_path: Path
) -> None:
    config = configure()
    long = replace(config, data=replace(config.data, batch_size=10_000))
    with pytest.raises(InputError, match=r"lower data\.batch_size"):
        compare(long, tmp_path / "out")
    missing = replace(config, data=replace(config.data, path=str(tmp_path / "nowhere")))
    with pytest.raises(InputError, match="nowhere does not exist"):
        compare(missing, tmp_path / "out")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InputError, match="file is a file"):
        compare(config, file)
    with pytest.raises(InputError, match="cannot be written"):
        compare(config, file / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_that_is_not_there_is_named(configure: Configure, tmp_path: Path) -> None:
    config = configure(training=replace(TRAINING, accelerator="gpu"))
    with pytest.raises(InputError, match="finds no CUDA device"):
        compare(config, tmp_path / "out")


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_lower_precisions_train(configure: Configure, tmp_path: Path, precision: Any) -> None:
    config = configure(norms=("pn",), training=replace(TRAINING, precision=precision))
    (run,) = compare(config, tmp_path).runs
    assert run.status == "finished"
    losses = [float(r["train_loss"]) for r in rows(tmp_path / "pn-pre-seed0" / "metrics.csv")]
    assert losses[-1] < losses[0] - 0.5


def test_events_come_in_order(configure: Configure, tmp_path: Path) -> None:
    events: list[Event] = []
    compare(configure(), tmp_path, on_event=events.append)
    kinds = [type(event) for event in events]
    assert kinds[:2] == [DataPrepared, RunStarted]
    assert kinds[-1] is RunEnded
    assert [e.step for e in events if isinstance(e, StepsDone)] == [2, 4, 6, 8, 10, 12]
    assert [e.step for e in events if isinstance(e, Measured)] == [4, 8, 12]


def test_last_step_is_validated_whatever_the_interval(configure: Configure, tmp_path: Path) -> None:
    config = configure(training=replace(TRAINING, max_steps=7, validate_every=5, log_every=100))
    compare(config, tmp_path)
    metrics = rows(tmp_path / "ln-pre-seed0" / "metrics.csv")
    assert [(int(row["step"]), bool(row["valid_loss"])) for row in metrics] == [
        (5, True),
        (7, True),
    ]
    assert metrics[-1]["train_loss"]


def test_number_of_threads_is_set_for_the_comparison_only(
    configure: Configure, tmp_path: Path
) -> None:
    before = torch.get_num_threads()
    config = configure(training=replace(TRAINING, num_threads=before + 1))
    results = compare(config, tmp_path)
    assert results.settings["machine"]["num_threads"] == before + 1
    assert torch.get_num_threads() == before


def test_user_sees_no_warning_and_keeps_random_state(
    configure: Configure, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        compare(configure(norms=("ln", "bn")), tmp_path)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""
    assert [str(warning.message) for warning in seen] == []
    assert torch.equal(torch.get_rng_state(), state)
