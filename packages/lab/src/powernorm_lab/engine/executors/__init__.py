"""What starts the workers of a comparison; see `powernorm_lab.engine.coordination.Executor`."""
