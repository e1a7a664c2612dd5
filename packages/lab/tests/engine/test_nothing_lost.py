"""Foreign files are kept, and unusable folders are refused before the training."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import powernorm_lab as lab
from powernorm.errors import InputError
from powernorm_lab import comparing
from powernorm_lab.engine import folders
from powernorm_lab.engine.executors.choice import Workers
from powernorm_lab.engine.run import Run
from powernorm_lab.engine.stopping import Stopped


def train(run: Run, *, steps: int = 2) -> dict[str, Any]:
    run.track(norm=run.build_norm(4))
    for step, _ in run.steps([None] * steps):
        run.log(step, train_loss=1.0)
    return {"loss": 1.0}


def compared(out: Path, **changes: Any) -> lab.Comparison:
    chosen: dict[str, Any] = {"norms": ["ln", "bn"], "goal": {"loss": "min"}, "device": "cpu"}
    return lab.compare(train, out, **{**chosen, "num_threads": 1, "quiet": True, **changes})


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"force": True}])
def test_a_folder_that_is_no_run_is_refused_with_what_it_holds(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    mine = tmp_path / "bn-seed0"
    (mine / "plots").mkdir(parents=True)
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match=r"bn-seed0 is no run and holds plots, thesis.txt: move"):
        compared(tmp_path, **options)
    assert (mine / "thesis.txt").read_text() == "years of work"
    # Nothing was trained, not even the norm before it, and no files are left.
    assert [path.name for path in tmp_path.iterdir()] == ["bn-seed0"]


def test_a_file_in_the_place_of_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bn-seed0").write_text("notes")
    with pytest.raises(InputError, match="bn-seed0 is a file"):
        compared(tmp_path)
    assert (tmp_path / "bn-seed0").read_text() == "notes"


def test_what_a_process_left_that_was_killed_early_is_no_obstacle(tmp_path: Path) -> None:
    begun = tmp_path / "bn-seed0"
    begun.mkdir()
    drafts = [begun / f".{name}.0123456789abcdef" for name in ("lease.json", "config.json")]
    for path in (begun / ".lock", *drafts):
        path.write_text("")
    compared(tmp_path)
    assert not any(path.exists() for path in drafts)


def test_hidden_files_of_others_stay(tmp_path: Path) -> None:
    compared(tmp_path)
    run = tmp_path / "bn-seed0"
    mine = [run / ".notes", run / "checkpoints" / ".keep", tmp_path / ".results.json.bak"]
    draft = run / "checkpoints" / ".last.ckpt.0123456789abcdef"
    for path in (*mine, draft):
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    compared(tmp_path, resume=True)
    assert all(path.exists() for path in mine)
    assert not draft.exists()


@pytest.mark.parametrize("option", ["resume", "force"])
def test_a_model_of_another_library_beside_the_runs_stays(tmp_path: Path, option: str) -> None:
    model = tmp_path / "bert"
    model.mkdir()
    files = {name: model / name for name in ("config.json", "model.safetensors")}
    for name, path in files.items():
        path.write_text(name)
    compared(tmp_path)
    compared(tmp_path, **{option: True})
    assert {name: path.read_text() for name, path in files.items()} == {n: n for n in files}


@pytest.mark.parametrize("option", ["resume", "force"])
def test_a_deletion_that_was_interrupted_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """The settings, which identify a run's folder, are deleted last."""
    compared(tmp_path)
    run = tmp_path / "bn-seed0"
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    (run / "result.json").unlink()
    real = Path.unlink

    def killed(path: Path, missing_ok: bool = False) -> None:
        real(path, missing_ok)
        if path.parent == run and path.name not in folders.KEPT:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            compared(tmp_path, **{option: True})
    assert [one.status for one in compared(tmp_path, **{option: True}).runs] == ["finished"] * 2


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    """It may be of another seed, norm or comparison; moving a whole folder is allowed."""
    compared(tmp_path / "a", seeds=2)
    compared(tmp_path / "b", settings={"steps": 3})
    last = tmp_path / "a" / "bn-seed0" / "checkpoints" / "last.ckpt"
    own = last.read_bytes()
    others = {
        tmp_path / "a" / "bn-seed1": "seed 1, not 0",
        tmp_path / "a" / "ln-seed0": "norm ln, not bn",
        tmp_path / "b" / "bn-seed0": "settings [0-9a-f]+, not",
    }
    for folder, words in others.items():
        shutil.copy(folder / "checkpoints" / "last.ckpt", last)
        with pytest.raises(InputError, match=rf"last.ckpt is of another run \(.*{words}"):
            lab.saved_states(last.parents[1])
        (last.parents[1] / "result.json").unlink(missing_ok=True)
        with pytest.raises(InputError, match="is of another run"):
            compared(tmp_path / "a", seeds=2, resume=True)
    last.write_bytes(own)
    (tmp_path / "a").rename(tmp_path / "c")
    assert set(lab.saved_states(tmp_path / "c" / "bn-seed0")) == {"norm"}


def test_a_signal_while_workers_are_started_is_a_schedulers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray has replaced the handler of SIGTERM by then."""

    class Executor:
        closed = False

        def close(self) -> None:
            self.closed = True

    executor = Executor()

    def start(*_: object) -> Executor:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
        return executor

    def shown(*_: object) -> Any:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Workers, "start_executor", start)
    monkeypatch.setattr(comparing, "shown", shown)
    with pytest.raises(Stopped):
        compared(tmp_path, executor="ray")
    assert executor.closed
