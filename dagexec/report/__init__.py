"""Reports: one HTML file that shows a net, a run or a comparison, without a server or a network (docs/reports.md).

`document.py` is the file; each section is a module here, which turns what it shows into plain data, and a script of the
same name in `page/`, which draws that data.
"""

from dagexec.report.document import Report, Section
from dagexec.report.gather import TracedRuntimes

__all__ = ["Report", "Section", "TracedRuntimes"]
