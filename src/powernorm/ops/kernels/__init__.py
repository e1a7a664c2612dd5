"""Kernels: the functions of `powernorm.ops.eager`, fast on one kind of device each."""
