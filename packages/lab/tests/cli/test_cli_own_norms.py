"""A custom norm on the command line, from a file in the working directory."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lab.tests.training.tiny_training import compare
from lab.tests.training.tiny_translation import tiny_translation, write_pairs

from commands import SMALL, Outcome, environment, powernorm, refusal
from powernorm.checksums import load_sealed, save_sealed
from powernorm_lab.engine.folders import owner_of, read_json
from powernorm_lab.tasks.translation.translator import load_translator

LAYERS = """
import torch
from torch import nn

class Soft(nn.Module):
    def __init__(self, size, slope: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.slope = slope
    def forward(self, x):
        return self.weight * torch.tanh(self.slope * x)

class Running(nn.BatchNorm1d):
    is_static = True
    def forward(self, x):
        return super().forward(x.flatten(0, -2)).view_as(x)

def build():
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
"""
NAMES = ("ln", "own.layers:Soft", "own.layers:Running")


def home_of(folder: Path) -> Path:
    (folder / "own").mkdir()
    (folder / "own" / "layers.py").write_text(LAYERS)
    return folder


def command(text_file: Path, *more: str) -> tuple[str | Path, ...]:
    return (
        *("compare", "lm", "--preset", "smoke", "--norms", ",".join(NAMES), "--data", text_file),
        *(*SMALL, "--set", "norm_options.own.layers:Soft.slope=2", *more),
    )


@pytest.fixture(scope="module")
def compared(
    tmp_path_factory: pytest.TempPathFactory, text_file: Path
) -> tuple[Path, Path, Outcome]:
    """Return the working directory, the folder of the comparison, and the command's outcome."""
    home = home_of(tmp_path_factory.mktemp("home"))
    outcome = powernorm(home, *command(text_file))
    assert outcome.code == 0, outcome.err
    return home, home / "runs" / "lm-smoke", outcome


def test_compared_with_ours(compared: tuple[Path, Path, Outcome]) -> None:
    _, folder, outcome = compared
    results = json.loads((folder / "results.json").read_text())
    assert [(run["norm"], run["status"]) for run in results["runs"]] == [
        (name, "finished") for name in NAMES
    ]
    assert [run["folder"] for run in results["runs"]] == [
        *("ln-pre-seed0", "own.layers+Soft-pre-seed0", "own.layers+Running-pre-seed0")
    ]
    assert results["settings"]["norm_options"]["own.layers:Soft"] == {"slope": 2}
    assert max(map(len, outcome.out.splitlines())) <= 80
    page = (folder / "report.html").read_text()
    for name in NAMES:
        assert name in outcome.out
        assert name in page


def test_resumed_and_reported(
    compared: tuple[Path, Path, Outcome], text_file: Path, tmp_path: Path
) -> None:
    home, folder, _ = compared
    outcome = powernorm(home, *command(text_file, "--resume"))
    assert outcome.code == 0, outcome.err
    assert outcome.err.count("from before") == len(NAMES)
    page = folder / "report.html"
    before = page.read_bytes()
    # A report only reads files, so that it needs no module.
    assert powernorm(tmp_path, "report", folder).code == 0
    assert page.read_bytes() == before


@pytest.mark.slow
def test_diagnosed_and_folded_in_a_new_process(
    compared: tuple[Path, Path, Outcome], tmp_path: Path
) -> None:
    home, folder, _ = compared
    run = folder / "own.layers+Running-pre-seed0"
    outcome = powernorm(home, "diagnose", run, "--batches", "2", "--trust-code", "--wide")
    assert outcome.code == 0, outcome.err
    assert len(re.findall(r"^\S+ +own\.layers:Running ", outcome.out, re.MULTILINE)) == 3
    outcome = powernorm(home, "fold", run, "--out", tmp_path / "folded", "--trust-code")
    assert outcome.code == 0, outcome.err
    assert "multiply-add" not in outcome.out
    assert (tmp_path / "folded" / "powernorm.safetensors").is_file()
    other = folder / "own.layers+Soft-pre-seed0"
    soft = refusal(home, "fold", other, "--trust-code")
    assert "holds no static norm to fold (it holds Soft)" in soft
    elsewhere = refusal(tmp_path, "fold", run, "--trust-code")
    assert "'own.layers:Running' cannot be loaded" in elsewhere
    assert "put its folder on PYTHONPATH" in elsewhere


EVIL = """
from pathlib import Path
Path("RAN").touch()
from own.layers import Running as Norm
from mine import Loading
"""


COMMANDS = {
    "diagnose": (),
    "fold": (),
    "remove": ("--out", "removed"),
}


@pytest.mark.parametrize(
    ("key", "command"),
    [*(("norm", one) for one in COMMANDS), ("qk_norm_type", "fold"), ("function", "fold")],
)
def test_a_name_in_a_file_imports_nothing(
    compared: tuple[Path, Path, Outcome], tmp_path: Path, key: str, command: str
) -> None:
    _, folder, _ = compared
    run = tmp_path / "run"
    shutil.copytree(folder / "ln-pre-seed0", run)
    config = read_json(run / "config.json")
    if key == "norm":
        config["norm"] = "evil:Norm"
    elif key == "function":
        config = {"function": {"name": "evil:Loading"}, "task": "evil:Loading", "norm": "ln"}
    else:
        config["model"] |= {"qk_norm": "per_head", key: "evil:Norm"}
    (run / "config.json").write_text(json.dumps(config))
    for path in (run / "checkpoints").glob("*.ckpt"):
        content = {**load_sealed(path, ""), "run": owner_of(run)}
        with path.open("wb") as file:
            save_sealed(content, file)
    (tmp_path / "evil.py").write_text(EVIL)
    outcome = powernorm(tmp_path, command, "run", *COMMANDS[command])
    assert not (tmp_path / "RAN").exists()
    assert "evil" in outcome.refused()
    assert "--trust-code" in outcome.err


def test_a_run_of_another_norm_imports_nothing_when_its_comparison_goes_on(
    compared: tuple[Path, Path, Outcome], text_file: Path, tmp_path: Path
) -> None:
    home, folder, _ = compared
    out = tmp_path / "out"
    shutil.copytree(folder, out)
    config = read_json(out / "ln-pre-seed0" / "config.json")
    (out / "evil+Norm-pre-seed0").mkdir()
    evil = json.dumps(config | {"norm": "evil:Norm"})
    (out / "evil+Norm-pre-seed0" / "config.json").write_text(evil)
    (tmp_path / "evil.py").write_text(EVIL)
    shutil.copytree(home / "own", tmp_path / "own")
    powernorm(tmp_path, *command(text_file, "--resume", "--out", str(out)))
    assert not (tmp_path / "RAN").exists()


def test_trusted_names_are_not_searched_in_the_current_folder(
    compared: tuple[Path, Path, Outcome],
) -> None:
    home, folder, _ = compared
    run = folder / "own.layers+Running-pre-seed0"
    code = "import sys; sys.path.remove(''); from powernorm.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "fold", str(run), "--trust-code"],
        capture_output=True,
        text=True,
        cwd=home,
        env=environment(home),
        check=False,
    )
    assert (done.returncode, "'own.layers:Running' cannot be loaded" in done.stderr) == (2, True)


def test_swapped_in_a_table(tmp_path: Path) -> None:
    home = home_of(tmp_path)
    outcome = powernorm(home, "swap", "own.layers:build", "--to", "own.layers:Soft")
    assert outcome.code == 0, outcome.err
    assert "1 of 1 norms change to own.layers:Soft" in outcome.out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own.layer:Soft", "No module named 'own.layer'"),
        ("own.layers:Sift", "has no attribute 'Sift'"),
        ("own/layers.py:Soft", "is not of the form my.module:MyNorm"),
        ("own.layers:build", "the layer of 'own.layers:build' has no positional argument"),
        ("soft", "unknown norm 'soft', known are ln,"),
    ],
)
def test_a_wrong_name_is_one_line(tmp_path: Path, text_file: Path, name: str, message: str) -> None:
    home = home_of(tmp_path)
    error = refusal(
        home, "compare", "lm", "--preset", "smoke", "--norms", f"ln,{name}", "--data", text_file
    )
    assert message in error
    assert not (home / "runs").exists()


def test_translates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERNORM_CACHE", str(tmp_path / "cache"))
    name = "norms.own_modules:Centered"
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    config = tiny_translation(
        write_pairs(pairs), norms=(name,), training={"max_steps": 8, "average_checkpoints": 2}
    )
    results = compare(config, tmp_path / "out")
    run = tmp_path / "out" / results.runs[0].folder
    assert len(load_translator(run).translate(["ein Haus", "zwei"])) == 2


@pytest.mark.distributed
@pytest.mark.slow
def test_in_two_processes(tmp_path: Path, text_file: Path) -> None:
    home = home_of(tmp_path)
    outcome = powernorm(home, *command(text_file, "--devices", "2"), fresh=True)
    assert outcome.code == 0, outcome.err
    results = json.loads((home / "runs" / "lm-smoke" / "results.json").read_text())
    assert [run["status"] for run in results["runs"]] == ["finished"] * len(NAMES)
    assert results["settings"]["machine"]["num_processes"] == 2
