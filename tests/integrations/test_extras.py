"""A missing package is named with the extra that brings it."""

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from powernorm.integrations import extras
from powernorm.integrations.extras import (
    COMMANDS,
    LABORATORY,
    MissingPackageError,
    install_command,
    plugins,
    requirement_of,
)

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
def test_missing_package(
    package: str, extra: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if package == "onnxscript":
        pytest.importorskip("onnx")  # which the export asks for first
    monkeypatch.delitem(sys.modules, code.removeprefix("import "), raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError) as raised:
        exec(code, {})
    wanted = f"needs the package {package}: {install_command(extra=extra)}"
    assert str(raised.value).endswith(wanted)


def test_the_way_to_install_works_from_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No index has the distributions, so that a name alone would install another one."""
    assert install_command(extra="hf") == f"pip install -e {shlex.quote(f'{ROOT}[hf]')}"
    if (ROOT / "packages/lab").exists():  # the source archive is without it
        assert install_command(LABORATORY) == f"pip install -e {ROOT / 'packages' / 'lab'}"
    assert install_command("other", "hf") == "pip install 'other[hf]'"
    monkeypatch.setattr(extras, "checkout", lambda: None)
    assert install_command(extra="hf") == "`pip install '.[hf]'` in powernorm's source tree"
    assert "`pip install './packages/lab[tune]'`" in install_command(LABORATORY, "tune")
    monkeypatch.setattr(extras, "checkout", lambda: tmp_path)  # without the other distributions
    assert install_command(extra="hf").endswith(f"{tmp_path}[hf]'")
    assert "`pip install ./packages/data`" in install_command("powernorm-data")


@pytest.mark.parametrize("folder", [".", "packages/lab"])
def test_what_brings_a_package_is_what_the_distributions_ask_for(folder: str) -> None:
    if not (ROOT / folder).exists() or (folder != "." and not plugins(COMMANDS)):
        pytest.skip("the laboratory is not installed")
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = {None: project["dependencies"], **project["optional-dependencies"]}
    for extra in wanted.keys() - {"dev", "docs"}:
        for line in wanted[extra]:
            found = requirement_of(re.split(r"[^\w-]", line)[0])
            assert found is not None, line
            # What the core has in an extra, another distribution may require.
            assert found == (project["name"], extra) or found.distribution == "powernorm", line
    assert requirement_of("nothing_that_exists") is None
    assert requirement_of("ruff") is None
