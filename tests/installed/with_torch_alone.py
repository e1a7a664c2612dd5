"""What an installed powernorm does where torch is and nothing else; a script, not a test.

`tests/test_installed.py` runs it with the other packages out of reach, the wheels' workflow in a
fresh environment. With `--kernels` it wants the compiled library, too.
"""

import subprocess
import sys

import torch
from torch import nn

import powernorm

EXTRA = "[train]"


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


def check_extras_are_named() -> None:
    for module in ("lab", "lab.report", "integrations.huggingface", "integrations.lightning"):
        code = f"import powernorm.{module}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        last = done.stderr.strip().splitlines()[-1]
        assert "needs the package" in last, (module, last)
        assert "pip install" in last, (module, last)


def check_commands(kernels: bool) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "powernorm", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    doctor = run("doctor")
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert "eager: torch operations" in doctor.stdout
    assert not kernels or "cpu: C++ kernels" in doctor.stdout, doctor.stdout
    assert run("--version").stdout == f"powernorm {powernorm.__version__}\n"
    refused = run("compare", "lm")
    assert refused.returncode == 2
    assert EXTRA in refused.stderr, refused.stderr
    assert refused.stderr.count("\n") == 1 or "Warning" in refused.stderr, refused.stderr


if __name__ == "__main__":
    wants_kernels = "--kernels" in sys.argv[1:]
    check_layers()
    check_surgery()
    check_diagnosis()
    check_extras_are_named()
    check_commands(wants_kernels)
    print(f"powernorm {powernorm.__version__} from {powernorm.__path__[0]}: all is well")
