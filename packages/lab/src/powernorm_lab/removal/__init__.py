"""Taking norms out of a trained model: data, training, checkpoints and report of `remove`."""
