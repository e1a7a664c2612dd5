"""Kernels: the functions of `powernorm.ops.eager`, each fast on one kind of device."""
