"""The built-in tasks, a folder each, and what puts them together.

A folder has the task's settings, how its data become batches, its model, its score and its recipes.
"""

from powernorm_lab.runs import STUDIES as STUDIES
from powernorm_lab.runs import TASKS as TASKS
