"""What options mean for a model that is about to be embedded: where it runs, on whose workers, with which arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dagexec.core.device import CPU
from dagexec.core.host_placement import model_on_host
from dagexec.core.model import Model
from dagexec.core.operator_arguments import with_arguments
from dagexec.core.purity import all_only_compute
from dagexec.errors import SettingError
from dagexec.options import CompileOptions
from dagexec.platform.lazy import LazyModule
from dagexec.platform.processor import available_cores
from dagexec.platform.threads import threads
from dagexec.scheduler.plan.copies import names_devices
from dagexec.scheduler.workers.place import Place, own_place, shared_workers

if not TYPE_CHECKING:
    pools = LazyModule("dagexec.scheduler.workers.pool")
else:
    from dagexec.scheduler.workers import pool as pools


def as_asked(model: Model, options: CompileOptions) -> Model:
    """The model on the device that `options` name, with their arguments for all operators."""
    if options.device is not None and options.default_device == CPU:
        model = model_on_host(model)
    if options.operator_arguments:
        model = replace(model, net=with_arguments(model.net, options.operator_arguments))
    return model


def kept_options(model: Model, options: CompileOptions) -> CompileOptions:
    """The options that the executor of a compiled model keeps: without objects of its caller."""
    own = options.kept()
    if own.pool is None and not _may_share_workers(model, own):
        own = own.with_chosen(pool="own")
    return own


def with_workers(options: CompileOptions) -> CompileOptions:
    """The options for a model on a `Pool`: its workers, and no more threads than cores when all of them are busy.

    A model with `num_workers` gets that many workers of its own. Raises SettingError for a wrong pool or number of
    workers.
    """
    pool = options.pool
    if pool is None or pool == "own":
        return options if options.num_workers is None else replace(options, pool="own")
    if not isinstance(pool, pools.Pool):
        raise SettingError(f'pool must be a dagexec.Pool, "own" or None, not {pool!r:.80}')
    if options.num_workers not in (None, pool.workers):
        raise SettingError(f"num_workers={options.num_workers}: pool {pool.name!r} has {pool.workers}; leave it out")
    share = max(1, available_cores() // pool.workers)
    return replace(options, num_workers=pool.workers, intra_op_threads=options.intra_op_threads or share)


def _may_share_workers(model: Model, options: CompileOptions) -> bool:
    """True for a model that only computes, on the host.

    An operator of the application, or one that communicates, may hold its worker until another model has run.
    """
    on_host = options.default_device == CPU and not names_devices(model.program)
    return on_host and threads().concurrent and all_only_compute(model.program.op)


def new_place(model: Model, options: CompileOptions) -> Place:
    """Workers, as the options ask for them. Raises ClosedError, ResourceError, SettingError."""
    assert options.num_workers is not None
    if options.pool is None:
        return shared_workers.enter(model.name, options.num_workers)
    if options.pool == "own":
        return own_place(model.name, options.num_workers, f"dagexec-{model.program.name or 'net'}")
    return options.pool.enter(model.name)
