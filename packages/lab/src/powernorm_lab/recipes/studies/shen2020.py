"""Studies of Shen et al. 2020, PowerNorm."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from powernorm.errors import InputError
from powernorm_lab.recipes.studies.definition import StudyRecipe, Variants
from powernorm_lab.recipes.studies.sizes import StudySize
from powernorm_lab.settings.comparison import ComparisonSettings, Study, Variant
from powernorm_lab.settings.training import TrainingSettings

MICRO_BATCH_NORMS: Final = ("bn", "pnv", "pn")
DIVISIONS: Final = (8, 4, 2, 1)
"""Micro-batches in an update: the paper's 512, 1k, 2k and 4k tokens of 4k."""

ALPHAS: Final = (0.9, 0.95, 0.99)
"""Weights of the old statistics, forward and backward."""


@dataclass(frozen=True)
class _Batch:
    """The micro-batch of a configuration."""

    key: str
    """Setting of its size."""
    size: int
    """Value of the setting."""
    factor: int
    """Factor from the size to the position on the x axis."""
    unit: str
    """Unit of the x axis."""
    is_budget: bool
    """Whether the size is an upper limit, so that divisions may have a remainder."""


def _batch(size: StudySize, config: ComparisonSettings) -> _Batch:
    tokens: int | None = getattr(config.data, "batch_tokens", None)
    if tokens is not None:
        return _Batch("data.batch_tokens", tokens, 1, "tokens", is_budget=True)
    rows: int = config.data.batch_size  # type: ignore[attr-defined]
    length = 1 if size.rows else config.data.sequence_length  # type: ignore[attr-defined]
    return _Batch("data.batch_size", rows, length, size.rows or "tokens", is_budget=False)


def micro_batches(size: StudySize, config: ComparisonSettings) -> Variants:
    """Return each norm with statistics from 1/8, 1/4, 1/2 and all of an update.

    LayerNorm does not depend on the division and needs one run. An exception are micro-batches by
    number of tokens: the sentences of one have similar lengths, those of several do not, so that
    LayerNorm is divided, too. All variants measure TID on the same number of tokens, and their
    warm-ups, which count micro-batches, last equally many updates.

    Raises:
        InputError: the batch cannot be divided.
    """
    batch = _batch(size, config)
    divisions = [
        parts
        for parts in DIVISIONS
        if batch.size >= parts and (batch.is_budget or not batch.size % parts)
    ]
    if len(divisions) < 2:
        raise InputError(
            f"{batch.key}={batch.size} cannot be divided for the study micro-batches: choose an "
            f"even number, preferably a multiple of {DIVISIONS[0]}"
        )
    whole = Variant("ln", "ln", x=float(batch.size * batch.factor) if batch.is_budget else None)
    smaller = [parts for parts in divisions if parts > 1] if batch.is_budget else []
    return (
        whole,
        *(_divided(config, "ln", batch, parts) for parts in smaller),
        *(
            _divided(config, norm, batch, parts)
            for norm in MICRO_BATCH_NORMS
            for parts in divisions
        ),
    )


def _divided(config: ComparisonSettings, norm: str, batch: _Batch, parts: int) -> Variant:
    settings = {
        batch.key: str(batch.size // parts),
        "optimizer.accumulation": str(config.optimizer.accumulation * parts),
        "training.tid_batches": str(config.training.tid_batches * parts),
    }
    final_warmup = getattr(config.model, "final_norm_warmup", None)
    if final_warmup:
        settings["model.final_norm_warmup"] = str(final_warmup * parts)
    warmup = config.norm_options.get(norm, {}).get("warmup_steps")
    options = {"warmup_steps": int(warmup) * parts} if warmup else {}
    place = batch.size // parts * batch.factor
    return Variant(f"{norm}-{place}", norm, options, settings, x=float(place))


def _undivided(size: StudySize, config: ComparisonSettings) -> Mapping[str, str]:
    batch = _batch(size, config)
    place = batch.size * batch.factor
    return {"ln": "ln", **{f"{norm}-{place}": norm for norm in MICRO_BATCH_NORMS}}


def _in_a_micro_batch(size: StudySize, config: ComparisonSettings) -> str:
    return f"{_batch(size, config).unit} in a micro-batch"


def alphas(size: StudySize, config: ComparisonSettings) -> Variants:
    """Return LayerNorm, and PowerNorm with every pair of a forward and a backward α."""
    del size
    chosen = ALPHAS[::2] if config.preset == "smoke" else ALPHAS
    return (
        Variant("ln", "ln"),
        *(
            Variant(
                f"pn-{forward}-{backward}",
                "pn",
                # The papers' α is the weight of the old value, momentum that of the new.
                {
                    "momentum": round(1 - forward, 6),
                    "backward_momentum": round(1 - backward, 6),
                },
                x=forward,
                y=backward,
            )
            for forward in chosen
            for backward in chosen
        ),
    )


def scales(size: StudySize, config: ComparisonSettings) -> Variants:
    """Return each norm unchanged, with the scales recorded."""
    del size
    needed = {"training.record_scales": "true", "training.tid_batches": str(_batches(config))}
    return tuple(Variant(norm, norm, settings=needed) for norm in config.norms)


def _with_scales(config: ComparisonSettings) -> ComparisonSettings:
    training = replace(config.training, record_scales=True, tid_batches=_batches(config))
    return replace(config, training=training)


def _batches(config: ComparisonSettings) -> int:
    """Return the number of batches for the deviations; recipes without batch statistics have 0."""
    return config.training.tid_batches or TrainingSettings.tid_batches


MICRO_BATCHES: Final = StudyRecipe(
    Study(
        name="micro-batches",
        title="Statistics from smaller micro-batches",
        source="Shen et al. 2020, Figure 5",
        logarithmic=True,
    ),
    "statistics from fewer tokens at a fixed update (S20 Fig. 5)",
    ("ln", *MICRO_BATCH_NORMS),
    micro_batches,
    x_label=_in_a_micro_batch,
    rows=_undivided,
)
ALPHA_GRID: Final = StudyRecipe(
    Study(
        name="alphas",
        title="Forward and backward α of PowerNorm",
        source="Shen et al. 2020, Appendix A",
        x_label="forward α",
        y_label="backward α",
    ),
    "PowerNorm's forward and backward α (S20 App. A)",
    ("ln", "pn"),
    alphas,
    varied_options=("momentum", "backward_momentum"),
    # The paper does not say which α it chose, so that no cell has its result.
    rows=lambda *_: {"ln": "ln"},
)
SCALES: Final = StudyRecipe(
    Study(
        name="scales",
        title="γ against the deviation of the batches",
        source="Shen et al. 2020, Appendix B.1",
    ),
    "γ against ψ_B in every layer (S20 App. B.1)",
    ("pn", "pnv", "bn"),
    scales,
    base=_with_scales,
    rows=lambda _, config: {norm: norm for norm in config.norms},
)
