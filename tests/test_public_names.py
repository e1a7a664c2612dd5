"""The public names of powernorm, with their signatures, compared with snapshots.

Where a change is meant: `pytest tests/test_public_names.py --snapshot-update`, and look at the
difference.
"""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from public_names import public_names

PACKAGES = ("powernorm", "powernorm.norms", "powernorm.ops", "powernorm.surgery")


@pytest.mark.parametrize("package", [*PACKAGES, "powernorm.diagnosis"])
def test_public_names(package: str, snapshot: SnapshotAssertion) -> None:
    assert public_names(package) == snapshot
