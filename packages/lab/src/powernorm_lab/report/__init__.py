"""Tables, figures and self-contained pages from run folders; reads files only."""

from powernorm_lab.report.drawing import saved_figures
from powernorm_lab.report.loading import read_comparison, read_diagnosis, read_selection
from powernorm_lab.report.page import (
    evaluation_words,
    render_diagnosis,
    render_page,
    write_diagnosis_page,
    write_overlay_page,
    write_report,
    write_tables,
)
from powernorm_lab.report.records import Comparison, ReportedRun
from powernorm_lab.report.statistics import SummaryRow, seed_records, summarize
from powernorm_lab.report.tables import print_table
from powernorm_lab.report.terminal import (
    print_comparison,
    print_evaluation,
    print_scores,
)

__all__ = [
    "Comparison",
    "ReportedRun",
    "SummaryRow",
    "evaluation_words",
    "print_comparison",
    "print_evaluation",
    "print_scores",
    "print_table",
    "read_comparison",
    "read_diagnosis",
    "read_selection",
    "render_diagnosis",
    "render_page",
    "saved_figures",
    "seed_records",
    "summarize",
    "write_diagnosis_page",
    "write_overlay_page",
    "write_report",
    "write_tables",
]
