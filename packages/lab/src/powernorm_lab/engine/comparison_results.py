"""Results of all runs in a comparison's folder, and results.json."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from powernorm.errors import InputError
from powernorm_lab.engine.folders import READ_ANEW, find_runs, read_own_result, write_json
from powernorm_lab.engine.grid import Grid
from powernorm_lab.engine.leases import Lease
from powernorm_lab.engine.outcomes import result_without_training
from powernorm_lab.engine.race import standing
from powernorm_lab.runs import (
    RESULT_FILE,
    RESULTS_FILE,
    ComparisonHead,
    ComparisonResults,
    RunResult,
)
from powernorm_lab.schema import read_record, written


class Results:
    """Reads the results of a comparison's runs, and assembles results.json.

    One instance serves a call of `compare`, so that every file is read once.

    Args:
        grid: of the comparison, for the order of the runs.
        out: folder of the comparison.
    """

    def __init__(self, grid: Grid, out: Path) -> None:
        self.grid = grid
        self.out = out
        self._known: dict[tuple[str, int], RunResult] = {}
        """Results by folder and time of writing."""
        self._written: ComparisonResults | None = None

    def read(self) -> dict[str, RunResult]:
        """Return the results of the runs by the names of their folders.

        Files that have not changed since the last call are not read again.

        Raises:
            InputError: a file is damaged.
        """
        results = {}
        for folder in find_runs(self.out):
            result = self._read_one(folder)
            if result is not None:
                results[folder.name] = result
        return results

    def _read_one(self, folder: Path) -> RunResult | None:
        try:
            changed = (folder / RESULT_FILE).stat().st_mtime_ns
        except FileNotFoundError:
            return None
        known = self._known.get((folder.name, changed))
        if known is not None:
            return known
        try:
            result = read_own_result(folder)
        except InputError:
            if not (folder / RESULT_FILE).exists():  # another worker restarts the run
                return None
            raise
        if result is not None:
            self._known[folder.name, changed] = result
        return result

    def write(self, head: ComparisonHead, lease: Lease) -> ComparisonResults:
        """Write results.json if its contents have changed, and return them.

        Args:
            head: contents of `comparison.json`.
            lease: of the comparison's folder.
        """
        path = self.out / RESULTS_FILE
        with lease.writing():
            results = self.told(head)
            if self._written is None and path.exists():
                with suppress(InputError):
                    there = read_record(ComparisonResults, path, READ_ANEW, exact=True)
                    self._written = replace(there, statistics=None)
            if results != self._written:
                write_json(path, written(results))
                self._written = results
        return results

    def told(self, head: ComparisonHead) -> ComparisonResults:
        """Return the contents of results.json: those of comparison.json, the runs and the race."""
        results, record = self.read(), None
        if self.grid.race is not None:
            race = standing(self.grid, results)
            record = race.record
            results |= {
                name: result_without_training(line, seed, name, "dropped", race.left_out[name])
                for line, seed in self.grid.runs()
                if (name := line.folder(seed)) in race.left_out and line.name not in record["left"]
            }
        return ComparisonResults(**vars(head), standing=record, runs=self._ordered(results))

    def _ordered(self, results: Mapping[str, RunResult]) -> list[RunResult]:
        """Return results by line, then seed; runs that are not in this grid come last.

        Trials are sorted by name, because a resumed call has fewer lines than the original one.
        """
        lines, seeds = self.grid.lines if self.grid.trial is None else (), self.grid.seeds
        names = [line.folder(seed) for line in lines for seed in seeds]
        order = [name for name in dict.fromkeys([*names, *results]) if name in results]
        return [replace(results[name], study=None) for name in order]
