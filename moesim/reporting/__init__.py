"""A result folder as one self-contained HTML page."""

from moesim.reporting.folder import ResultFolder, read_folder
from moesim.reporting.page import report_page

__all__ = ["ResultFolder", "read_folder", "report_page"]
