"""Data and batches: corpora, readers, subwords, orders, count baselines and data sets.

The package itself imports neither torch nor tokenizers; only those modules do that need them.
"""
