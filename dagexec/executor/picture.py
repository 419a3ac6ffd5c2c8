"""An executor as HTML, for notebooks: the compiled net, and statistics."""

from __future__ import annotations

from dataclasses import asdict

from dagexec.core.drawing.names import operator_name
from dagexec.core.drawing.pictures import net_picture, summary, table
from dagexec.executor.dispatch.statistics import ExecutorStatistics
from dagexec.scheduler.nets.net import BaseNet


def executor_picture(model: str, workers: int, net: BaseNet, statistics: ExecutorStatistics) -> str:
    """Of a model of this name, on so many workers."""
    plan = net.plan
    operators = plan.graph.operators
    edges = [(parent, child) for parent, row in enumerate(plan.graph.reduced_children) for child in row]
    return summary(
        f"Executor of {model}: {net.net_type}, {workers} workers, {len(operators)} operators "
        f"in {len(plan.chains)} chains",
        net_picture(
            [operator.type for operator in operators], list(map(operator_name, operators)), edges, plan.chain_of
        ),
        table(("statistics", ""), list(asdict(statistics).items())),
    )
