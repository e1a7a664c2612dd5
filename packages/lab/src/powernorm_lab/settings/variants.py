"""Lines of a comparison: its norms or the variants of its study, each with its settings."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from powernorm.errors import InputError
from powernorm_lab.engine.line import Line
from powernorm_lab.runs import StudyInfo
from powernorm_lab.settings.comparison import ComparisonSettings, Study, Variant
from powernorm_lab.settings.overrides import override

SHARED_KEYS: Final = (
    "norms",
    "seeds",
    "data.path",
    "data.vocabulary_size",
    "training.accelerator",
    "training.score_every",
    "training.num_threads",
)
"""Settings that are shared by all runs of a comparison, so that no variant can change them."""


def lines_of(config: ComparisonSettings) -> list[Line]:
    """Return the lines of a comparison in the order of its table.

    Raises:
        InputError: a variant's settings are unknown, do not fit, or are shared by all runs.
    """
    if not config.variants:
        return [Line(norm, config, placement=config.placement) for norm in config.norms]
    return [line_of_variant(config, variant) for variant in _chosen_variants(config)]


def chosen_norms(config: ComparisonSettings) -> list[str]:
    """Return the distinct short names of the norms that are trained, also in variants."""
    if not config.variants:
        return list(config.norms)
    return list(dict.fromkeys(variant.norm for variant in _chosen_variants(config)))


def _chosen_variants(config: ComparisonSettings) -> list[Variant]:
    """Return the variants whose norm or label is in `norms`; a norm's name is never a label."""
    norms = {variant.norm for variant in config.variants}
    labels = set(config.norms) - norms
    return [
        variant
        for variant in config.variants
        if variant.norm in config.norms or variant.label in labels
    ]


def line_of_variant(config: ComparisonSettings, variant: Variant) -> Line:
    """Return the line of a variant, whether or not its norm is chosen.

    Raises:
        InputError: as `lines_of`.
    """
    shared = [key for key in variant.settings if key in SHARED_KEYS]
    if shared:
        raise InputError(
            f"the variant {variant.label} sets {', '.join(shared)}, which all runs of a comparison "
            "share: set it for the whole comparison"
        )
    chosen = {**config.norm_options.get(variant.norm, {}), **variant.norm_options}
    options = {variant.norm: chosen} if chosen else {}
    plain = replace(config, norms=(variant.norm,), norm_options=options, study=None, variants=())
    assignments = [f"{key}={value}" for key, value in variant.settings.items()]
    own = override(plain, assignments)
    return Line(
        variant.norm,
        own,
        label=variant.label,
        placement=own.placement,
        x=variant.x,
        y=variant.y,
    )


def study_info(study: Study) -> StudyInfo:
    """Return a study's entry in results.json."""
    info = StudyInfo(
        name=study.name,
        title=study.title,
        x_label=study.x_label,
        logarithmic=study.logarithmic,
        source=study.source,
    )
    if study.y_label is not None:
        info["y_label"] = study.y_label
    return info


def description(variant: Variant) -> str:
    """Describe a variant in the syntax of the command line.

    >>> description(Variant("a", "pn", {"momentum": 0.1}, {"data.batch_size": "8"}))
    'norm=pn norm_options.pn.momentum=0.1 data.batch_size=8'
    """
    chosen: Mapping[str, object] = {
        "norm": variant.norm,
        **{f"norm_options.{variant.norm}.{key}": v for key, v in variant.norm_options.items()},
        **variant.settings,
    }
    return " ".join(f"{key}={value}" for key, value in chosen.items())
