"""Speed and memory of the norms: correctness first, then providers in turn; rows, targets."""

from powernorm.lab.bench.cases import GRIDS, Case, Direction
from powernorm.lab.bench.measuring import measure
from powernorm.lab.bench.rows import Row, read_rows, write_rows

__all__ = ["GRIDS", "Case", "Direction", "Row", "measure", "read_rows", "write_rows"]
