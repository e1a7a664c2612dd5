"""Savings of `--race` in the stored comparisons with five seeds.

    python studies/race/stored.py

Prints the table of docs/race.md. These comparisons are older than races, which are replayed on
their results.
"""

from collections import defaultdict
from pathlib import Path

import powernorm_lab as lab

ROOT = Path(__file__).parents[2]
CONFIDENCES = (0.8, 0.95)
NUM_SEEDS = 5


def main() -> None:
    """Read, replay and print."""
    print("| comparison | norms | left at 80 % | cost | left at 95 % | cost |")
    print("| :--- | ---: | ---: | ---: | ---: | ---: |")
    for (name, direction), values in _comparisons().items():
        cells = [name, str(len(values))]
        for confidence in CONFIDENCES:
            found = lab.replay_race(values, lab.Race(confidence), direction)
            rounds = {drop["label"]: drop["after"] for drop in found["dropped"]}
            used = sum(rounds.get(norm, found["rounds"]) for norm in values)
            cells += [str(len(found["left"])), f"{100 * used / (NUM_SEEDS * len(values)):.0f} %"]
        print(f"| {' | '.join(cells)} |")


def _comparisons() -> dict[tuple[str, str], dict[str, list[float | None]]]:
    """Return the values of each comparison by norm and in the order of seeds, with parts joined."""
    found: dict[tuple[str, str], dict[str, dict[int, float | None]]] = {}
    for folder in sorted((ROOT / "benchmarks" / "results" / "papers").iterdir()):
        comparison = lab.read_comparison(folder)
        key = (folder.name.partition("-seed")[0], comparison.goal["direction"])
        by_norm = found.setdefault(key, defaultdict(dict))
        for run in comparison.runs:
            # Lost runs take part in the race as lost.
            by_norm[run.name][run.seed] = (
                run.metrics.get(comparison.metric) if run.finished else None
            )
    return {
        key: {norm: [by_seed[seed] for seed in sorted(by_seed)] for norm, by_seed in norms.items()}
        for key, norms in found.items()
        if all(len(by_seed) == NUM_SEEDS for by_seed in norms.values())
    }


if __name__ == "__main__":
    main()
