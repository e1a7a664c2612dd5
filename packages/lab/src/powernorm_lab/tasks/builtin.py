"""The grid of a comparison of norms on a built-in task, and the settings in its files."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from powernorm.errors import InputError
from powernorm_lab.engine.environment import environment
from powernorm_lab.engine.grid import Grid
from powernorm_lab.engine.line import Line
from powernorm_lab.runs import Goal, StudyInfo
from powernorm_lab.settings.comparison import ComparisonSettings, Notes, options_of, to_json
from powernorm_lab.settings.variants import (
    chosen_norms,
    description,
    line_of_variant,
    lines_of,
    study_info,
)
from powernorm_lab.tasks.registry import task_of
from powernorm_lab.training.norms import norm_options, qk_norm_factory
from powernorm_lab.training.training import choose_device

RUN_KEYS: Final = ("norm", "label", "seed", "data_fingerprint")
"""Keys of a run's config.json besides its settings."""
PACKAGES: Final = ("powernorm", "torch", "tokenizers", "sacrebleu")


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


def check_norms(config: ComparisonSettings) -> None:
    """Check the names and options of all norms and variants by building each norm once.

    Raises:
        InputError: a norm or an option is unknown, or an option does not fit the model.
    """
    with torch.random.fork_rng(devices=[]):  # a user's norm may draw its initial weights
        for norm in dict.fromkeys([*chosen_norms(config), *config.norm_options]):
            norm_options(config, norm, task_of(config).norm_widths(config))
        for line in lines_of(config):
            task = task_of(line.settings)
            norm_options(line.settings, line.norm, task.norm_widths(line.settings))
            qk_norm_factory(line.settings)
            task.check(line.settings, line.norm)


def grid_of(config: ComparisonSettings, notes: Notes) -> Grid:
    """Return the grid of a comparison on a built-in task.

    Raises:
        InputError: a norm is unknown, or an option does not fit it or the model.
    """
    check_norms(config)
    study = None if config.study is None else study_info(config.study)
    score = config.score if config.score_every else None
    return Grid(
        task=task_of(config),
        lines=lines_of(config),
        seeds=config.seeds,
        goal=notes.goal,
        settings=config,
        head=partial(_head, config, notes, study, score),
        config=_run_config,
        line_of=partial(_line_of, config),
        device=choose_device(config),
        num_threads=config.training.num_threads,
        study=study,
        score=None if score is None else config.score_name,
    )


def _run_config(line: Line, seed: int, fingerprint: str | None) -> Mapping[str, Any]:
    """Return all settings that determine the outcome of a run, for its config.json."""
    settings = to_json(line.settings)
    del settings["norms"], settings["seeds"]
    return {
        **settings,
        "norm": line.norm,
        "seed": seed,
        "norm_options": dict(options_of(line.settings, line.norm)),
        "data_fingerprint": str(fingerprint),
        **({} if line.label is None else {"label": line.label}),
    }


def _head(
    config: ComparisonSettings, notes: Notes, study: StudyInfo | None, score: Goal | None
) -> dict[str, Any]:
    return {
        "task": config.task,
        "preset": config.preset,
        "placement": config.placement,
        "settings": comparison_settings(config),
        "score": score,
        "study": study,
        "paper": list(notes.paper),
        "paper_statistics": list(notes.paper_statistics),
        "reduced": notes.reduced or "",
        "changes": notes.changes,
    }


def _line_of(config: ComparisonSettings, folder: Path, old: Mapping[str, Any]) -> Line:
    """Return the line of a run of an earlier call, even if its norm or variant is not selected."""
    if not config.variants:
        return Line(str(old.get("norm")), config, placement=config.placement)
    for variant in config.variants:
        if variant.label == old.get("label"):
            return line_of_variant(config, variant)
    raise InputError(
        f"{folder} is no run of this study: give another --out, or --force to delete it"
    )
