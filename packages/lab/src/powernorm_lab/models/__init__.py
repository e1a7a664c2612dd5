"""The architectures that several tasks share; every norm in them comes from a factory.

This package imports no torch by itself, so that a configuration can name its choices cheaply:
import `powernorm_lab.models.language_model` for a model.
"""
