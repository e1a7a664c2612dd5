"""Kernels: the ops of `powernorm.ops.reference`, fast on one kind of device each."""
