"""`dagexec.cluster.deploy`: from a model to replicas of it on a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dagexec.binding.parameters import initialized
from dagexec.cluster.autoscaling import Autoscaling
from dagexec.cluster.deployment import Deployment
from dagexec.cluster.dispatcher import Dispatcher
from dagexec.cluster.state import DeploymentState
from dagexec.core.model import Model
from dagexec.core.purity import all_only_compute
from dagexec.errors import DagexecError, ReplicaError, SettingError
from dagexec.executor.opening import plan_for
from dagexec.executor.source.loading import ModelSource, is_plan, load_model
from dagexec.executor.source.types import GivenTypes
from dagexec.options import CompileOptions
from dagexec.plans.plan import PlanFile
from dagexec.platform.extras import install_command
from dagexec.platform.lazy import LazyModule

if not TYPE_CHECKING:
    cloudpickle = LazyModule("ray.cloudpickle")
    ray = LazyModule("ray")
    ray_replica = LazyModule("dagexec.cluster.ray_replica")
    ray_session = LazyModule("dagexec.cluster.ray_session")
else:
    import ray
    from ray import cloudpickle

    from dagexec.cluster import ray_replica, ray_session

_DEFAULT_OPTIONS = CompileOptions()
_ROUND_TRIP_COVERED = 2
"""Requests that a replica has at most for each that it runs at once: another one is there when one ends."""


def deploy(
    model: ModelSource,
    options: CompileOptions = _DEFAULT_OPTIONS,
    *,
    replicas: int = 1,
    cores_per_replica: int = 1,
    max_outstanding: int | None = None,
    autoscaling: Autoscaling | None = None,
    address: str | None = None,
    start_seconds: float = 120.0,
    answer_seconds: float = 30.0,
) -> Deployment:
    """Run replicas of a model on a Ray cluster: processes that share its parameters, wherever there is room for them.

        with dagexec.cluster.deploy("model.onnx", replicas=4) as deployment:
            outputs = deployment.run({"data": array})

    Args:
        model: what `dagexec.compile` accepts. It is loaded here, and compiled by each replica for its processor; a
            plan is opened by those that find it in the same place.
        options: how it is compiled. `max_queued` with `when_full="reject"` limits the requests that wait here.
            `run_times` adds up what they wait here, and what replicas take for each, as a run of one row.
        replicas: how many processes serve it.
        cores_per_replica: cores that each may keep busy, and Ray sets aside for it.
        max_outstanding: requests that a replica has at most, the others wait here; by default two, and two for each
            row of a batch.
        autoscaling: bounds within which there are more or fewer, by the requests that are outstanding; `replicas`, or
            as many as the bounds allow, are there at first.
        address: that of the cluster, for `ray.init`. By default the one that this process is connected to, the one of
            RAY_ADDRESS, or a local one that is started and ends with its last deployment.
        start_seconds: until all replicas have to be ready.
        answer_seconds: a replica that has requests and gives no sign of itself for so long is lost. One that computes
            does, unless a function or a library keeps Python's lock for that long.

    Raises what `load_model` does, SettingError for an option out of range, ReplicaError when the cluster cannot be
    reached or a replica does not start, what a replica's `compile` raises, and DagexecError without Ray and for a
    function of a pipeline that cannot be sent to other processes.
    """
    _check_count("replicas", replicas)
    _check_count("cores_per_replica", cores_per_replica)
    if max_outstanding is None:
        max_outstanding = _ROUND_TRIP_COVERED * options.max_batch
    _check_count("max_outstanding", max_outstanding)
    if not answer_seconds > 0:
        raise SettingError(f"answer_seconds must be more than 0, not {answer_seconds!r:.80}")
    if options.pool is not None:
        raise SettingError("pool: replicas are processes of their own, and have workers of their own")
    plan = None
    if is_plan(model):
        plan, options = plan_for(Path(model), options)
    loaded = load_model(model, allow_io=options.allow_io, foreign=options.foreign)
    if loaded.has_init_net:
        loaded = initialized(loaded)
    parameters = {name: np.asarray(array) for name, array in loaded.parameters.items()}
    bare = loaded.changed(parameters={}, overridable=None)
    _require_ray()
    _check_functions(bare)
    size = sum(array.nbytes for array in parameters.values())
    most = replicas
    if autoscaling is not None:
        replicas = min(autoscaling.max_replicas, max(autoscaling.min_replicas, replicas))
        most = autoscaling.max_replicas
    ray_session.enter(address, most * cores_per_replica, ray_session.OBJECT_STORE_BYTES + size)
    try:
        deployment = _deployed(
            bare,
            GivenTypes.of(loaded),
            parameters,
            options,
            cores_per_replica,
            max_outstanding,
            autoscaling,
            answer_seconds,
            plan,
        )
    except BaseException:
        ray_session.leave()
        raise
    try:
        _start(deployment, replicas, start_seconds)
    except BaseException:
        with suppress(Exception):
            deployment.drain(0)
        raise
    return deployment


def _deployed(
    model: Model,
    types: GivenTypes,
    parameters: Mapping[str, Any],
    options: CompileOptions,
    cores: int,
    max_outstanding: int,
    autoscaling: Autoscaling | None,
    answer_seconds: float,
    plan: PlanFile | None,
) -> Deployment:
    """A deployment without replicas."""
    sent = replace(options, progress=None, max_queued=None, run_times=None)
    try:
        references: list[ray.ObjectRef[Any]] = [
            ray.put(ray_replica.Parcel(model, sent, cores, plan)),
            ray.put(parameters),
        ]
    except Exception as error:
        raise DagexecError(f"net {model.name!r} cannot be sent to replicas: {error}") from error
    state = DeploymentState(
        model.name,
        max_outstanding=max_outstanding,
        max_queued=options.max_queued if options.when_full == "reject" else None,
        retries=all_only_compute(model.program.op),
        autoscaling=autoscaling,
        answer_seconds=answer_seconds,
        run_times=options.run_times,
    )
    new_link = partial(ray_replica.RayReplica, cores=cores, references=references)
    return Deployment(model, types, Dispatcher(model.name, state, new_link), partial(_release, references))


def _release(references: list[ray.ObjectRef[Any]]) -> None:
    """Let go of what is in the store, and of the cluster."""
    references.clear()
    ray_session.leave()


def _start(deployment: Deployment, replicas: int, seconds: float) -> None:
    """Start the replicas, and wait until all are ready."""
    dispatcher, name = deployment._dispatcher, deployment.model.name
    dispatcher.add_members(replicas)
    in_time = dispatcher.wait_until_started(seconds)
    failure, up = dispatcher.read(lambda state, _: (state.failure, state.up))
    if failure is not None:
        raise failure
    if not in_time:
        raise ReplicaError(
            f"net {name!r}: {replicas - up} of {replicas} replicas were not ready within {seconds:g} seconds; "
            f"{ray_session.described()}"
        )


def _check_count(what: str, count: object) -> None:
    if not isinstance(count, Integral) or isinstance(count, bool) or count < 1:
        raise SettingError(f"{what} must be 1 or more, not {count!r:.80}")


def _require_ray() -> None:
    try:
        ray.__version__  # noqa: B018 - imports it
    except ImportError as error:
        raise DagexecError(f"deployments need Ray: {install_command('ray')}") from error


def _check_functions(model: Model) -> None:
    """Raise DagexecError for a Python step that cannot be sent to another process."""
    pickling: Any = cloudpickle  # which has no types
    for step in model.python_steps:
        try:
            pickling.dumps(step)
        except Exception as error:
            users = [one.name for one in model.program.op if step.token.encode() in one.values.values()]
            raise DagexecError(
                f"net {model.name!r}: the function of {', '.join(users)} cannot be sent to another process: {error}"
            ) from error
