"""Training of models with one norm after another, and the comparison of what came out.

This package imports neither torch nor Lightning by itself: `powernorm.lab.settings.comparison` and
`powernorm.lab.settings.overrides` answer at once; `powernorm.lab.tasks.comparison` does the work.
"""
