"""Executors, which start the workers of a comparison; see `engine.coordination.Executor`."""
