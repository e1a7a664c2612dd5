"""Folding norms into the weights around them.

A fold goes through these files in this order; `inspection/affine.py` reads what the norms compute.

| file | what it does |
|---|---|
| `api.py` | `plan_fold` and `fold`: checks, the plan, `apply` and `undo` |
| `trace.py` | runs the model under `torch.export`, with each norm as one operator |
| `axes.py` | follows the features' axis through operators that do not change them |
| `operations.py` | finds the operators with weights, and which rows of which parameter they read |
| `relations.py` | derives what each operator implies for scale and shift of the features |
| `solver.py` | decides which norms fold, and takes one out at each conflict |
| `solution.py` | solves for scale and shift of every value |
| `centering.py` | moves LayerNorm's centering into the weights that write to its stream |
| `rewrite.py` | computes the new weights and biases |
| `structure.py` | puts the remaining modules in the places of the norms |
| `verify.py` | compares the folded model with the original |
"""
