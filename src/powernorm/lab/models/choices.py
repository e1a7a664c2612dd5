"""The exclusive choices of an architecture, by name."""

from typing import Literal

Placement = Literal["pre", "post"]
"""Where a sub-layer's norm stands: `pre`, before the sub-layer on its branch (and once more after
the last layer), or `post`, after the residual sum."""

Activation = Literal["gelu", "relu", "cube"]
"""The non-linearity between linear maps; `cube`, x³, is that of Chen and Manning (2014)."""

Architecture = Literal["plain", "tensorized", "convnet", "resnet20", "resnet18"]
"""Which model a task trains: a language model with the usual attention or that of Ma et al. (2019);
a classifier of images, convolutional or residual."""

Pooling = Literal["mean", "max", "cls"]
"""How one vector is made of a text's positions: their mean, their maximum, or that of a mark in
front."""

SharedEmbeddings = Literal["all", "target", "none"]
"""Which tables of a translation model are one: those of source, target and output; those of target
and output; none."""

Initialization = Literal["xavier", "kaiming"]
"""How linear maps begin: uniform after Glorot and Bengio (2010), or after He et al. (2015) as
torch's own linear layers do."""

LengthNormalization = Literal["power", "wu2016"]
"""What the log-probability of a hypothesis of n tokens is divided by: n^α, or ((5 + n) / 6)^α
(Wu et al. 2016, eq. 14)."""
