import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from tiny_training import TRAINING, Configure, compare

from powernorm.errors import InputError
from powernorm.norms import BatchNorm, LayerNorm
from powernorm_lab.engine.events import Event, RunEnded, RunStarted, StepsDone
from powernorm_lab.settings.comparison import ComparisonSettings, Study, Variant, to_json
from powernorm_lab.settings.overrides import override
from powernorm_lab.settings.training import (
    OptimizerSettings,
)
from powernorm_lab.settings.variants import chosen_norms, description, lines_of
from powernorm_lab.tasks.builtin import check_norms, comparison_settings
from powernorm_lab.tasks.lm.settings import LanguageModelSettings, LanguageModelShape
from powernorm_lab.tasks.registry import settings_from, task_of
from powernorm_lab.tasks.trained_models import load_trained

STUDY = Study("sizes", "Sizes", "nowhere", x_label="tokens", logarithmic=True)
VARIANTS = (
    Variant("ln", "ln"),
    Variant(
        "pn-fast",
        "pn",
        {"momentum": 0.5},
        {"data.batch_size": "4", "optimizer.accumulation": "2"},
        x=48.0,
    ),
    Variant("pn-slow", "pn", {"momentum": 0.01}, x=96.0, y=1.0),
    Variant("bn-post", "bn", settings={"model.placement": "post"}, x=96.0),
)


def varied(config: ComparisonSettings, *norms: str) -> ComparisonSettings:
    return replace(config, norms=norms or ("ln", "pn", "bn"), study=STUDY, variants=VARIANTS)


def base() -> ComparisonSettings:
    return LanguageModelSettings(
        preset="test", norm_options={"pn": {"groups": None, "momentum": 0.2}}
    )


def test_json_round_trip() -> None:
    config = varied(base())
    assert settings_from(json.loads(json.dumps(to_json(config)))) == config


def test_what_a_file_leaves_out_has_its_default() -> None:
    values = to_json(base())
    assert not {"study", "variants"} & set(values)
    del values["model"]["num_norm_layers"], values["training"]["record_scales"]
    assert settings_from(values) == base()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variants": 3}, "variants=3 has the wrong type"),
        ({"variants": [3]}, "variants.0=3 has the wrong type"),
        ({"variants": [{"label": "a"}]}, "norm is required"),
        ({"study": "x"}, "study=x has the wrong type"),
        ({"study": {"name": "x"}}, "title is required"),
    ],
)
def test_foreign_json_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        settings_from(to_json(varied(base())) | change)


def test_settings_that_are_no_mapping_are_named() -> None:
    values = to_json(varied(base()))
    values["variants"][0]["settings"] = ["data.batch_size=4"]
    with pytest.raises(InputError, match=r"variants\.settings=data.* has the wrong type"):
        settings_from(values)


def test_lines_are_the_norms_without_variants() -> None:
    config = replace(base(), norms=("ln", "bn"))
    assert [(line.name, line.norm, line.settings) for line in lines_of(config)] == [
        ("ln", "ln", config),
        ("bn", "bn", config),
    ]


def test_lines_of_variants_have_their_settings_and_nothing_else() -> None:
    lines = {line.name: line for line in lines_of(varied(base()))}
    assert list(lines) == ["ln", "pn-fast", "pn-slow", "bn-post"]
    plain = replace(base(), norms=("pn",))
    fast = lines["pn-fast"].settings
    assert fast.data.batch_size == 4
    assert fast.optimizer.accumulation == 2
    assert fast.norm_options["pn"] == {"groups": None, "momentum": 0.5}
    assert fast == replace(
        plain,
        data=fast.data,
        optimizer=fast.optimizer,
        norm_options=fast.norm_options,
    )
    assert lines["bn-post"].settings.placement == "post"
    assert lines["ln"].settings == replace(base(), norms=("ln",), norm_options={})


def test_norms_choose_variants() -> None:
    assert [line.name for line in lines_of(varied(base(), "pn"))] == ["pn-fast", "pn-slow"]
    assert [line.name for line in lines_of(override(varied(base()), ["norms=bn"]))] == ["bn-post"]
    with pytest.raises(InputError, match=r"the study sizes has no variant of rms; .* ln, pn, bn"):
        varied(base(), "ln", "rms")


def test_labels_choose_variants() -> None:
    config = varied(base(), "pn-slow", "ln")
    assert [line.name for line in lines_of(config)] == ["ln", "pn-slow"]
    assert chosen_norms(config) == ["ln", "pn"]
    assert comparison_settings(config)["norm_options"]["pn"]["momentum"] == 0.2
    check_norms(config)


def test_name_of_a_norm_is_no_label() -> None:
    """In studies the name of a norm may be the label of another variant."""
    variants = (Variant("bn", "pn"), Variant("b", "bn"))
    config = replace(base(), norms=("bn",), variants=variants)
    assert [line.name for line in lines_of(config)] == ["b"]


def test_preset_is_named_where_there_is_no_study() -> None:
    with pytest.raises(InputError, match=r"the preset test has no variant of rms; .* pn-fast"):
        replace(base(), norms=("rms",), variants=VARIANTS)


def test_norms_without_variants_are_chosen_as_they_are() -> None:
    assert chosen_norms(replace(base(), norms=("bn", "ln"))) == ["bn", "ln"]


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (Variant("a", "ln", settings={"seeds": "1"}), "a sets seeds, which all runs"),
        (Variant("a", "ln", settings={"data.vocabulary_size": "300"}), "data.vocabulary_size"),
        (Variant("a", "ln", settings={"model.depth": "3"}), "'model.depth' is not a setting"),
        (Variant("a", "ln", settings={"model.num_norm_layers": "3"}), "give 0 to 2"),
    ],
)
def test_bad_settings_of_variants(variant: Variant, message: str) -> None:
    with pytest.raises(InputError, match=message):
        lines_of(replace(base(), norms=("ln",), variants=(variant,)))


@pytest.mark.parametrize("label", ["", "a/b", "..", "-a", "a b", "λ"])
def test_labels_name_folders(label: str) -> None:
    with pytest.raises(InputError, match="cannot name a folder"):
        replace(base(), norms=("ln",), study=STUDY, variants=(Variant(label, "ln"),))


def test_equal_labels_are_refused() -> None:
    with pytest.raises(InputError, match="variants names a more than once"):
        replace(base(), norms=("ln",), variants=(Variant("a", "ln"), Variant("a", "ln")))


def test_studies_are_no_settings() -> None:
    for key in ("study", "variants"):
        with pytest.raises(InputError, match=f"'{key}' is not a setting"):
            override(varied(base()), [f"{key}=x"])


def test_description_is_that_of_the_command_line() -> None:
    assert description(VARIANTS[1]) == (
        "norm=pn norm_options.pn.momentum=0.5 data.batch_size=4 optimizer.accumulation=2"
    )


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("lowest", [0, 1, 2, None])
def test_norm_in_the_lowest_layers_only(lowest: int | None, placement: str) -> None:
    model = LanguageModelShape(num_norm_layers=lowest, placement=placement)  # type: ignore[arg-type]
    built = task_of(replace(base(), model=model)).build(
        replace(base(), model=model), "bn", (257,), seed=0
    )
    kinds = [
        {type(layer.attention_frame.norm), type(layer.feedforward_frame.norm)}
        for layer in built.layers
    ]
    num = 2 if lowest is None else lowest
    assert kinds == [{BatchNorm}] * num + [{LayerNorm}] * (2 - num)
    if placement == "pre":
        assert type(built.final_norm) is (BatchNorm if num == 2 else LayerNorm)
    same = task_of(base()).build(base(), "ln", (257,), seed=0)
    weights = dict(same.named_parameters())
    for name, parameter in built.named_parameters():
        assert parameter.equal(weights[name]), "initial weights do not depend on the norms"


def test_comparison_of_variants(configure: Configure, tmp_path: Path) -> None:
    config = varied(configure(seeds=(0,), training=replace(TRAINING, record_scales=True)))
    results = compare(config, tmp_path)
    assert results.study == {
        "name": "sizes",
        "title": "Sizes",
        "x_label": "tokens",
        "logarithmic": True,
        "source": "nowhere",
    }
    shown = [(r.label, r.norm, r.x, r.y, r.folder) for r in results.runs]
    assert shown == [
        ("ln", "ln", None, None, "ln-pre-seed0"),
        ("pn-fast", "pn", 48.0, None, "pn-fast-pre-seed0"),
        ("pn-slow", "pn", 96.0, 1.0, "pn-slow-pre-seed0"),
        ("bn-post", "bn", 96.0, None, "bn-post-post-seed0"),
    ]
    assert [run.status for run in results.runs] == ["finished"] * 4
    assert results.settings["variants"]["pn-slow"] == "norm=pn norm_options.pn.momentum=0.01"
    written = json.loads((tmp_path / "pn-fast-pre-seed0" / "config.json").read_text())
    assert (written["label"], written["norm"]) == ("pn-fast", "pn")
    assert written["data"]["batch_size"] == 4
    # A quarter of 12 updates with 2 micro-batches each: the warm-up counts micro-batches.
    assert written["norm_options"] == {"warmup_steps": 2, "momentum": 0.5}
    model = load_trained(tmp_path / "pn-fast-pre-seed0").model
    assert model.layers[0].attention_frame.norm.momentum == 0.5
    check_scales(tmp_path)


def check_scales(folder: Path) -> None:
    assert json.loads((folder / "ln-pre-seed0" / "scales.json").read_text())["layers"] == []
    layers = json.loads((folder / "pn-slow-pre-seed0" / "scales.json").read_text())["layers"]
    assert [layer["layer"] for layer in layers][-1] == "final_norm"
    assert len(layers) == 3
    model = load_trained(folder / "pn-slow-pre-seed0").model
    norm = dict(model.named_modules())["final_norm"]
    assert layers[-1]["weight"] == pytest.approx(norm.weight.tolist())
    # After GroupScaling the quadratic mean over tokens and features is 1.
    deviation = layers[0]["deviation"]
    assert sum(value**2 for value in deviation) / len(deviation) == pytest.approx(1, abs=0.1)


def test_interrupted_study_goes_on(configure: Configure, tmp_path: Path) -> None:
    config = varied(configure(optimizer=OptimizerSettings(learning_rate=1e-2)))

    def stop(event: Event) -> None:
        if isinstance(event, StepsDone) and (event.norm, event.step) == ("pn-slow", 6):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(config, tmp_path / "parts", on_event=stop)
    # A call with some of the norms keeps the runs of the others.
    compare(replace(config, norms=("ln",)), tmp_path / "parts", resume=True)
    events: list[Event] = []
    parts = compare(config, tmp_path / "parts", resume=True, on_event=events.append)
    assert [e.norm for e in events if isinstance(e, RunStarted)] == ["pn-slow", "bn-post"]
    assert [e.result.label for e in events if isinstance(e, RunEnded) and e.skipped] == [
        "ln",
        "pn-fast",
    ]
    whole = compare(config, tmp_path / "whole")
    assert [r.metrics for r in parts.runs] == [r.metrics for r in whole.runs]
    faster = (VARIANTS[0], replace(VARIANTS[1], norm_options={"momentum": 0.4}), *VARIANTS[2:])
    with pytest.raises(InputError, match=r"other settings .*norm_options.momentum 0.5 → 0.4"):
        compare(replace(config, variants=faster), tmp_path / "parts", resume=True)
    with pytest.raises(InputError, match="is no run of this study"):
        compare(
            replace(config, norms=("ln",), variants=VARIANTS[:1]), tmp_path / "parts", resume=True
        )


def test_bad_options_are_found_before_anything_is_trained(
    configure: Configure, tmp_path: Path
) -> None:
    broken = (Variant("ln", "ln"), Variant("bn-x", "bn", {"max_ratio": 3}))
    config = replace(configure(), norms=("ln", "bn"), variants=broken)
    with (
        patch("powernorm_lab.training.task.train") as trainer,
        pytest.raises(InputError, match="has no option 'max_ratio'"),
    ):
        compare(config, tmp_path)
    trainer.assert_not_called()


def test_a_variant_of_other_data_is_refused(configure: Configure, tmp_path: Path) -> None:
    words = Variant("words", "ln", settings={"data.vocabulary": "words"})
    sizes = Variant("sizes", "ln", settings={"data.sequence_length": "8"})
    config = replace(configure(norms=("ln",), seeds=(0,)), variants=(sizes,))
    assert [run.status for run in compare(config, tmp_path / "sizes").runs] == ["finished"]
    with pytest.raises(InputError, match="words has data settings that change the data"):
        compare(replace(config, variants=(sizes, words)), tmp_path / "words")
    assert not (tmp_path / "words").exists()
