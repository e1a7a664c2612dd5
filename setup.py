"""Builds the optional CPU kernels; everything else is in pyproject.toml.

`POWERNORM_URL`, an environment variable: where the project lives, for the links on a package index.
"""

import importlib.util
import os
import re
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

PACKAGE = "powernorm.ops.kernels.cpu"
URL = os.environ.get("POWERNORM_URL", "").rstrip("/")


def _building():
    path = Path(__file__).parent.joinpath("src", *PACKAGE.split("."), "building.py")
    spec = importlib.util.spec_from_file_location("building", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildKernels(build_ext):
    """Compiles the kernels with the package's own build; without a compiler it goes on."""

    def run(self):
        building = _building()
        root = Path("src") if self.editable_mode else Path(self.build_lib)
        reason = building.build_or_note(root.joinpath(*PACKAGE.split(".")))
        if reason is not None:
            print(  # noqa: T201
                f"powernorm: the CPU kernels were not built, eager torch serves instead: {reason}",
                file=sys.stderr,
            )

    def get_outputs(self):
        return []


class PlatformWheel(bdist_wheel):
    """One wheel for all Pythons of a platform: the library does not know Python."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


def _readme():
    """The README, with links that lead somewhere from a package index too."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")

    def absolute(match):
        kind = "raw" if match["text"].startswith("!") else "blob"
        return f"{match['text']}({URL}/{kind}/main/{match['target']})"

    link = r"(?P<text>!?\[[^\]]*\])\((?!https?:|mailto:|#)(?P<target>[^)]+)\)"
    return re.sub(link, absolute, text) if URL else text


setup(
    long_description=_readme(),
    long_description_content_type="text/markdown",
    ext_modules=[Extension(f"{PACKAGE}.kernels", sources=[])],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
