"""Texts with a class each: readers of the official formats, words as numbers, batches."""
