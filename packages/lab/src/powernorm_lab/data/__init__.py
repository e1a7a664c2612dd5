"""Data and how they become batches: corpora, readers, subwords, orders, count baselines, data sets.

This package imports nothing heavy by itself: the modules that need torch or tokenizers import
them when they are imported.
"""
