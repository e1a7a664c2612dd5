"""The section `model` of a configuration."""

from dataclasses import dataclass, field
from typing import get_args

from powernorm.errors import InputError
from powernorm.models.choices import (
    Activation,
    Architecture,
    Initialisation,
    Placement,
    Pooling,
    SharedEmbeddings,
)
from powernorm.training.config_checks import check_at_least, check_fraction, check_one_of
from powernorm.training.config_fields import LATER


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of the model."""

    num_features: int = 128
    num_layers: int = 2
    num_heads: int = 4
    feedforward_features: int = 512
    dropout: float = 0.0
    activation: Activation = "gelu"
    placement: Placement = "pre"
    num_norm_layers: int | None = field(default=None, metadata=LATER)
    """Lowest layers that have the norm; those above have LayerNorm with its defaults, and so has
    the final norm. None, or all layers, gives every place the norm."""
    num_decoder_layers: int | None = field(default=None, metadata=LATER)
    """Layers of a translation's decoder; None is as many as the encoder has."""
    decoder_norm: str = field(default="ln", metadata=LATER)
    """Short name of the norms in a translation's decoder; `same` is the encoder's. The papers
    change the encoder only."""
    attention_norm: str | None = field(default=None, metadata=LATER)
    """Short name of the norms at the encoder's self-attention; None is the run's norm."""
    feedforward_norm: str | None = field(default=None, metadata=LATER)
    """Short name of the norms at the encoder's feed-forward networks; None is the run's norm."""
    final_norm: str | None = field(default=None, metadata=LATER)
    """Short name of the norm after the encoder's last layer (pre-norm); None is the run's norm."""
    final_norm_warmup: int | None = field(default=None, metadata=LATER)
    """Warm-up steps of the norm after the encoder's last layer, where it has a warm-up; None is
    that of the others."""
    attention_dropout: float = field(default=0.0, metadata=LATER)
    """Of the attention weights, where the task has it."""
    activation_dropout: float | None = field(default=None, metadata=LATER)
    """After the activation of the feed-forward networks, where the task has it; None is
    `dropout`."""
    shared_embeddings: SharedEmbeddings = field(default="all", metadata=LATER)
    """Which of a translation's tables are one: all three, target and output, or none."""
    initialisation: Initialisation = field(default="xavier", metadata=LATER)
    """How linear maps begin; Xu et al. 2019 recommend `kaiming` for AdaNorm."""
    architecture: Architecture | None = field(default=None, metadata=LATER)
    """Which of a task's models; None is its own."""
    head_features: int | None = field(default=None, metadata=LATER)
    """Size of an attention head; None is num_features / num_heads."""
    sees_future: bool = field(default=False, metadata=LATER)
    """Whether the tensorized attention leaves its causal mask out, as its published code does."""
    memory_length: int | None = field(default=None, metadata=LATER)
    """Positions before a segment that the attention still sees, in training."""
    evaluation_memory_length: int | None = field(default=None, metadata=LATER)
    """The same in evaluation; None is as in training."""
    pooling: Pooling = field(default="mean", metadata=LATER)
    """How a classifier of texts makes one vector of all positions."""
    embedding_features: int | None = field(default=None, metadata=LATER)
    """Size of embeddings where it is not num_features."""
    embedding_dropout: float | None = field(default=None, metadata=LATER)
    """Of the embeddings; None is `dropout`."""
    character_dropout: float | None = field(default=None, metadata=LATER)
    """Of what a tagger of names makes of a word's characters; None is as of the embeddings."""
    output_dropout: float | None = field(default=None, metadata=LATER)
    """Before the output; None is none."""
    character_features: int | None = field(default=None, metadata=LATER)
    """Features that a tagger of names makes of a word's characters; None is none."""
    adaptive_cutoffs: tuple[int, ...] = field(default=(), metadata=LATER)
    """Ids at which the clusters of an adaptive softmax end; empty is a plain softmax."""

    def __post_init__(self) -> None:
        if self.num_decoder_layers is not None:
            check_at_least("model.num_decoder_layers", self.num_decoder_layers, 1)
        if self.final_norm_warmup is not None:
            check_at_least("model.final_norm_warmup", self.final_norm_warmup, 0)
        check_fraction("model.attention_dropout", self.attention_dropout, below_one=True)
        if self.activation_dropout is not None:
            check_fraction("model.activation_dropout", self.activation_dropout, below_one=True)
        check_one_of("model.shared_embeddings", self.shared_embeddings, get_args(SharedEmbeddings))
        check_one_of("model.initialisation", self.initialisation, get_args(Initialisation))
        for name in ("num_features", "num_layers", "num_heads", "feedforward_features"):
            check_at_least(f"model.{name}", getattr(self, name), 1)
        self._check_later()
        check_fraction("model.dropout", self.dropout, below_one=True)
        check_one_of("model.activation", self.activation, get_args(Activation))
        check_one_of("model.placement", self.placement, get_args(Placement))
        if self.num_norm_layers is not None and not 0 <= self.num_norm_layers <= self.num_layers:
            raise InputError(
                f"model.num_norm_layers={self.num_norm_layers} does not fit "
                f"model.num_layers={self.num_layers}: give 0 to {self.num_layers}, or none for all."
            )
        if self.head_features is None and self.num_features % self.num_heads:
            raise InputError(
                f"model.num_heads={self.num_heads} does not divide "
                f"model.num_features={self.num_features}: choose a divisor."
            )

    def _check_later(self) -> None:
        """Check what came after the first tasks."""
        if self.architecture is not None:
            check_one_of("model.architecture", self.architecture, get_args(Architecture))
        check_one_of("model.pooling", self.pooling, get_args(Pooling))
        for name in ("head_features", "embedding_features", "character_features"):
            if getattr(self, name) is not None:
                check_at_least(f"model.{name}", getattr(self, name), 1)
        for name in ("memory_length", "evaluation_memory_length"):
            if getattr(self, name) is not None:
                check_at_least(f"model.{name}", getattr(self, name), 0)
        for name in ("embedding_dropout", "character_dropout", "output_dropout"):
            if getattr(self, name) is not None:
                check_fraction(f"model.{name}", getattr(self, name), below_one=True)
        if list(self.adaptive_cutoffs) != sorted({*self.adaptive_cutoffs}):
            raise InputError(
                f"model.adaptive_cutoffs={','.join(map(str, self.adaptive_cutoffs))} must rise, "
                "each id once."
            )
