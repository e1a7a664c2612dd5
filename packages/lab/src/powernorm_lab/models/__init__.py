"""Architectures that several tasks share; a factory builds every norm in them.

The package itself does not import torch, so that configurations can import its choices cheaply:
import `powernorm_lab.tasks.lm.model` for a model.
"""
