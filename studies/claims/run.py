"""Six claims of the field, tested with equal tuning on one small language model.

    python studies/claims/run.py --out runs/claims             # trains missing runs; resumable
    python studies/claims/run.py --out runs/claims --only muon
    python studies/claims/run.py --out runs/claims --collect   # studies/claims/claims.json
    python studies/claims/run.py --write docs/claims           # the page's tables from claims.json

After Ctrl-C the same command continues.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from arms import GROUPS, Sweep, train
from tables import write

HERE = Path(__file__).parent
MEASURED = HERE / "claims.json"
LOST = ("diverged", "nonfinite")


def collect(out: Path) -> dict[str, Any]:
    """Return losses and chosen settings of the complete groups in a folder."""
    found = {}
    for group in GROUPS:
        arms: dict[str, Any] = {}
        for key, folder in group.folders(out):
            arms |= _comparison(folder, key if isinstance(group, Sweep) else None)
        if arms and all(None not in arm["statuses"] for arm in arms.values()):
            found[group.name] = arms
    return {"groups": found}


def _comparison(folder: Path, key: str | None) -> dict[str, Any]:
    """Return the arms of a comparison; a single arm is named by `key`."""
    path = folder / "results.json"
    if not path.exists():
        return {key or str(folder): {"statuses": [None], "losses": []}}
    results = json.loads(path.read_text(encoding="utf-8"))
    tuned = (results.get("tuning") or {"norms": {}})["norms"]
    arms: dict[str, Any] = {}
    for run in sorted(results["runs"], key=lambda run: run["seed"]):
        arm = arms.setdefault(key or run["norm"], {"statuses": [], "losses": [], "settings": {}})
        is_over = run["status"] in ("finished", *LOST)
        arm["statuses"].append(run["status"] if is_over else None)
        is_kept = run["status"] == "finished"
        arm["losses"].append(round(run["metrics"]["test_loss"], 5) if is_kept else None)
        if run["norm"] in tuned:
            arm["settings"] = tuned[run["norm"]]["best"]["settings"]
    return arms


def main() -> None:
    """Parse, then train, collect or write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/claims"))
    names = [group.name for group in GROUPS]
    parser.add_argument("--only", action="append", choices=names, metavar="GROUP")
    parser.add_argument("--collect", action="store_true", help="train nothing")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the tables alone")
    given = parser.parse_args()
    if given.write:
        write(given.write, json.loads(MEASURED.read_text(encoding="utf-8")))
        return
    if not given.collect:
        try:
            train(given.out, given.only or names, print)
        except KeyboardInterrupt:
            raise SystemExit("interrupted; the same command continues") from None
    MEASURED.write_text(json.dumps(collect(given.out), indent=1) + "\n", encoding="utf-8")
    print(f"{MEASURED}: {', '.join(collect(given.out)['groups']) or 'no group is complete'}")


if __name__ == "__main__":
    main()
