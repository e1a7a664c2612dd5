"""Layer-scale crossed with the norm, in translation.

    python studies/layer-scale/run.py --out runs/layer-scale     # trains what is missing
    python studies/layer-scale/run.py --out runs/layer-scale --only reduced
    powernorm work runs/layer-scale/reduced                      # helps, as often as wanted

After Ctrl-C the same command goes on.
"""

import argparse
from pathlib import Path

from arms import SETTINGS, best_rates, comparison, trials
from powernorm import lab

TRIALS = "trials"


def train(part: str, out: Path) -> None:
    """Train what is not trained yet of one part."""
    folder = out / part
    if part == TRIALS:
        config = trials()
    elif part == "reduced":
        config = comparison(part, best_rates(out / TRIALS / "results.json"))
    else:
        config = comparison(part)
    lab.compare(config, folder, resume=folder.exists())


def main() -> None:
    """Parse, then train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/layer-scale"))
    parts = [TRIALS, *SETTINGS]
    parser.add_argument("--only", choices=parts, metavar="PART", help=", ".join(parts))
    given = parser.parse_args()
    try:
        for part in [given.only] if given.only else parts:
            train(part, given.out)
    except KeyboardInterrupt:
        raise SystemExit("interrupted; the same command goes on") from None


if __name__ == "__main__":
    main()
