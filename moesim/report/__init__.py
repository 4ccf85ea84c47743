"""A result folder as one self-contained HTML page."""

from moesim.report.folder import ResultFolder, read_folder
from moesim.report.page import report_page

__all__ = ["ResultFolder", "read_folder", "report_page"]
