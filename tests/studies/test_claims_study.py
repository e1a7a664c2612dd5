"""Study of claims: its rules on synthetic losses, and its page from the stored ones."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from study_modules import modules_of

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "studies" / "claims"
NOISE = (0.002, -0.001, 0.0, 0.001, -0.002)


@pytest.fixture(scope="module")
def study() -> dict[str, ModuleType]:
    """Return the study's modules, under unique names."""
    return modules_of("claims", "arms", "rules", "tables", "run")


def around(mean: float, sign: float = 1.0) -> list[float | None]:
    return [mean + sign * noise for noise in NOISE]


def word(study: dict[str, ModuleType], name: str, results: dict[str, Any]) -> str:
    (claim,) = (claim for claim in study["rules"].CLAIMS if claim.name == name)
    return str(claim.judge(results).word)


LN = around(4.0)
LOST: list[float | None] = [None, *around(4.0)[1:]]


@pytest.mark.parametrize(
    ("name", "group", "losses", "expected"),
    [
        ("derf", "adamw", {"derf": around(3.9), "ln": LN, "dyt": around(4.2)}, "shown"),
        ("derf", "adamw", {"derf": around(3.9), "ln": LN, "dyt": around(3.9)}, "contradicted"),
        ("derf", "adamw", {"derf": [3.8, 4.2, 3.9, 4.1, 4.05], "ln": LN, "dyt": LN}, "open"),
        ("derf", "adamw", {"derf": LOST, "ln": LN, "dyt": LN}, "contradicted"),
        ("prepbn", "adamw", {"prepbn": around(4.001, -1.0), "ln": LN}, "shown"),
        ("prepbn", "adamw", {"prepbn": around(3.9), "ln": LN}, "contradicted"),
        ("prepbn", "adamw", {"prepbn": [3.9, 4.1, 4.0, 3.95, 4.05], "ln": LN}, "open"),
        ("un", "small-batches", {"un": LN, "ln": LN, "bn": around(4.1)}, "shown"),
        ("un", "small-batches", {"un": around(4.2), "ln": LN, "bn": around(4.1)}, "contradicted"),
        ("un", "small-batches", {"un": LN, "ln": LN, "bn": LN}, "open"),
        ("un", "small-batches", {"un": LN, "ln": LN, "bn": LOST}, "shown"),
    ],
)
def test_losses_are_judged_by_the_rule(
    study: dict[str, ModuleType], name: str, group: str, losses: Any, expected: str
) -> None:
    assert word(study, name, {group: losses}) == expected


def test_steadiness_is_judged_by_scatter_and_lost_runs(study: dict[str, ModuleType]) -> None:
    wide = {f"pre@{rate}": [4 + 50 * noise for noise in NOISE] for rate in (1, 2, 3)}
    narrow = {f"peri@{rate}": around(4.0) for rate in (1, 2, 3)}
    assert word(study, "peri", {"peri": wide | narrow}) == "shown"
    turned = {f"{'peri' if 'pre' in key else 'pre'}@{key[-1]}": v for key, v in wide.items()}
    turned |= {f"pre@{rate}": around(4.0) for rate in (1, 2, 3)}
    assert word(study, "peri", {"peri": turned}) == "contradicted"
    lost = narrow | {"peri@3": [None] * 5}
    assert word(study, "peri", {"peri": wide | lost}) == "open"


def test_a_lead_that_grows_is_told_from_one_that_shrinks(study: dict[str, ModuleType]) -> None:
    small = {"rms": around(4.01), "derf": LN}
    large = {"rms": around(4.2), "derf": LN}
    assert word(study, "muon", {"adamw": small, "muon": large}) == "shown"
    assert word(study, "muon", {"adamw": large, "muon": small}) == "contradicted"


@pytest.mark.parametrize(
    ("num_plain", "num_inside", "expected"),
    [(10, 0, "shown"), (0, 0, "open"), (10, 10, "contradicted"), (6, 5, "open")],
)
def test_a_cure_needs_an_illness(
    study: dict[str, ModuleType], num_plain: int, num_inside: int, expected: str
) -> None:
    def runs(num_lost: int) -> list[float | None]:
        return [None] * num_lost + [4.0] * (20 - num_lost)

    losses = {"pre@1": runs(num_plain), "bn-ffn@1": runs(num_inside)}
    assert word(study, "bn-ffn", {"bn-ffn": losses}) == expected


def test_the_tables_are_those_of_the_stored_losses(
    study: dict[str, ModuleType], tmp_path: Path
) -> None:
    study["tables"].write(tmp_path, json.loads((STUDY / "claims.json").read_text(encoding="utf-8")))
    made = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()}
    assert made.keys() == {"claims.csv", "rules.csv", "tuned.csv", "sweeps.csv"}
    for name, text in made.items():
        assert text == (ROOT / "docs" / "claims" / name).read_text(encoding="utf-8"), name


def test_the_page_names_what_was_trained(study: dict[str, ModuleType]) -> None:
    page = " ".join((ROOT / "docs" / "claims.md").read_text(encoding="utf-8").split())
    arms = study["arms"]
    model, data = arms.BASE["model"], arms.BASE["data"]
    assert f"{model['num_layers']} layers of {model['num_features']} features" in page
    size = f"{data['batch_size']} × {data['sequence_length']} tokens"
    assert f"{arms.BASE['training']['max_steps']} updates of {size}" in page
    assert f"{arms.TRIALS} trials" in page
    assert f"{len(arms.SEEDS)} seeds with the best settings" in page
    assert f"The margin is {study['rules'].MARGIN} nats" in page


def test_every_group_can_be_configured(study: dict[str, ModuleType]) -> None:
    arms = study["arms"]
    for group in arms.GROUPS:
        norms = getattr(group, "norms", None) or (group.norm,)
        config = arms._config(norms, group.changes)
        assert config.seeds == arms.SEEDS
