"""A private name of torch that is not on the list fails the check with a message that names it."""

from __future__ import annotations

import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TOOL: Any = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "private_names.py")))
ENTRY = """["{name}"]
files = ["{file}"]
why = "speed"
fallback = "a slower way"
"""
CORE = "src/powernorm/ops/torch_private.py"


def check(root: Path, source: str, listed: str, file: str = "src/a.py") -> str:
    """Return what the tool says of a checkout with one file, "" if nothing is wrong."""
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")
    complaints: list[str] = TOOL.complaints(TOOL.uses(root), tomllib.loads(listed))
    return "\n".join(complaints)


def run(*options: str | Path) -> tuple[int, str]:
    command = [sys.executable, ROOT / "tools" / "private_names.py", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_an_incomplete_list_fails(tmp_path: Path) -> None:
    check(tmp_path, "import torch._C\n", "")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/private_names.toml").touch()
    assert run("--root", tmp_path) == (
        1,
        "torch._C is used in src/a.py: add it to the list, or avoid it\n"
        "private_names.toml: 1 to correct\n",
    )


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\nf = torch._C._do\n", "torch._C._do"),
        ("import torch\nf = torch.nn.Module._version.real\n", "torch.nn.Module._version.real"),
        ("import torch.distributed as dist\ndist._do()\n", "torch.distributed._do"),
        ("from torch import nn\nnn.modules._do(1).x\n", "torch.nn.modules._do"),
        ("from torch._dynamo import config\n", "torch._dynamo.config"),
        ("from transformers.models import _abc as x\n", "transformers.models._abc"),
        ("import onnx\nonnx.helper._do()\n", "onnx.helper._do"),
        ("def f(x):\n    return x.values()._ragged\n", "._ragged"),
        ("def f(x):\n    return getattr(x, '_ragged', None)\n", "._ragged"),
        ("f = find('_C._do')\n", "torch._C._do"),
        ("class A:\n    def _do(self):\n        super()._do()\n", "._do"),
        ("def f(x):\n    return x._buffers\n", "._buffers"),
    ],
)
def test_a_use(tmp_path: Path, source: str, name: str) -> None:
    assert f"{name} is used in src/a.py: add it" in check(tmp_path, source, "")
    listed = ENTRY.format(name=name, file="src/a.py")
    assert check(tmp_path, source, listed) == ""
    assert f"{name} is no longer used" in check(tmp_path, "", listed)
    other = ENTRY.format(name=name, file="src/b.py")
    assert f"{name}: src/b.py does not use it: delete" in check(tmp_path, source, other)
    assert f"{name}: src/a.py uses it: add" in check(tmp_path, source, other)
    assert "no 'fallback'" in check(tmp_path, source, listed.replace("a slower way", ""))


def test_what_is_no_use(tmp_path: Path) -> None:
    source = """
import os
import torch
from torch import __version__

class A:
    _own: int

    def _do(self):
        self._set = 1

def f(a):
    os._exit(a._own + a._set + a._do() + torch.__version__ + a._replace(x=1))
"""
    assert check(tmp_path, source, "") == ""


def test_layers_need_a_fallback_in_one_place_with_a_test(tmp_path: Path) -> None:
    source, listed = "f = find('_C._do')\n", ENTRY.format(name="torch._C._do", file=CORE)
    assert "names no 'test'" in check(tmp_path, source, listed, CORE)
    assert check(tmp_path, source, listed + 'test = "tests/a.py"\n', CORE) == ""
    (tmp_path / CORE).unlink()
    other = "src/powernorm/norms/a.py"
    listed = listed.replace(CORE, other)
    assert f"look it up in {CORE}" in check(tmp_path, source, listed, other)
