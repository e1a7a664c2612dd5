"""Corpora that the laboratory of powernorm reads: compressed files and nothing that runs.

powernorm finds them by itself and compares each with a checksum of its own.
"""

__all__ = ["__version__"]

__version__ = "1.0.0"
