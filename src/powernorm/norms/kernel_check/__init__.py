"""A check of all kernels against float64 formulas: `powernorm doctor --kernels`.

`cases` selects calls, `inputs` draws their numbers, `formulas` computes them in float64,
`rounding` says how far rounding may take a result from that, `checking` compares one call on one
backend, `running` does so for all.
"""

from powernorm.norms.kernel_check.checking import ALLOWED, Outcome
from powernorm.norms.kernel_check.running import KernelReport, check_kernels, start_report

__all__ = ["ALLOWED", "KernelReport", "Outcome", "check_kernels", "start_report"]
