"""The laboratory behind `powernorm compare`: the same training with each norm, and what showed."""
