"""Use an installed powernorm without its extras; a script, not a test.

`tests/test_installed.py` runs it in an environment of the required packages, the wheels' workflow
in a fresh one. With `--kernels` it wants the compiled library, too; with `--few` it starts few
processes.
"""

import subprocess
import sys
from contextlib import chdir
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

import powernorm

MODELS = """
import torch
import powernorm
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 8))

def batches():
    return [torch.randn(16, 8) for _ in range(4)]

def given():
    return build(), batches()

def swapped():
    model = build()
    powernorm.swap(model, to="rbn")
    powernorm.calibrate(model, batches())
    return model.eval(), batches()

def saved():
    return powernorm.load("saved", build()), batches()
"""


def check_layers() -> None:
    x = torch.randn(4, 6, 8, requires_grad=True)
    for name in powernorm.NORMS:
        norm = powernorm.build_norm(name, 8)
        out = norm(x)
        assert out.shape == x.shape, name
        assert out.isfinite().all(), name
    out.sum().backward()


def check_surgery() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    assert [row.action for row in powernorm.plan_swap(model, to="rbn").rows] == ["swap"]
    powernorm.swap(model, to="rbn")
    for _ in range(5):
        model(torch.randn(4, 6, 8)).sum().backward()
    model.eval()
    x = torch.randn(4, 6, 8)
    before = model(x)
    powernorm.fold(model, x)
    assert not any(isinstance(module, powernorm.Norm) for module in model.modules()), model
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)


def check_diagnosis() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    batches = [torch.randn(4, 6, 8) for _ in range(4)]
    assert powernorm.diagnose(model, batches).rows


LIBRARIES = ("integrations.huggingface", "integrations.lightning")


def check_extras_are_named(*modules: str) -> None:
    for module in modules:
        code = f"import powernorm.{module}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        last = done.stderr.strip().splitlines()[-1]
        assert "needs the package" in last, (module, last)
        assert "`pip install '.[" in last, (module, last)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "powernorm", *arguments], capture_output=True, text=True
    )


def said(*arguments: str) -> str:
    done = command(*arguments)
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    return done.stdout


def check_commands() -> None:
    Path("models.py").write_text(MODELS)
    assert said("--version") == f"powernorm {powernorm.__version__}\n"
    assert "diagnose" in said("--help")
    assert "RegularizedBatchNorm" in said("norms")
    assert "1 of 1 norms change to pn" in said("swap", "models:build", "--to", "pn")
    assert "verdict: " in said("diagnose", "models:given", "--csv", "layers.csv")
    assert Path("layers.csv").is_file()
    assert "folded" in said("fold", "models:swapped", "--out", "folded")
    save = "import models, powernorm; powernorm.save(models.swapped()[0], 'saved')"
    subprocess.run([sys.executable, "-c", save], check=True)
    assert "rbn" in said("diagnose", "models:saved")
    assert "rbn" in said("fold", "models:saved")


def check_refusals() -> None:
    """One line each, which says what to install or to give."""
    Path("bert").mkdir()
    Path("bert/config.json").write_text('{"model_type": "bert"}')
    for words, *arguments in (
        ("powernorm-lab, which is not installed: `pip install ./packages/lab`", "compare", "lm"),
        ("powernorm-lab, which is not installed", "diagnose", "models.py"),
        ("returns (powernorm.load('saved'", "diagnose", "saved"),
        ("returns (powernorm.load('saved'", "fold", "saved"),
        ("does not exist", "diagnose", "nowhere"),
        ("`pip install '.[hf]'`", "fold", "bert"),
    ):
        done = command(*arguments)
        assert done.returncode == 2, (arguments, done.stdout, done.stderr)
        assert words in done.stderr, (arguments, done.stderr)
        assert done.stderr.count("\n") == 1, (arguments, done.stderr)


def check_doctor(kernels: bool) -> None:
    doctor = said("doctor")
    print(doctor)
    assert "eager: torch operations" in doctor
    assert not kernels or "cpu: C++ kernels" in doctor, doctor


if __name__ == "__main__":
    for package in ("pandas", "matplotlib", "transformers"):
        assert find_spec(package) is None, f"{package} is here, so nothing would be shown"
    check_layers()
    check_surgery()
    check_diagnosis()
    if "--few" in sys.argv[1:]:
        check_extras_are_named(LIBRARIES[0])
        assert "RegularizedBatchNorm" in said("norms")
    else:
        check_extras_are_named(*LIBRARIES)
        with TemporaryDirectory() as folder, chdir(folder):
            check_commands()
            check_refusals()
        check_doctor("--kernels" in sys.argv[1:])
    print(f"powernorm {powernorm.__version__} from {powernorm.__path__[0]}: all is well")
