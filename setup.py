"""Builds the optional CPU kernels; everything else is in pyproject.toml.

Two settings, as environment variables:

- `POWERNORM_KERNELS`: `auto` (the default) continues without kernels if they cannot be compiled,
  `require` fails there, `none` builds the wheel for all platforms, which has no kernels.
- `POWERNORM_URL`: where the project lives, for the links on a package index, the
  README's among them.
"""

import importlib.util
import os
import re
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

PACKAGE = "powernorm.ops.kernels.cpu"
MODES = ("auto", "require", "none")
MODE = os.environ.get("POWERNORM_KERNELS") or "auto"
URL = os.environ.get("POWERNORM_URL", "").rstrip("/")
if MODE not in MODES:
    sys.exit(f"POWERNORM_KERNELS={MODE}: expected one of {', '.join(MODES)}")


def _building():
    path = Path(__file__).parent.joinpath("src", *PACKAGE.split("."), "building.py")
    spec = importlib.util.spec_from_file_location("building", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildKernels(build_ext):
    """Compiles the kernels with the package's own build; without a compiler it continues."""

    reason = None
    """Why there are none."""

    def run(self):
        building = _building()
        root = Path("src") if self.editable_mode else Path(self.build_lib)
        reason = building.build_or_note(root.joinpath(*PACKAGE.split(".")))
        if reason is not None and MODE == "require":
            sys.exit(f"powernorm: the CPU kernels cannot be built: {reason}")
        if reason is not None:
            print(  # noqa: T201
                f"powernorm: the CPU kernels were not built, eager torch serves instead: {reason}",
                file=sys.stderr,
            )
        BuildKernels.reason = reason

    def get_outputs(self):
        return []


class NoKernels(build_py):
    """Leaves a note in the place of the kernels."""

    def run(self):
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib).joinpath(*PACKAGE.split("."))
            (folder / _building().NOTE_NAME).write_text(
                "the wheel for all platforms has none (`pip install .` in powernorm's source tree "
                "compiles them)\n",
                encoding="utf-8",
            )


class PlatformWheel(bdist_wheel):
    """One wheel for all Pythons of a platform: the library does not know Python."""

    def get_tag(self):
        return ("py3", "none", "any" if BuildKernels.reason else super().get_tag()[2])


def _readme():
    """The README, with links that lead somewhere from a package index too."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")

    def absolute(match):
        kind = "raw" if match["text"].startswith("!") else "blob"
        return f"{match['text']}({URL}/{kind}/main/{match['target']})"

    link = r"(?P<text>!?\[[^\]]*\])\((?!https?:|mailto:|#)(?P<target>[^)]+)\)"
    return re.sub(link, absolute, text) if URL else text


NATIVE = {
    "ext_modules": [Extension(f"{PACKAGE}.kernels", sources=[])],
    "cmdclass": {"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
}
PURE = {"cmdclass": {"build_py": NoKernels}}
LINKS = {
    "Homepage": URL,
    "Source": URL,
    "Issues": f"{URL}/issues",
    "Changelog": f"{URL}/blob/main/CHANGELOG.md",
}


setup(
    long_description=_readme(),
    long_description_content_type="text/markdown",
    project_urls=LINKS if URL else {},
    **(PURE if MODE == "none" else NATIVE),
)
