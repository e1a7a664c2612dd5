"""Triton programs that run on the device, started by the functions one level up."""
