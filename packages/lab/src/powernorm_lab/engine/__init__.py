"""Runs and comparisons of any task: grid, folders, leases, checkpoints and results."""
