import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import cast
from unittest.mock import patch

import pytest
import torch
from tiny_training import TRAINING, Configure
from torch import nn

from powernorm.data.batch import Batch
from powernorm.diagnosis import diagnose, evaluation_gap, training_inference_discrepancy
from powernorm.errors import InputError
from powernorm.lab.engine.events import Event, RunEnded, SettingStarted, StepsDone
from powernorm.training import losses, verdict_early, verdict_measures
from powernorm.training.trained_models import load_trained, run_data, training_batches
from powernorm.training.verdict_measures import measure_study
from powernorm.training.verdict_scores import half_split
from powernorm.training.verdict_settings import Phase, Setting, VerdictStudy
from powernorm.training.verdict_study import train_study
from powernorm.verdict_runs import (
    EARLY_QUANTITIES,
    GapRecord,
    VerdictResults,
    VerdictSetting,
)

NUM_BATCHES = 4
TRAINED = replace(TRAINING, early_checkpoint=0.25, tid_batches=0, monitor_every=0)


def tiny_study(configure: Configure, *phases: Phase) -> VerdictStudy:
    """Four settings of a second, two of each task."""

    def setting(task: str, rows: int) -> Setting:
        config = replace(configure(training=TRAINED), task=task)
        config = replace(config, data=replace(config.data, batch_size=rows))
        return Setting(f"{task}-{rows}", task, config)

    settings = tuple(setting(task, rows) for rows in (4, 16) for task in ("lm", "mlm"))
    return VerdictStudy("tiny", settings, phases, num_batches=NUM_BATCHES)


BOTH = Phase(("ln", "bn"), (0,))
OTHERS = (Phase(("pn",), (0,)), Phase(("ln", "bn"), (1,)))


@pytest.fixture(scope="module")
def module_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verdict")


@pytest.fixture
def whole(configure: Configure, module_folder: Path) -> tuple[VerdictStudy, Path, list[Event]]:
    """A study that was interrupted once and then trained and measured, made once."""
    study, out = tiny_study(configure, BOTH, *OTHERS), module_folder / "whole"
    events: list[Event] = []
    if not out.exists():

        def stop(event: Event) -> None:
            if isinstance(event, StepsDone) and (event.norm, event.step) == ("bn", 6):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train_study(study, out, on_event=stop)
        train_study(study, out, resume=True, on_event=events.append)
        measure_study(study, out)
    return study, out, events


def mean_nll(model: nn.Module, batch: Batch) -> tuple[float, int]:
    found = losses.token_nll(model(**batch.inputs()), batch.targets)
    return float(found) / batch.num_targets, batch.num_targets


def results_of(out: Path) -> VerdictResults:
    results: VerdictResults = json.loads((out / "verdict.json").read_text())
    return results


def test_phases_come_one_after_the_other_and_nothing_twice(
    whole: tuple[VerdictStudy, Path, list[Event]],
) -> None:
    study, out, events = whole
    if events:
        started = [event for event in events if isinstance(event, SettingStarted)]
        assert [event.norms for event in started] == [("ln", "bn")] * 4 + [("pn",)] * 4 + [
            ("ln", "bn")
        ] * 4
        assert [event.index for event in started] == list(range(1, 13))
    again: list[Event] = []
    train_study(study, out, resume=True, on_event=again.append)
    assert not again
    assert len(list(out.glob("*/*/result.json"))) == 4 * 5


def test_a_later_phase_goes_on_without_the_earlier(configure: Configure, tmp_path: Path) -> None:
    first = replace(tiny_study(configure, BOTH), settings=tiny_study(configure, BOTH).settings[:1])
    train_study(first, tmp_path)
    events: list[Event] = []
    train_study(
        replace(first, phases=(BOTH, OTHERS[0])), tmp_path, resume=True, on_event=events.append
    )
    ended = [event.result["norm"] for event in events if isinstance(event, RunEnded)]
    assert ended == ["pn"]


def test_final_gaps_are_differences_of_the_runs(
    whole: tuple[VerdictStudy, Path, list[Event]],
) -> None:
    _, out, _ = whole
    for setting in results_of(out)["settings"]:
        runs = {
            (run["norm"], run["seed"]): run["metrics"]
            for run in json.loads((out / setting["name"] / "results.json").read_text())["runs"]
        }
        assert setting["gaps"]["bn"]["seeds"] == [0, 1]
        assert setting["gaps"]["pn"]["seeds"] == [0]
        assert "rbn" not in setting["gaps"]
        for index, seed in enumerate((0, 1)):
            for split in ("valid", "test"):
                expected = runs["bn", seed][f"{split}_loss"] - runs["ln", seed][f"{split}_loss"]
                found = setting["gaps"]["bn"]["test" if split == "test" else "valid"][index]
                assert found == pytest.approx(expected)


def test_early_quantities_are_those_of_the_early_checkpoints(
    whole: tuple[VerdictStudy, Path, list[Event]],
) -> None:
    _, out, _ = whole
    for setting in results_of(out)["settings"]:
        assert tuple(setting["early"]) == EARLY_QUANTITIES
        early = {
            norm: load_trained(out / setting["name"] / f"{norm}-pre-seed0/checkpoints/early.ckpt")
            for norm in ("ln", "bn")
        }
        batches = training_batches(early["ln"].settings, NUM_BATCHES)
        report = diagnose(early["ln"].model, batches, batch_sizes=())
        last = report.rows[-1]
        assert last.mean_tid is not None
        assert last.var_tid is not None
        assert setting["early"]["ln_mean_tid_last"] == pytest.approx(last.mean_tid)
        total = last.mean_tid + last.var_tid
        assert setting["early"]["ln_total_tid_last"] == pytest.approx(total)
        tid = training_inference_discrepancy(early["bn"].model, batches).summary()
        assert tid is not None
        assert setting["early"]["bn_var_tid_avg"] == pytest.approx(tid["var_avg"])
        assert setting["early_step"] == 3
        assert setting["early"]["bn_gap"] is not None
        assert setting["early"]["pn_gap"] is not None
        assert setting["early"]["rbn_gap"] is None
        losses = evaluation_gap(
            early["bn"].model, list(run_data(early["bn"].settings).evaluation("valid")), mean_nll
        )
        assert losses is not None
        batch_gap = setting["early"]["bn_gap"] - losses.gap
        assert setting["early"]["bn_batch_gap"] == pytest.approx(batch_gap, rel=1e-4)
        assert abs(losses.gap) > 1e-3
        assert (
            setting["tokens_per_batch"] == run_data(early["ln"].settings).segments.tokens_per_batch
        )


def test_scores_name_every_predictor_once_a_norm(
    whole: tuple[VerdictStudy, Path, list[Event]],
) -> None:
    _, out, _ = whole
    results = results_of(out)
    names = [(score["norm"], score["predictor"]) for score in results["scores"]]
    assert len(names) == len(set(names))
    assert {norm for norm, _ in names} == {"bn", "pn"}
    for rival in (
        "early_gap",
        "early_gap > 0",
        "early_gap_batch",
        "early_gap_batch > 0",
        "tokens_per_batch",
        "majority",
        "verdict",
    ):
        assert ("bn", rival) in names
    assert len(results["choosing"]) == 2
    assert {name.partition("-")[0] for name in results["choosing"]} == {"lm", "mlm"}


def test_what_was_measured_is_not_measured_again(
    whole: tuple[VerdictStudy, Path, list[Event]],
) -> None:
    study, out, _ = whole
    before = results_of(out)
    with patch.object(verdict_early, "load_trained", side_effect=AssertionError):
        measure_study(study, out)
    assert results_of(out) == before


@pytest.fixture
def copied(whole: tuple[VerdictStudy, Path, list[Event]], tmp_path: Path) -> Path:
    """The study with its checkpoints, to be damaged."""
    return Path(shutil.copytree(whole[1], tmp_path / "copy"))


def early_checkpoint(out: Path, run: str = "bn-pre-seed0") -> Path:
    return out / "lm-4" / run / "checkpoints" / "early.ckpt"


def lose(run: Path) -> None:
    """Write the result of a run that ended in NaN."""
    result = json.loads((run / "result.json").read_text())
    result |= {"status": "nonfinite", "metrics": dict.fromkeys(result["metrics"])}
    (run / "result.json").write_text(json.dumps(result))


def fill_with_nan(path: Path) -> None:
    checkpoint = torch.load(path, weights_only=False)
    for tensor in checkpoint["state_dict"].values():
        if tensor.is_floating_point():
            tensor.fill_(math.nan)
    torch.save(checkpoint, path)


def test_another_checkpoint_of_the_same_seed_is_measured_anew(
    whole: tuple[VerdictStudy, Path, list[Event]], copied: Path
) -> None:
    before = results_of(copied)["settings"]
    path = early_checkpoint(copied)
    path.write_bytes(early_checkpoint(copied, "bn-pre-seed1").read_bytes())
    measure_study(whole[0], copied)
    after = results_of(copied)["settings"]
    assert after[0]["early"]["bn_gap"] != before[0]["early"]["bn_gap"]
    assert after[0]["early"]["bn_var_tid_last"] != before[0]["early"]["bn_var_tid_last"]
    assert after[0]["early"]["ln_var_tid_last"] == before[0]["early"]["ln_var_tid_last"]
    assert after[1:] == before[1:]


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("norm", ["bn", "ln"])
def test_a_setting_with_a_lost_run_does_not_stop_the_others(
    whole: tuple[VerdictStudy, Path, list[Event]], copied: Path, norm: str, *, is_kept: bool
) -> None:
    before = results_of(copied)["settings"]
    path = early_checkpoint(copied, f"{norm}-pre-seed0")
    lose(path.parent.parent)
    if is_kept:
        fill_with_nan(path)
    else:
        path.unlink()
    results = measure_study(whole[0], copied)
    lost = results["settings"][0]
    assert results["settings"][1:] == before[1:]
    assert lost["tokens_per_batch"] == before[0]["tokens_per_batch"]
    assert lost["early"]["bn_gap"] is None
    assert lost["early"]["bn_batch_gap"] is None
    assert lost["early"][f"{norm}_var_tid_last"] is None
    assert (lost["advice"] is None) == (norm == "ln")
    record = lost["gaps"]["bn"]
    assert record["seeds"] == [1]
    assert (record["num_lost"], record["num_base_lost"]) == ((1, 0) if norm == "bn" else (0, 1))
    (case,) = [c for c in verdict_measures._cases("bn", results["settings"]) if c.name == "lm-4"]
    assert case.gap == (math.inf if norm == "bn" else -math.inf)
    assert case.is_clear
    assert {score["num_settings"] for score in results["scores"]} >= {4}


def test_a_finished_run_without_its_early_checkpoint_is_refused(
    whole: tuple[VerdictStudy, Path, list[Event]], copied: Path
) -> None:
    early_checkpoint(copied).unlink()
    with pytest.raises(InputError, match=r"early\.ckpt is no run"):
        measure_study(whole[0], copied)


def test_force_leaves_no_verdict_of_the_old_runs(
    whole: tuple[VerdictStudy, Path, list[Event]], copied: Path
) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, SettingStarted):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_study(whole[0], copied, force=True, on_event=stop)
    assert not (copied / "verdict.json").exists()
    assert not list(copied.glob("*/*/result.json"))


def test_the_division_is_one_for_all_norms(whole: tuple[VerdictStudy, Path, list[Event]]) -> None:
    study, out, _ = whole
    choosing = set(results_of(out)["choosing"])
    for score in results_of(out)["scores"]:
        assert score["num_scored"] == 4 - len(choosing)
    assert choosing == {setting.name for setting in half_split(study.settings, 0)[0]}


def test_advice_to_swap_the_lowest_layers_counts_as_keeping() -> None:
    def record(gap: float) -> GapRecord:
        return {"valid": [gap], "test": [gap], "seeds": [0], "num_lost": 0, "num_base_lost": 0}

    def setting(advice: str | None, **gaps: float) -> VerdictSetting:
        found = {norm: record(gap) for norm, gap in gaps.items()}
        return cast(VerdictSetting, {"advice": advice, "gaps": found})

    rows = verdict_measures._advice_scores(
        [
            setting("lowest 2 to bn", bn=0.5, rbn=-0.5, pn=0.5),
            setting("rbn", bn=0.5, rbn=-0.5, pn=0.5),
            setting("rbn", bn=0.5, rbn=-0.5),
            setting(None, bn=0.5, rbn=-0.5, pn=0.5),
        ]
    )
    assert rows[0] == {"rule": "advice", "num_settings": 2, "num_no_worse": 2, "num_best": 1}


def test_settings_that_are_not_trained_yet_are_left_out(
    configure: Configure, tmp_path: Path
) -> None:
    study = tiny_study(configure, BOTH)
    train_study(replace(study, settings=study.settings[:1]), tmp_path)
    results = measure_study(study, tmp_path)
    assert [setting["name"] for setting in results["settings"]] == ["lm-4"]
    assert results["scores"] == []


def test_a_norm_whose_loss_was_lost_counts_as_worse() -> None:
    finite = {"test_loss": 1.0, "valid_loss": 1.0}
    lost = dict.fromkeys(finite)

    def runs(*metrics: dict[str, float | None]) -> dict[int, dict[str, dict[str, float | None]]]:
        return {seed: {"metrics": one} for seed, one in enumerate(metrics)}

    record: GapRecord = verdict_measures._gap(runs(finite, finite), runs(lost, finite))  # type: ignore[arg-type]
    assert (record["seeds"], record["test"], record["num_lost"]) == ([1], [0.0], 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: replace(s, settings=(s.settings[0], s.settings[0])), "the same name"),
        (lambda s: replace(s, phases=(Phase(("lnn",), (0,)),)), "lnn"),
    ],
)
def test_studies_that_cannot_be_trained_are_refused_before_the_first_run(
    configure: Configure,
    tmp_path: Path,
    change: object,
    message: str,
) -> None:
    study = change(tiny_study(configure, BOTH))  # type: ignore[operator]
    with pytest.raises(InputError, match=message):
        train_study(study, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_setting_without_an_early_checkpoint_is_refused(
    configure: Configure, tmp_path: Path
) -> None:
    study = tiny_study(configure, BOTH)
    plain = Setting("plain", "lm", configure())
    with pytest.raises(InputError, match=r"setting plain keeps no early checkpoint"):
        train_study(replace(study, settings=(plain,)), tmp_path)


def test_runs_that_are_there_are_not_lost_by_accident(
    whole: tuple[VerdictStudy, Path, list[Event]],
) -> None:
    study, out, _ = whole
    with pytest.raises(InputError, match="--resume to go on"):
        train_study(study, out)
