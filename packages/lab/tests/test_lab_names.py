"""`powernorm_lab` imports lazily, and has all of its public names."""

import subprocess
import sys
from pathlib import Path

import pytest

import powernorm_lab as lab
from powernorm_lab.runs import TASKS


def test_import_loads_nothing() -> None:
    code = "import sys, powernorm_lab; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", lab.__all__)
def test_names_are_there(name: str) -> None:
    assert getattr(lab, name).__name__ == name


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match=r"'powernorm_lab' has no attribute 'train_all'"):
        _ = lab.train_all


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "folders", "heavy"),
    [
        (("mine:train", "--goal", "loss:min"), set(), {"torch._dynamo", "torchmetrics"}),
        (
            ("lm", "--preset", "smoke", "--set", "training.max_steps=2"),
            {"lm"},
            {"torchmetrics"},  # the compiler comes with torch's optimizers
        ),
    ],
)
def test_a_comparison_imports_no_other_task(
    tmp_path: Path,
    text_file: Path,
    arguments: tuple[str, ...],
    folders: set[str],
    heavy: set[str],
) -> None:
    """Each task has its own libraries, and no command waits for what it does not need."""
    (tmp_path / "mine.py").write_text("def train(run):\n    return {'loss': len(run.norm)}\n")
    command = ["powernorm", "compare", *arguments, "--norms", "ln", "--out", "out", "--quiet"]
    if folders:
        command += ["--data", str(text_file)]
    code = (
        f"import sys, contextlib\nsys.argv = {command}\nfrom powernorm.cli import main\n"
        "with contextlib.suppress(SystemExit): main()\nprint(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert (tmp_path / "out" / "results.json").exists(), done.stderr
    tasks = {name.replace("-", "_") for name in TASKS}
    modules = set(done.stdout.split())
    parts = (name.split(".") for name in modules if name.startswith("powernorm_lab.tasks."))
    assert {part[2] for part in parts} & tasks == folders
    assert not heavy & modules
