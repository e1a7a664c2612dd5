"""Corpora for the laboratory of powernorm, as compressed files without code.

powernorm finds the files and verifies their checksums.
"""

__all__ = ["__version__"]

__version__ = "1.0.0"
