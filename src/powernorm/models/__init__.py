"""The architectures that the experiments train; every norm in them comes from a factory.

This package imports no torch by itself, so that a configuration can name its choices cheaply:
import `powernorm.models.language_model` or `powernorm.models.translation` for the models.
"""
