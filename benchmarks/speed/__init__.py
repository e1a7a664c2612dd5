"""Measurements of `benchmarks/bench.py`: norms, a training step, encoders; correctness first."""
