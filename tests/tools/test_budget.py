"""A count above its ceiling fails with a message that names it and the fix."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

FILES = {
    "src/norms/base.py": '"""Base."""\n\n\nclass Base:\n    """Keep state."""\n',
    "src/norms/ops/mean.py": "from norms.base import Base\n\nMEAN = Base()\n",
    "src/norms/ops/power.py": "from norms import base\nfrom norms.ops import mean\n",
    "tests/ops/test_mean.py": "def test_mean():\n    assert True\n",
    "README.md": "# Norms\n",
}


class Checkout:
    """A small repository with its budget."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def budget(self, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, ROOT / "tools" / "budget.py", "--root", self.root, *options]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def git(self, *arguments: str) -> None:
        who = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
        subprocess.run(["git", "-C", self.root, *who, *arguments], check=True, capture_output=True)

    @property
    def stored(self) -> dict[str, Any]:
        return tomllib.loads((self.root / "tools" / "budget.toml").read_text(encoding="utf-8"))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path)
    for name, text in FILES.items():
        made.write(name, text)
    (tmp_path / "tools").mkdir()
    assert made.budget("--init").returncode == 0
    assert made.budget().returncode == 0
    return made


def test_counts_of_the_small_tree(checkout: Checkout) -> None:
    assert checkout.stored["lines"] == {
        "src/ops": {"ceiling": 5},
        "src/top": {"ceiling": 5},
        "tests/ops": {"ceiling": 2},
    }
    counts = {
        name: row["ceiling"] for name, row in checkout.stored["counts"].items() if row["ceiling"]
    }
    assert counts == {"modules with one importer": 1}  # mean; base has two


PLANTED: dict[str, tuple[dict[str, str], list[str]]] = {
    "lines": (
        {"src/norms/ops/power.py": FILES["src/norms/ops/power.py"] + "\n\nPOWER = 1\n"},
        ["src/ops: 8 lines, 3 above the ceiling of 5. Lower the count, or raise the number"],
    ),
    "directory": (
        {"src/norms/layers/layer.py": "LAYER = 1\n"},
        ['src/layers: 1 lines without a ceiling. Add `"src/layers" = { ceiling = 1 }` to [lines]'],
    ),
    "twin": (
        {"src/norms/ops/power.py": "import norms.ops.mean\n\n\nclass Base:\n    pass\n"},
        ["repeated class names: 1, 1 above", "Base: src/norms/base.py:4, src/norms/ops/power.py:4"],
    ),
    "circle": (
        {"src/norms/base.py": "def mean():\n    from norms.ops.mean import MEAN\n"},
        ["files in import circles: 2, 2 above", "src/norms/base.py: imports src/norms/ops/mean.py"],
    ),
    "one importer": (
        {"src/norms/ops/power.py": "from .mean import MEAN\nfrom . import mean\n"},
        ["modules with one importer: 2", "src/norms/base.py: imported by src/norms/ops/mean.py"],
    ),
    "long source": (
        {"src/norms/long.py": "\n" * 501},
        ["source: 1", "src/norms/long.py: 501 lines"],
    ),
    "long test": (
        {"tests/test_long.py": "\n" * 501},
        ["tests: 1", "tests/test_long.py: 501 lines"],
    ),
    "word in a comment": (
        {"tests/ops/test_mean.py": "A = '# shall'\n\n# Two lines that are mended, and go\n# on.\n"},
        ["code: 2", "tests/ops/test_mean.py: 'mend': line 3", "test_mean.py: 'go on': line 3"],
    ),
    "word in a docstring": (
        {"src/norms/ops/mean.py": 'from norms import base\n\nM = 1\n"""Mean, and\nit stands."""\n'},
        ["refused words: code: 1", "src/norms/ops/mean.py: 'stands': line 5"],
    ),
    "word in a page": (
        {"README.md": "# Norms\n\nAnew.\n"},
        ["pages: 1", "README.md: 'anew': line 3"],
    ),
    "word in a table of a page": (
        {"docs/page/table.csv": "claim,found\nmean,anew\n"},
        ["refused words: pages: 1", "docs/page/table.csv: 'anew': line 2"],
    ),
    "words of pages": (
        {"docs/page.md": "# Norms\n\nA mean.\n", "docs/api/norms.md": "# Reference\n"},
        ["words: docs: 4, 4 above the ceiling of 0"],
    ),
    "first word": (
        {"tests/ops/test_mean.py": '"""What a mean is."""\n'},
        ["refused first words: 1, 1 above", "tests/ops/test_mean.py: 'What': line 1"],
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_offenders_fail(checkout: Checkout, planted: str) -> None:
    files, messages = PLANTED[planted]
    for name, text in files.items():
        checkout.write(name, text)
    done = checkout.budget()
    assert done.returncode == 1
    for message in messages:
        assert message in done.stderr
    assert "say why in the commit message" in done.stderr


def test_what_is_no_offender(checkout: Checkout) -> None:
    checkout.write(
        "src/norms/base.py",
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n"
        "    from norms.ops import mean  # `CE` stands for it\n",
    )
    done = checkout.budget()
    # `mean` has a second importer now, and no circle is made by imports for types.
    assert (done.returncode, done.stderr) == (0, "")


def test_new_offenders_are_named(checkout: Checkout) -> None:
    checkout.write("src/norms/ops/old.py", "class Base:\n    '''Of old.'''\n")
    checkout.budget("--init")
    checkout.git("init")
    checkout.git("add", ".")
    checkout.git("commit", "-m", "Base")
    checkout.write("src/norms/ops/new.py", "class Mean:\n    pass\n\n\nclass Norm:\n    pass\n")
    checkout.write(
        "src/norms/ops/mean.py", "from norms.base import Base\n\n\nclass Mean:\n    pass\n"
    )
    done = checkout.budget()
    assert "repeated class names: 2, 1 above the ceiling of 1" in done.stderr
    assert "    Mean: src/norms/ops/mean.py:4, src/norms/ops/new.py:1\n" in done.stderr
    assert "    Base:" not in done.stderr
    (row,) = (
        line
        for line in checkout.budget("--against", "HEAD").stdout.splitlines()
        if "src/ops" in line
    )
    assert row.split() == ["src/ops", "7", "15", "+8"]


def test_lower_never_raises(checkout: Checkout) -> None:
    checkout.write("src/norms/ops/mean.py", "from norms.base import Base\n")
    checkout.write("tests/ops/test_mean.py", "\n" * 7)
    assert "budget.py --lower" in checkout.budget().stdout
    done = checkout.budget("--lower")
    assert done.returncode == 1
    assert "tests/ops: 7 lines, 5 above the ceiling of 2" in done.stderr
    assert checkout.stored["lines"]["src/ops"] == {"ceiling": 3}
    assert checkout.stored["lines"]["tests/ops"] == {"ceiling": 2}


def test_goals_are_kept(checkout: Checkout) -> None:
    path = checkout.root / "tools" / "budget.toml"
    text = path.read_text(encoding="utf-8").replace("{ ceiling = 5 }", "{ ceiling = 9, goal = 4 }")
    path.write_text(text, encoding="utf-8")
    for option in ("--lower", "--init"):
        assert checkout.budget(option).returncode == 0
        assert checkout.stored["lines"]["src/ops"] == {"ceiling": 5, "goal": 4}


def test_a_missing_budget_names_the_fix(checkout: Checkout) -> None:
    (checkout.root / "tools" / "budget.toml").unlink()
    assert "python tools/budget.py --init writes it" in checkout.budget().stderr
