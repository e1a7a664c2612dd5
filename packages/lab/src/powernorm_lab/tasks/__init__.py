"""The built-in tasks, one folder each, and the modules that combine them.

A folder has the settings, data, model, scores and recipes of its task.
"""
