"""Training of models with one norm after another, and the comparison of what came out.

This package imports neither torch nor Lightning by itself: `powernorm.training.config` and
`powernorm.training.overrides` answer at once; `powernorm.training.comparison` does the work.
"""
