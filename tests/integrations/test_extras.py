"""A missing package is named with the extra that brings it."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from powernorm.integrations.extras import EXTRAS

ROOT = Path(__file__).parents[2]

CALLS = [
    ("transformers", "hf", "import powernorm.integrations.huggingface"),
    ("lightning", "lightning", "import powernorm.integrations.lightning"),
    (
        "transformers",
        "hf",
        "from pathlib import Path\n"
        "from powernorm.integrations.pretrained import load_pretrained\n"
        "load_pretrained(Path('.'))",
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
    assert re.fullmatch(
        rf"ModuleNotFoundError: .* needs the package {package}: pip install 'powernorm\[{extra}\]'",
        last,
    ), done.stderr


def test_extras_are_those_of_the_package() -> None:
    """`pip install` of an extra brings the packages that an error promises."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    imported = {"pytorch-crf": "torchcrf"}
    for extra, packages in EXTRAS.items():
        brought = {
            imported.get(name, name)
            for line in project["optional-dependencies"][extra]
            for name in re.findall(r"^[\w-]+", line)
        }
        # safetensors comes with two, of which one is named.
        assert set(packages) == brought - (set() if extra == "train" else {"safetensors"})
