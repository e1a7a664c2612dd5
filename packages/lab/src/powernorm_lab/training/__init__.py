"""Training of a task's model with a norm and a seed: batches, loss, loop, checkpoints, scores."""
