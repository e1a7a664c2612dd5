"""Layer-scale crossed with the norm, in translation.

    python studies/layer-scale/run.py --out runs/layer-scale     # trains missing runs
    python studies/layer-scale/run.py --out runs/layer-scale --only reduced
    powernorm work runs/layer-scale/reduced                      # helps, as often as wanted
    python studies/layer-scale/run.py --out runs/layer-scale --collect      # adds to results.json
    python studies/layer-scale/run.py --write docs/results/translation      # its tables

After Ctrl-C the same command resumes.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import powernorm_lab as lab
from arms import SETTINGS, TRIALS, best_rates, comparison, trial_rows, trials
from scores import rows, write

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
TRIED = HERE / "trials.json"


def train(part: str, out: Path) -> None:
    """Train the missing runs of one part."""
    folder = out / part
    if part == TRIALS:
        config = trials()
    elif part == "reduced":
        config = comparison(part, best_rates(json.loads(TRIED.read_text(encoding="utf-8"))))
    else:
        config = comparison(part)
    lab.compare(config, folder, resume=folder.exists())
    if part == TRIALS:
        _write(TRIED, trial_rows(out))


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = ",\n".join(map(json.dumps, rows))
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def main() -> None:
    """Parse, then train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/layer-scale"))
    parts = [*([] if TRIED.exists() else [TRIALS]), *SETTINGS]
    parser.add_argument("--only", choices=parts, metavar="PART", help=", ".join(parts))
    parser.add_argument("--collect", action="store_true", help="train nothing")
    parser.add_argument("--write", type=Path, metavar="DIR", help="train nothing")
    given = parser.parse_args()
    if given.collect:
        known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
        _write(RESULTS, rows(given.out, known))
    if given.write:
        write(given.write, json.loads(RESULTS.read_text(encoding="utf-8")))
    if given.collect or given.write:
        return
    try:
        for part in [given.only] if given.only else parts:
            train(part, given.out)
    except KeyboardInterrupt:
        raise SystemExit("interrupted: the same command resumes") from None


if __name__ == "__main__":
    main()
