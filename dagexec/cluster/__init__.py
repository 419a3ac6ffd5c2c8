"""Many replicas of a model beyond one process: how requests are routed to them, and what many machines would give."""

from dagexec.cluster.autoscaling import Autoscaling
from dagexec.cluster.deploy import deploy
from dagexec.cluster.deployment import Deployment
from dagexec.cluster.statistics import DeploymentStatistics, ReplicaStatistics

__all__ = ["Autoscaling", "Deployment", "DeploymentStatistics", "ReplicaStatistics", "deploy"]
