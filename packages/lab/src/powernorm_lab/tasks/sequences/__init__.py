"""Classify series of variable length: settings, files, batches, models, recipes."""
