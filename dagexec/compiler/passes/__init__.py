"""The graph compiler's passes: edits of one graph, after which it has the same results and less to do.

A pass knows one transformation and lives in a module of its own; `rewriting` has the type and runs them, `catalog`
lists them in their order, `draft` is the graph that they edit, `types` what is known of shapes before a run. The
optimized net is an ordinary one, so inference, hazards, scheduling and tracing work on it unchanged.
"""

from dagexec.compiler.passes.draft import Draft, Rewritten
from dagexec.compiler.passes.rewriting import Pass, PassOutcome, PassReport, check_pass_names, run_passes

__all__ = ["Draft", "Pass", "PassOutcome", "PassReport", "Rewritten", "check_pass_names", "run_passes"]
