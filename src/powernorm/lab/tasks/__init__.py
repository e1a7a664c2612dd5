"""The built-in tasks, a folder each, and what puts them together.

A folder has the task's settings, how its data become batches, its model, its score and its recipes.
"""

from typing import Final

TASKS: Final = ("lm", "mlm", "tag", "translation", "classify", "ner", "parse", "image", "lm-char")
"""Names of the tasks, in the order in which they are listed; the help needs no more of them."""

STUDIES: Final = (
    "micro-batches",
    "lowest-layers",
    "penalties",
    "alphas",
    "scales",
    "layernorm-parts",
    "future",
)
"""Names of the studies of variants of a norm."""
