"""Which settings of a language model's architecture and output go together."""

from typing import Final

from powernorm.errors import InputError
from powernorm.training.config import ComparisonConfig, is_set

ARCHITECTURES: Final = ("plain", "tensorized")
"""What `model.architecture` may be for a language model; none is `plain`."""
TENSORIZED_ONLY: Final = ("model.head_features", "model.sees_future")


def check_architecture(config: ComparisonConfig) -> None:
    """Check that no setting of the architecture and of the output would be ignored.

    Raises:
        InputError: one would be; the message names it and says what to set in its place.
    """
    model = config.model
    architecture = model.architecture or ARCHITECTURES[0]
    if architecture not in ARCHITECTURES:
        raise InputError(
            f"model.architecture={architecture} is none of the task {config.task}: choose one of "
            f"{', '.join(ARCHITECTURES)}."
        )
    if architecture == "tensorized":
        if model.num_heads != 1:
            raise InputError(
                f"model.num_heads={model.num_heads}: the tensorized attention has one head; set "
                "model.num_heads=1, and its size with model.head_features."
            )
    else:
        for key in TENSORIZED_ONLY:
            if is_set(config, key):
                raise InputError(
                    f"{key} means nothing to the usual attention: leave it out, or set "
                    "model.architecture=tensorized."
                )
    if model.adaptive_cutoffs:
        _check_adaptive(config)


def _check_adaptive(config: ComparisonConfig) -> None:
    if config.training.label_smoothing:
        raise InputError(
            f"training.label_smoothing={config.training.label_smoothing:g} needs the probabilities "
            "of the whole vocabulary, which an adaptive softmax does not compute: set it to 0, or "
            "leave model.adaptive_cutoffs out."
        )
    if config.training.strategy == "fsdp2":
        # The weights of a cluster are gathered when it is run, for which all would have to wait.
        raise InputError(
            "training.strategy=fsdp2: a process runs only those clusters of an adaptive softmax "
            "that its targets lie in; use ddp, or leave model.adaptive_cutoffs out."
        )
