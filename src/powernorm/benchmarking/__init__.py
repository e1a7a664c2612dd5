"""Speed and memory of the norms: correctness first, then providers in turn; rows, targets."""

from powernorm.benchmarking.cases import GRIDS, Case, Direction
from powernorm.benchmarking.measuring import measure
from powernorm.benchmarking.rows import Row, read_rows, write_rows

__all__ = ["GRIDS", "Case", "Direction", "Row", "measure", "read_rows", "write_rows"]
