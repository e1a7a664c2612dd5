"""Settings and results of the parser of Xu et al. 2019."""

import pytest

from powernorm.norms import NORMS
from powernorm_lab.recipes import changes_of, paper_records, recipe, reduced_note
from powernorm_lab.settings.comparison import ComparisonSettings


@pytest.mark.parametrize("preset", ["petrogold", "ptb-xu2019"])
def test_the_experiment_of_xu_et_al(preset: str) -> None:
    """2.2: "The dimension of the hidden state is 512, the batch size is 1,024, the dropout rate is
    0.2. We use optimizer Adam and initialize the learning rate to 0.001."
    """
    config = recipe("parse", preset)
    assert (config.model.num_features, config.model.dropout) == (512, 0.2)
    assert config.data.batch_size == 1024
    assert (config.optimizer.name, config.optimizer.learning_rate) == ("adam", 1e-3)
    assert config.optimizer.clip_norm is None
    assert config.schedule.name == "constant"
    assert len(config.seeds) == 5
    # Two transitions per word of projective trees: 1,900,056 in sections 2-21.
    passes = {"petrogold": 349_456, "ptb-xu2019": 1_900_056}[preset] / config.data.batch_size
    assert config.training.max_steps / passes == pytest.approx(10, rel=0.01)


def test_column_of_xu_et_al() -> None:
    config = recipe("parse", "ptb-xu2019")
    values = uas(config)
    assert values == {
        "none": 88.31,
        "ln": 89.12,
        "ln-simple": 89.19,
        "detach-both": 89.79,
        "detach-mean": 89.45,
        "detach-std": 89.80,
        "adanorm": 89.23,
    }
    # "AdaNorm outperforms LayerNorm … 0.11 UAC on PTB", "1.48" of DetachNorm in Table 2.
    assert values["adanorm"] - values["ln"] == pytest.approx(0.11)
    assert values["detach-both"] - values["none"] == pytest.approx(1.48)
    assert set(values) < {variant.label for variant in config.variants}
    assert {variant.norm for variant in config.variants} <= set(NORMS)
    assert {record["metric"] for record in paper_records(config)} == {"test_uas"}
    assert reduced_note(config) is None


def test_petrogold_says_that_it_is_not_penn_treebank() -> None:
    config = recipe("parse", "petrogold")
    assert uas(config) == uas(recipe("parse", "ptb-xu2019"))
    note, changes = reduced_note(config), changes_of(config)
    assert note is not None
    assert changes is not None
    assert note.startswith("A reduced ptb-xu2019. The paper's numbers are of Penn Treebank, these ")
    assert changes["preset"] == "ptb-xu2019"
    assert changes["settings"]["training.max_steps"] == {"here": 3410, "preset": 18500}
    assert "nothing was searched for" in (reduced_note(recipe("parse", "demo")) or "")


def uas(config: ComparisonSettings) -> dict[str, float | None]:
    return {record["norm"]: record["value"] for record in paper_records(config)}
