"""`--rewrite-models` stores the rows of the architectures that ran, and writes their table."""

from __future__ import annotations

import json

import pytest

from architectures import tables


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-models", action="store_true", help="store the rows and their table")


def pytest_configure(config: pytest.Config) -> None:
    # Worker processes hand their rows to this one in the tests' reports.
    if config.getoption("rewrite_models", False) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Collector())


class _Collector:
    def __init__(self) -> None:
        self.rows: dict[str, tables.Row] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "model" and report.when == "call":
                row = json.loads(str(value))
                self.rows[row["name"]] = row

    def pytest_sessionfinish(self) -> None:
        tables.store(self.rows)
