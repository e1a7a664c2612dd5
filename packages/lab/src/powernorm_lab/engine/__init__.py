"""Runs and comparisons of any training: grid, folders, leases, checkpoints, results; no task."""
