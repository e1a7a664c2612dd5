"""What norms cost at inference, in each engine and precision: every rival at its best setting."""
