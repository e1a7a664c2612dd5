"""Tables, figures and self-contained pages from run folders; reads files only."""

from powernorm_lab.report.diagnosis_page import render_diagnosis, write_diagnosis_page
from powernorm_lab.report.drawing import saved_figures
from powernorm_lab.report.loading import read_comparison, read_diagnosis
from powernorm_lab.report.page import (
    read_selection,
    render_page,
    write_report,
    write_reports,
    write_tables,
)
from powernorm_lab.report.records import Comparison, ReportedRun
from powernorm_lab.report.seed_statistics import seed_records
from powernorm_lab.report.summary import SummaryRow, summarize
from powernorm_lab.report.terminal import (
    print_comparison,
    print_evaluation,
    print_scores,
    print_table,
)

__all__ = [
    "Comparison",
    "ReportedRun",
    "SummaryRow",
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
    "write_report",
    "write_reports",
    "write_tables",
]
