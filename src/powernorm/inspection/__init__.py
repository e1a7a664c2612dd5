"""Norms of a model: which modules they are, what each computes, and its position.

Surgery and diagnosis share one finder, so that their tables name the same norms.
"""

from powernorm.inspection.finder import FoundNorm, find_norms
from powernorm.inspection.mask_arguments import declare_mask
from powernorm.inspection.reading import Reading, declare_norm
from powernorm.inspection.selection import Where

__all__ = ["FoundNorm", "Reading", "Where", "declare_mask", "declare_norm", "find_norms"]
