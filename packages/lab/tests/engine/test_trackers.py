import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from powernorm.errors import InputError
from powernorm_lab.engine.trackers import TRACKERS, Trackers, check_trackers

Patch = pytest.MonkeyPatch
NAME = "norm/encoder.layers.0.norm/share (%)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "my comparison" / "bn-pre-seed0"


def log(name: str, folder: Path, steps: range, last_step: int | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    trackers = Trackers([name], folder)
    for step in steps:
        trackers.log({"loss": 1 / step, NAME: step}, step=step, last_step=last_step)
    trackers.close()


def fake(patch: Patch, name: str) -> Any:
    patch.setitem(sys.modules, name, MagicMock(__spec__=ModuleSpec(name, None, origin="fake")))
    return sys.modules[name]


def test_tensorboard_keeps_what_was_before_the_checkpoint(folder: Path) -> None:
    log("tensorboard", folder, range(1, 6))
    log("tensorboard", folder, range(5, 7), last_step=4)
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(folder / "tensorboard"))
    shown = {event.step: event.value for event in events.Reload().Scalars("loss")}
    assert shown == pytest.approx({step: 1 / step for step in range(1, 7)})


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match="'aim': choose among tensorboard, wandb, mlflow, trackio"):
        check_trackers(["tensorboard", "aim"])


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_named(folder: Path, monkeypatch: Patch, name: str) -> None:
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(folder)])
    (folder / name).mkdir(parents=True)  # a folder of the tracker's files is not its package
    message = f"needs the package {name}: pip install {name}"
    with pytest.raises(InputError, match=message):
        check_trackers([name])
    with pytest.raises(InputError, match=message):
        TRACKERS[name](folder, None)


def test_wandb_is_given_ids_and_steps(folder: Path, monkeypatch: Patch) -> None:
    wandb = fake(monkeypatch, "wandb")
    log("wandb", folder, range(1, 3))
    log("wandb", folder, range(3, 4), last_step=2)
    log("wandb", folder, range(1, 2))
    first, second, third = (made.kwargs for made in wandb.init.call_args_list)
    assert (first["project"], first["name"]) == ("my comparison", "bn-pre-seed0")
    assert (first["resume"], first["reinit"]) == ("allow", "create_new")
    assert first["id"] == second["id"] != third["id"]
    logged = wandb.init.return_value.log.call_args_list
    assert logged[2] == call({"loss": 1 / 3, NAME: 3}, step=3)


def test_mlflow_is_given_tags_and_steps(folder: Path, monkeypatch: Patch) -> None:
    mlflow = fake(monkeypatch, "mlflow")
    client = mlflow.MlflowClient.return_value
    client.get_experiment_by_name.return_value = None
    client.create_experiment.return_value = "7"
    client.search_runs.return_value = []
    log("mlflow", folder, range(1, 2))
    experiment, _, tags, name = client.create_run.call_args.args
    assert (experiment, name) == ("7", "bn-pre-seed0")
    assert client.search_runs.call_args.args[1] == f"tags.powernorm = '{tags['powernorm']}'"
    assert mlflow.entities.Metric.call_args.args[0] == "norm/encoder.layers.0.norm/share ___"
    client.set_terminated.assert_called_once_with(client.create_run.return_value.info.run_id)


def test_trackio_is_told_to_resume(folder: Path, monkeypatch: Patch) -> None:
    trackio = fake(monkeypatch, "trackio")
    log("trackio", folder, range(1, 2))
    log("trackio", folder, range(2, 3), last_step=1)
    assert [made.kwargs["resume"] for made in trackio.init.call_args_list] == ["never", "allow"]
    trackio.init.return_value.log.assert_called_with({"loss": 1 / 2, NAME: 2}, step=2)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
@pytest.mark.filterwarnings("ignore")
def test_real_trackers_go_on(folder: Path, monkeypatch: Patch, name: str) -> None:
    places = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}.db", "TRACKIO_DIR": f"{folder}-trackio"}
    for variable, value in {"WANDB_MODE": "offline", **places}.items():
        monkeypatch.setenv(variable, value)
    module: Any = pytest.importorskip(name)
    log(name, folder, range(1, 4))
    log(name, folder.with_name("ln-seed0"), range(1, 3))
    log(name, folder, range(3, 5), last_step=2)
    if name == "wandb":
        ids = [path.name.rpartition("-")[2] for path in folder.glob("wandb/offline-run-*")]
        assert ids == 2 * [(folder / "wandb.id").read_text()]
    elif name == "mlflow":
        client = module.MlflowClient()
        experiment = client.get_experiment_by_name("my comparison").experiment_id
        runs = {run.info.run_name: run for run in client.search_runs([experiment])}
        history = client.get_metric_history(runs[folder.name].info.run_id, "loss")
        assert (len(runs), [m.step for m in history]) == (2, [1, 2, 3, 3, 4])
    else:
        storage = import_module("trackio.sqlite_storage").SQLiteStorage
        rows = storage.get_logs("my comparison", folder.name)
        assert [row["step"] for row in rows] == [1, 2, 3, 3, 4]


def test_all_are_closed_where_one_cannot_be(folder: Path, monkeypatch: Patch) -> None:
    wandb, trackio = (fake(monkeypatch, name) for name in ("wandb", "trackio"))
    trackio.init.return_value.finish.side_effect = OSError
    folder.mkdir(parents=True)
    trackers = Trackers(["wandb", "trackio"], folder)
    trackers.log({"loss": 1}, step=1, last_step=None)
    with pytest.raises(OSError):  # noqa: PT011
        trackers.close()
    wandb.init.return_value.finish.assert_called_once()
