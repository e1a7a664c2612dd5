"""The built-in tasks, one folder each, and the modules that combine them.

A folder has the settings, data, batches, model, scores and recipes of its task.
"""

from powernorm_lab.runs import STUDIES as STUDIES
from powernorm_lab.runs import TASKS as TASKS
