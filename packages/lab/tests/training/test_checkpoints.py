"""Checkpoints of stopped runs, and how exactly runs resume from them."""

import errno
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
from lab.tests.training.tiny_training import compare
from safetensors import SafetensorError
from same_runs import assert_readable, assert_same_run
from tiny_translation import tiny_translation

from forking import own_packages
from powernorm.errors import InputError
from powernorm_lab.engine import folders, state
from powernorm_lab.engine.events import Event, StepsDone
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.tasks.translation.translator import load_translator


def fail_at(step: int, error: type[BaseException]) -> Callable[[Event], None]:
    def listen(event: Event) -> None:
        if isinstance(event, StepsDone) and event.step >= step:
            raise error("stopped by the test")

    return listen


def test_weights_from_after_the_checkpoint_are_forgotten(pairs: Path, tmp_path: Path) -> None:
    """A run that is killed between its snapshot and its checkpoint does not average it twice."""
    config = tiny_translation(pairs, training={"average_checkpoints": 2, "max_steps": 16})
    compare(config, tmp_path / "whole")
    out = tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt):
        compare(config, out, on_event=fail_at(10, KeyboardInterrupt))
    folder = out / "ln-pre-seed0" / "checkpoints"
    assert (folder / "step-8.safetensors").exists()
    for step in (9, 12, 400):
        shutil.copyfile(folder / "step-8.safetensors", folder / f"step-{step}.safetensors")
    compare(config, out, resume=True)
    assert_same_run(tmp_path / "whole" / "ln-pre-seed0", out / "ln-pre-seed0")


# A full disk -------------------------------------------------------------------------------------


def no_space(*args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_space_in_safetensors(*args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    raise SafetensorError("I/O error: No space left on device (os error 28)")


def from_call(number: int, function: Any, failing: Any) -> Any:
    """Return a function that fails from its call with this number on."""
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return (function if calls < number else failing)(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("owner", "name", "failing"),
    [
        (state, "save_sealed", no_space),
        (safetensors.torch, "save_file", no_space_in_safetensors),
        (state.shutil, "copyfileobj", no_space),
        (Path, "replace", no_space),
    ],
    ids=["checkpoint", "weights", "copy", "rename"],
)
def test_full_disk_while_a_checkpoint_is_written(
    pairs: Path, tmp_path: Path, owner: Any, name: str, failing: Any
) -> None:
    config = tiny_translation(pairs, training={"average_checkpoints": 2, "log_every": 1})
    compare(config, tmp_path / "whole")
    out = tmp_path / "out"
    folder = out / "ln-pre-seed0" / "checkpoints"
    is_full = False
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        touches = any(str(folder) in str(value) for value in args)
        return (failing if is_full and touches else real)(*args, **kwargs)

    def fill(event: Event) -> None:
        nonlocal is_full
        is_full = is_full or (isinstance(event, StepsDone) and event.step == 6)

    with patch.object(owner, name, call), pytest.raises(InputError) as caught:
        compare(config, out, on_event=fill)
    message = str(caught.value)
    assert str(folder.parent) in message
    assert "No space left on device" in message
    assert "--resume" in message
    assert not list(folder.glob(".*"))
    assert_readable(out)
    assert torch.load(folder / "last.ckpt", weights_only=True)["step"] == 4
    (run,) = compare(config, out, resume=True).runs
    assert run.status == "finished"
    assert_same_run(tmp_path / "whole" / "ln-pre-seed0", out / "ln-pre-seed0")


def compare_on_a_small_disk(config: ComparisonSettings, out: Path, said: Path) -> None:
    """Run in a separate process, because torch's state is undefined after a failed write."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(event: Event) -> None:
        if isinstance(event, StepsDone) and event.step == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

    try:
        compare(config, out, on_event=fill)
    except InputError as error:
        said.write_text(str(error))
    os._exit(0)


def test_a_write_that_the_system_cuts_short(pairs: Path, tmp_path: Path) -> None:
    said = tmp_path / "said.txt"
    with own_packages():
        process = multiprocessing.get_context("forkserver").Process(
            target=compare_on_a_small_disk, args=(tiny_translation(pairs), tmp_path, said)
        )
        process.start()
    process.join(240)
    assert process.exitcode == 0
    assert "cannot be written (File too large): make room" in said.read_text()
    folder = tmp_path / "ln-pre-seed0" / "checkpoints"
    assert (folder / "last.ckpt").stat().st_size > 20_000
    assert torch.load(folder / "last.ckpt", weights_only=True)["step"] == 4
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("file", ["metrics.csv", "result.json", "translations.tsv", "average"])
def test_full_disk_elsewhere(pairs: Path, tmp_path: Path, file: str) -> None:
    config = tiny_translation(pairs, training={"average_checkpoints": 2})
    if file == "metrics.csv":
        failing = patch("powernorm_lab.engine.logs.CsvLog.write", from_call(4, print, no_space))
    elif file == "average":
        real, full = safetensors.torch.save_file, no_space_in_safetensors
        failing = patch.object(safetensors.torch, "save_file", from_call(4, real, full))
    else:

        def write(path: Path, content: str) -> None:
            if path.name == file:
                no_space()
            path.write_text(content)

        failing = patch.object(folders, "write", write)
    with failing, pytest.raises(InputError, match="No space left on device"):
        compare(config, tmp_path)
    (run,) = compare(config, tmp_path, resume=True).runs
    assert run.status == "finished"


# Damaged files -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(
    pairs: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ComparisonSettings, Path]:
    config = tiny_translation(pairs, training={"average_checkpoints": 2})
    out = tmp_path_factory.mktemp("finished") / "out"
    compare(config, out)
    return config, out


@pytest.fixture
def unscored(
    finished: tuple[ComparisonSettings, Path], tmp_path: Path
) -> tuple[ComparisonSettings, Path, Path]:
    """Return a copy of a run that was interrupted before scoring, and its checkpoints."""
    config, out = finished
    copy = tmp_path / "out"
    shutil.copytree(out, copy)
    (copy / "ln-pre-seed0" / "result.json").unlink()
    return config, copy, copy / "ln-pre-seed0" / "checkpoints"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def refusal(config: ComparisonSettings, out: Path) -> str:
    with pytest.raises(InputError) as caught:
        compare(config, out, resume=True)
    message = str(caught.value)
    assert len(message) < 400, message
    assert "remove" in message
    return message


@pytest.mark.parametrize("content", [None, b"", b"no checkpoint", b"PK\x03\x04 half a zip"])
def test_damaged_checkpoint(
    unscored: tuple[ComparisonSettings, Path, Path], content: bytes | None
) -> None:
    config, out, folder = unscored
    if content is None:
        truncate(folder / "last.ckpt")
    else:
        (folder / "last.ckpt").write_bytes(content)
    expected = "is damaged" if content is None else "is (not a checkpoint|damaged)"
    assert re.search(rf"{folder / 'last.ckpt'} {expected}", refusal(config, out))


class Evil:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("name", ["last.ckpt", "best.ckpt"])
@pytest.mark.parametrize("as_zip", [True, False])
def test_nothing_in_a_checkpoint_is_executed(
    unscored: tuple[ComparisonSettings, Path, Path], tmp_path: Path, name: str, as_zip: bool
) -> None:
    config, out, folder = unscored
    trace = tmp_path / "executed"
    content = {"format": state.FORMAT, "states": {"model": Evil(trace)}}
    if as_zip:
        torch.save(content, folder / name)
    else:
        (folder / name).write_bytes(pickle.dumps(content))
    if name == "best.ckpt":
        with pytest.raises(InputError, match=r"best\.ckpt is not a checkpoint"):
            load_translator(folder / name)
    else:
        assert f"{folder / name} is not a checkpoint of a run" in refusal(config, out)
    assert not trace.exists()


def test_checkpoints_of_another_recipe(
    unscored: tuple[ComparisonSettings, Path, Path], pairs: Path, tmp_path: Path
) -> None:
    config, out, folder = unscored
    wide = tiny_translation(
        pairs, model={"num_features": 24}, training={"average_checkpoints": 2, "max_steps": 12}
    )
    compare(wide, tmp_path / "wide")
    others = tmp_path / "wide" / "ln-pre-seed0" / "checkpoints"
    before = (folder / "last.ckpt").read_bytes()
    shutil.copyfile(others / "last.ckpt", folder / "last.ckpt")
    message = refusal(config, out)
    assert f"{folder / 'last.ckpt'} is of another run" in message
    (folder / "last.ckpt").write_bytes(before)
    for path in others.glob("step-*"):
        shutil.copyfile(path, folder / path.name)
    assert f"{folder} holds the weights of another model" in refusal(config, out)


def test_best_checkpoint_of_another_recipe(pairs: Path, tmp_path: Path) -> None:
    for name, norm in (("one", "ln"), ("other", "bn")):
        compare(tiny_translation(pairs, norms=(norm,)), tmp_path / name)
    folder = tmp_path / "one" / "ln-pre-seed0"
    (folder / "result.json").unlink()
    best = folder / "checkpoints" / "best.ckpt"
    shutil.copyfile(tmp_path / "other" / "bn-pre-seed0" / "checkpoints" / "best.ckpt", best)
    message = refusal(tiny_translation(pairs), tmp_path / "one")
    assert f"{best} is of another run" in message
    best.unlink()
    assert f"{best} does not exist" in refusal(tiny_translation(pairs), tmp_path / "one")


def test_truncated_snapshot(unscored: tuple[ComparisonSettings, Path, Path]) -> None:
    config, out, folder = unscored
    truncate(folder / "step-8.safetensors")
    assert "step-8.safetensors is damaged" in refusal(config, out)
