"""Training of the built-in tasks on a `Run`: batches, losses, loop and scores."""
