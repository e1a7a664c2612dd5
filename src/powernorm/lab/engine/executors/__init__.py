"""What starts the workers of a comparison; see `powernorm.lab.engine.coordination.Executor`."""
