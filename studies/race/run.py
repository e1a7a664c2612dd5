"""Cost of a decision between norms: curves of 32 settings, and rules replayed on them.

    python studies/race/run.py --out runs/race            # trains missing runs, and scores
    python studies/race/run.py --out runs/race --collect-only  # scores existing runs
    python studies/race/run.py --scores-of studies/race/curves.json --out runs/race

Writes `curves.json`, `results.json`, `tables.md` and `budget.svg` into --out. After Ctrl-C the same
command continues.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from curves import collect, settings, train_all
from scores import scores_of
from tables import write_tables


def main() -> None:
    """Parse, train, score and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/race"))
    parser.add_argument("--only", action="append", choices=settings(), metavar="SETTING")
    parser.add_argument("--collect-only", action="store_true", help="train nothing")
    parser.add_argument("--scores-of", type=Path, metavar="FILE", help="a curves.json")
    given = parser.parse_args()
    if given.scores_of:
        found: list[dict[str, Any]] = json.loads(given.scores_of.read_text(encoding="utf-8"))
    else:
        if not given.collect_only:
            try:
                train_all(given.out, given.only or list(settings()), print)
            except KeyboardInterrupt:
                raise SystemExit("interrupted; the same command continues") from None
        found = collect(given.out)
    # Settings with fewer than three seeds are kept but not scored.
    scored = [setting for setting in found if len(setting["seeds"]) >= 3]
    given.out.mkdir(parents=True, exist_ok=True)
    if not given.scores_of:
        lines = ",\n".join(json.dumps(setting) for setting in found)
        (given.out / "curves.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    if not scored:
        raise SystemExit("no setting has three seeds of every norm yet: nothing to score")
    results = scores_of(scored)
    text = json.dumps(results, indent=2) + "\n"
    (given.out / "results.json").write_text(text, encoding="utf-8")
    write_tables(results, given.out)
    print(f"{given.out}: curves.json, results.json, tables.md, budget.svg ({len(scored)} settings)")


if __name__ == "__main__":
    main()
