"""The exclusive choices of an architecture, by name."""

from typing import Literal

Placement = Literal["pre", "post"]
"""Where a sub-layer's norm stands: `pre`, before the sub-layer on its branch (and once more after
the last layer), or `post`, after the residual sum."""

Activation = Literal["gelu", "relu"]
"""The non-linearity of the feed-forward sub-layer."""
