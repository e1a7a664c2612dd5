"""Removal of norms from a trained model: data, training, checkpoints and report of `remove`."""
