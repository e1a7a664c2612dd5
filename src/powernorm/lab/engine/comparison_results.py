"""What the runs in a comparison's folder came to, whoever trained them, and results.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from powernorm.errors import InputError
from powernorm.lab.engine.folders import find_runs, read_result, write_json
from powernorm.lab.engine.grid import Grid
from powernorm.lab.engine.leases import Lease
from powernorm.lab.engine.outcomes import unmade_result
from powernorm.lab.engine.race import standing
from powernorm.runs import RESULT_FILE, RESULTS_FILE, ComparisonResults, RunResult


class Results:
    """Reads the results of a comparison's runs, and puts results.json together.

    Args:
        grid: of the comparison, for the order of the runs.
        out: its folder.
    """

    def __init__(self, grid: Grid, out: Path) -> None:
        self._grid = grid
        self._out = out
        self._known: dict[tuple[str, int], RunResult] = {}
        """Results by folder and time of writing."""

    def read(self) -> dict[str, RunResult]:
        """Return what the runs in the folder came to, by the names of their folders.

        Files that were read before and have not changed since are not read again.

        Raises:
            InputError: one is damaged.
        """
        results = {}
        for folder in find_runs(self._out):
            result = self._read_one(folder)
            if result is not None:
                results[folder.name] = result
        return results

    def _read_one(self, folder: Path) -> RunResult | None:
        try:
            written = (folder / RESULT_FILE).stat().st_mtime_ns
        except FileNotFoundError:
            return None
        known = self._known.get((folder.name, written))
        if known is not None:
            return known
        try:
            result = read_result(folder)
        except InputError:
            if not (folder / RESULT_FILE).exists():  # another worker begins the run anew
                return None
            raise
        if result is not None:
            # It is in the run's own file only.
            result.pop("study", None)
            self._known[folder.name, written] = result
        return result

    def write(self, head: Mapping[str, Any], lease: Lease) -> ComparisonResults:
        """Write results.json: what `comparison.json` says, and the runs.

        Args:
            head: contents of `comparison.json`.
            lease: of the comparison's folder.
        """
        with lease.writing():
            results = cast(ComparisonResults, {**head, **self.told(self.read())})
            write_json(self._out / RESULTS_FILE, results)
        return results

    def told(self, results: Mapping[str, RunResult]) -> dict[str, Any]:
        """Return what results.json says of the runs, and of the race between them."""
        if self._grid.race is None:
            return {"runs": self._ordered(results)}
        race = standing(self._grid, results)
        left_out = {
            name: unmade_result(line, seed, name, "dropped", race.left_out[name])
            for line, seed in self._grid.runs()
            if (name := line.folder(seed)) in race.left_out and line.name not in race.record["left"]
        }
        return {"standing": race.record, "runs": self._ordered({**results, **left_out})}

    def _ordered(self, results: Mapping[str, RunResult]) -> list[RunResult]:
        """Return results by line, then seed; those of an earlier call with others last."""
        lines, seeds = self._grid.lines, self._grid.seeds
        names = [line.folder(seed) for line in lines for seed in seeds]
        return [results[name] for name in dict.fromkeys([*names, *results]) if name in results]
