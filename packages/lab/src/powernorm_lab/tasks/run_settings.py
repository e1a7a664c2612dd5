"""Settings of runs and comparisons, for config.json and comparison.json."""

from typing import Any, Final

from powernorm_lab.engine.environment import environment
from powernorm_lab.settings.comparison import ComparisonSettings, options_of, to_json
from powernorm_lab.settings.variants import chosen_norms, description

RUN_KEYS: Final = ("norm", "label", "seed", "data_fingerprint")
"""Keys of a run's config.json besides its settings."""
PACKAGES: Final = ("powernorm", "torch", "tokenizers", "sacrebleu")


def run_settings(
    config: ComparisonSettings, norm: str, label: str | None, seed: int, fingerprint: str
) -> dict[str, Any]:
    """Return all settings that determine the outcome of a run, for its config.json.

    Args:
        config: configuration with the settings of the run's variant.
        norm: short name.
        label: label of the variant, if there is one.
        seed: seed of the run.
        fingerprint: fingerprint of the data.
    """
    settings = to_json(config)
    del settings["norms"], settings["seeds"]
    return {
        **settings,
        "norm": norm,
        "seed": seed,
        "norm_options": dict(options_of(config, norm)),
        "data_fingerprint": fingerprint,
        **({} if label is None else {"label": label}),
    }


def comparison_settings(config: ComparisonSettings) -> dict[str, Any]:
    """Return the configuration with resolved options of the norms, versions and machine."""
    settings = to_json(config)
    if config.variants:
        settings["variants"] = {variant.label: description(variant) for variant in config.variants}
    return {
        **settings,
        "norm_options": {norm: dict(options_of(config, norm)) for norm in chosen_norms(config)},
        **environment(PACKAGES),
    }
