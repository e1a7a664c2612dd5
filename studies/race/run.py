"""Train the settings of the race study; the rules are tried on their curves afterwards."""

import argparse
from pathlib import Path

from curves import settings, train


def main() -> None:
    """Parse and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/race"))
    parser.add_argument("--only", action="append", choices=settings(), metavar="SETTING")
    given = parser.parse_args()
    try:
        train(given.out, given.only or list(settings()), print)
    except KeyboardInterrupt:
        raise SystemExit("interrupted; the same command goes on") from None


if __name__ == "__main__":
    main()
