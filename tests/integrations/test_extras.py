"""A missing package is named with the extra that brings it."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from powernorm.integrations import extras
from powernorm.integrations.extras import EXTRAS, install_corpora, install_extra

ROOT = Path(__file__).parents[2]

CALLS = [
    ("transformers", "hf", "import powernorm.integrations.huggingface"),
    pytest.param(
        *("lightning", "lightning", "import powernorm.integrations.lightning"),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "transformers",
        "hf",
        "from pathlib import Path\n"
        "from powernorm.integrations.pretrained import load_pretrained\n"
        "load_pretrained(Path('.'))",
        marks=pytest.mark.slow,
    ),
    (
        "onnxscript",
        "export",
        "import torch\n"
        "from powernorm.integrations.onnx import export\n"
        "export(torch.nn.Linear(2, 2).eval(), torch.randn(3, 2))",
    ),
]


@pytest.mark.parametrize(("package", "extra", "code"), CALLS)
def test_missing_package(package: str, extra: str, code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\nsys.modules[{package!r}] = None\n{code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.strip().splitlines()[-1]
    wanted = f"needs the package {package}: {install_extra(extra)}"
    assert re.match(r"(\w+\.)*MissingPackageError: ", last), done.stderr
    assert last.endswith(wanted), done.stderr


def test_the_way_to_install_works_from_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No index has the package, so that its name alone would install another one."""
    assert install_extra("hf") == f"pip install -e {shlex.quote(f'{ROOT}[hf]')}"
    monkeypatch.setattr(extras, "checkout", lambda: None)
    assert install_extra("hf") == "`pip install '.[hf]'` in powernorm's source tree"
    assert "`pip install ./packages/data`" in install_corpora()
    monkeypatch.setattr(extras, "checkout", lambda: tmp_path)
    assert install_extra("hf").endswith(f"{tmp_path}[hf]'")
    (tmp_path / "packages" / "data").mkdir(parents=True)
    assert install_corpora() == f"pip install {tmp_path / 'packages' / 'data'}"


def test_each_module_of_the_laboratory_names_the_extra() -> None:
    """Whichever is imported first, and however it imports what is missing."""
    code = (
        "import sys\n"
        "sys.modules['pandas'] = sys.modules['torchmetrics'] = None\n"
        "for name in ('powernorm.lab', 'powernorm.lab.report', 'powernorm.lab.engine.run'):\n"
        "    try:\n"
        "        __import__(name)\n"
        "    except ModuleNotFoundError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    wanted = f"powernorm.lab needs the packages pandas, torchmetrics: {install_extra('train')}"
    assert done.stdout.splitlines() == [wanted] * 3


def test_extras_are_those_of_the_package() -> None:
    """`pip install` of an extra brings the packages that an error promises."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra, packages in EXTRAS.items():
        lines = "\n".join(project["optional-dependencies"][extra])
        assert set(packages) == set(re.findall(r"^[\w-]+", lines, re.MULTILINE))
