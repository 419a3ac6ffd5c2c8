"""The backward pass: appends to a net the operators that compute the gradients of its losses.

The walk goes over the operators in reverse and asks the maker of each (`dagexec.core.gradient`) for its gradient
operators. It works on versions of blobs (`versions`), as operators may overwrite their inputs; what the gradients are
called is decided in `gradient_values`. Described in `docs/gradients.md`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from dagexec.core.gradient import (
    Gradient,
    GradientOperators,
    GradientRequest,
    SparseGradient,
    fill_like,
    gradient,
    has_gradient,
)
from dagexec.core.node import arguments_of, operator_label
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.errors import GradientError
from dagexec.platform.records import dataclass
from dagexec.training.accumulation import GradientSlices, Part, accumulate, tensors_of
from dagexec.training.control_gradients import block_gradient, is_block, passes_no_gradient
from dagexec.training.gradient_values import Emitter, Value, need, release
from dagexec.training.versions import BlobVersions, Version, find_versions

__all__ = ["add_gradient_operators"]


def add_gradient_operators(
    net: NetDef, losses: Mapping[str, str | None] | Sequence[str], *, wanted: Collection[str] | None = None
) -> dict[str, Gradient]:
    """Append the gradient operators of `losses` to `net`; returns the gradient of each blob that has one.

    The gradient of a loss is the blob that `losses` maps it to; for None, and in a list, it is ones. What is
    differentiated is the sum of all losses, each weighted so. With `wanted`, only the gradients of these blobs are
    returned, and only what they need is computed; otherwise that of every blob. Of a blob that is there before the net
    runs, it is the gradient of the value it has then; of another one, of the first of its values that has a gradient.

    Raises GradientError when a loss is not computed by the net or no gradient leads from it, when an operator on the
    way has no gradient, and when a gradient needs a value that an operator overwrites. The net is unchanged then.
    """
    if isinstance(losses, str):
        raise GradientError(f"net {net.name!r}: expected a list of losses, found the string {losses!r}")
    seeds = dict(losses) if isinstance(losses, Mapping) else dict.fromkeys(losses)
    if not seeds:
        raise GradientError(f"net {net.name!r}: no loss was given")
    if wanted is not None:
        unknown = sorted({*wanted} - _blobs_of(net))
        if unknown:
            raise GradientError(
                f"net {net.name!r}: gradients of {unknown} were requested, but they are not blobs of the net"
            )
    backward = _BackwardPass(net, wanted, [blob for blob in seeds.values() if blob is not None])
    for loss in seeds:
        backward.check_loss(loss)
    gradients = backward.run(seeds)
    if not backward.reached:
        raise GradientError(f"net {net.name!r}: no gradient leads from {sorted(seeds)} to any other blob")
    written = {blob for definition in net.op for blob in definition.output}
    for blob in seeds.values():
        if blob is not None and blob not in written and blob not in net.external_input:
            net.external_input.append(blob)
    net.op.extend(backward.emitter.operators)
    return gradients


def gradient_of_operator(
    definition: OperatorDef,
    output_gradients: Sequence[Gradient | None],
    *,
    wanted: Collection[int] | None = None,
    label: str = "",
) -> GradientOperators:
    """`dagexec.core.gradient.gradient`, also for operators with subnets that work on the blobs around them."""
    if not is_block(definition):
        return gradient(definition, output_gradients, wanted=wanted, label=label)
    label = label or operator_label(definition, -1)
    indices = frozenset(range(len(definition.input)) if wanted is None else wanted)
    request = GradientRequest(definition, tuple(output_gradients), indices, label, arguments_of(definition, label))
    return block_gradient(request, _add_where_they_lead)


def _add_where_they_lead(net: NetDef, losses: Mapping[str, str], wanted: Collection[str]) -> dict[str, Gradient]:
    """`add_gradient_operators` of those losses that are computed from what is wanted, as it is before the net runs."""
    versions = find_versions(net)
    backward = _BackwardPass(net, [blob for blob in wanted if versions.starts_outside(blob)], losses.values())
    gradients = backward.run({loss: seed for loss, seed in losses.items() if backward.leads(loss)})
    net.op.extend(backward.emitter.operators)
    return gradients


def _blobs_of(net: NetDef) -> set[str]:
    blobs = {*net.external_input, *net.external_output}
    for definition in net.op:
        blobs.update(definition.input, definition.output, definition.control_input)
    return blobs


@dataclass(frozen=True)
class _Step:
    """A gradient operator whose blobs are values instead of names."""

    definition: OperatorDef
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


class _BackwardPass:
    """One walk over one net. `emitter.operators` is its result."""

    def __init__(self, net: NetDef, wanted: Collection[str] | None, given: Iterable[str]) -> None:
        self._net = net
        self._versions = find_versions(net)
        self._wanted = None if wanted is None else frozenset(wanted)
        self._dependent = None if self._wanted is None else _dependents(net, self._versions, self._wanted)
        self._parts: dict[Version, list[Part]] = {}
        self._results: dict[str, tuple[Version, Part]] = {}
        self.reached = False
        self.emitter = Emitter(_blobs_of(net).union(given))

    def run(self, losses: Mapping[str, str | None]) -> dict[str, Gradient]:
        """Walk from the losses to the beginning; the gradients by blob."""
        for loss, seed in losses.items():
            self._seed(self._versions.final(loss), seed)
        for index in reversed(range(len(self._net.op))):
            self._differentiate(index)
            for version in dict.fromkeys(self._versions.inputs[index]):
                if self._versions.first_readers[version] == index and version in self._parts:
                    self._complete(version)
        return {blob: _named(self._results[blob][1]) for blob in self._versions.last if blob in self._results}

    def leads(self, loss: str) -> bool:
        """True for a blob that the net computes from what is wanted."""
        version = self._versions.final(loss)
        writer = self._versions.writers.get(version)
        through = writer is not None and not passes_no_gradient(self._net.op[writer])
        return through and (self._dependent is None or version in self._dependent)

    def check_loss(self, loss: str) -> None:
        """Raise GradientError unless `loss` is computed from what is wanted."""
        version = self._versions.final(loss)
        writer = self._versions.writers.get(version)
        if writer is None:
            raise GradientError(f"net {self._net.name!r}: loss {loss!r} is not the output of any operator")
        if passes_no_gradient(self._net.op[writer]):
            raise GradientError(
                f"{self._label(writer)}: loss {loss!r} has no gradient: no gradient passes through this type"
            )
        if self._dependent is not None and version not in self._dependent:
            raise GradientError(
                f"net {self._net.name!r}: loss {loss!r}, the output of {self._label(writer)}, "
                f"depends on none of the blobs whose gradients were requested: {sorted(self._wanted or ())}"
            )

    def _seed(self, version: Version, seed: str | None) -> None:
        """Give a loss its initial gradient."""
        if seed is None:
            fill = fill_like(version.blob, f"{version.blob}_autogen_grad", 1.0)
            writer = self._net.op[self._versions.writers[version]]
            if writer.HasField("device_option"):
                fill.device_option.CopyFrom(writer.device_option)
                fill.device_option.ClearField("random_seed")
            value = Value(fill.output[0], fill.device_option if fill.HasField("device_option") else None)
            source = Value(version.blob)
            need([source, value])
            self.emitter.emit(fill, [source], [value])
        else:
            value = Value(seed)
            need([value, value])  # it is the caller's, so it is never released
        self._parts[version] = [value]
        if version not in self._versions.first_readers:
            self._settle(version)

    def _differentiate(self, index: int) -> None:
        """Emit the gradient operators of operator `index`, when a gradient of an output is there."""
        definition = self._net.op[index]
        outputs = self._versions.outputs[index]
        parts = [self._parts[version][0] if version in self._parts else None for version in outputs]
        if not has_gradient(definition, parts):
            return
        inputs = self._versions.inputs[index]
        positions = frozenset(position for position, version in enumerate(inputs) if self._asks(version))
        if positions:
            disguise = _UniqueNames(definition)
            maker_result = gradient_of_operator(
                disguise.definition,
                [None if part is None else disguise.gradient(part) for part in parts],
                wanted=positions,
                label=self._label(index),
            )
            steps, results = self._resolve(index, maker_result, disguise, positions)
            for position, part in results.items():
                version = inputs[position]
                self._parts.setdefault(version, []).append(part)
                need(tensors_of(part))
                self._give_up_later_result(version)
                self.reached = True
            for step in steps:
                need(step.inputs)
            self._release_outputs(outputs)
            for step in steps:
                self.emitter.emit(step.definition, step.inputs, step.outputs)
        else:
            self._release_outputs(outputs)

    def _release_outputs(self, outputs: Sequence[Version]) -> None:
        for version in outputs:
            for part in self._parts.pop(version, ()):
                release(tensors_of(part))

    def _resolve(
        self, index: int, maker_result: GradientOperators, disguise: _UniqueNames, asked: frozenset[int]
    ) -> tuple[list[_Step], dict[int, Part]]:
        """The operators and input gradients of a maker, with values for names and without unused ones."""
        current: dict[str, Value] = dict(disguise.values)
        steps = []
        for definition in maker_result.operators:
            inputs = tuple(self._operand(index, definition, name, current, disguise) for name in definition.input)
            device = definition.device_option if definition.HasField("device_option") else None
            outputs = tuple(Value(disguise.real_name(name), device) for name in definition.output)
            current.update(zip(definition.output, outputs, strict=True))
            steps.append(_Step(definition, inputs, outputs))

        def value_of(name: str) -> Value:
            return self._operand(index, None, name, current, disguise)

        results: dict[int, Part] = {}
        for position, found in enumerate(maker_result.inputs):
            if found is None or position not in asked:
                continue
            if isinstance(found, SparseGradient):
                results[position] = GradientSlices(value_of(found.indices), value_of(found.values))
            else:
                results[position] = value_of(found)
        used = {value for part in results.values() for value in tensors_of(part)}
        kept: list[_Step] = []
        for step in reversed(steps):
            if used.intersection(step.outputs):
                kept.append(step)
                used.update(step.inputs)
        return kept[::-1], results

    def _operand(
        self, index: int, reader: OperatorDef | None, name: str, current: Mapping[str, Value], disguise: _UniqueNames
    ) -> Value:
        """What `name` stands for in a gradient operator of operator `index`; a forward blob must still be there."""
        if name in current:
            return current[name]
        blob = disguise.real_name(name)
        version = self._seen(index, name, disguise)
        if version is not None and not self._versions.is_final(version):
            overwriter = self._versions.overwriter(version)
            needs = f"its gradient operator {reader.type}" if reader is not None else "its gradient"
            who = "which it overwrites itself" if overwriter == index else f"which {self._label(overwriter)} overwrites"
            raise GradientError(
                f"{self._label(index)}: {needs} needs the value of blob {blob!r} that it saw, {who}; "
                f"write to another blob there"
            )
        return Value(blob)

    def _seen(self, index: int, name: str, disguise: _UniqueNames) -> Version | None:
        """The version of a forward blob that operator `index` read or wrote; None for a blob that it does not name."""
        for blobs, versions in (
            (disguise.definition.output, self._versions.outputs[index]),
            (disguise.definition.input, self._versions.inputs[index]),
        ):
            for blob, version in zip(blobs, versions, strict=True):
                if blob == name:
                    return version
        return None

    def _complete(self, version: Version) -> None:
        """Sum the gradients of a version, now that every reader has given its own.

        An operator that computed the version takes a dense gradient; only one that goes no further stays sparse.
        """
        label = f"net {self._net.name!r}: blob {version.blob!r}"
        readable = self._versions.is_final(version)
        self._parts[version] = [
            accumulate(
                self.emitter,
                version.blob,
                self._parts[version],
                label=label,
                readable=readable,
                to_dense=self._goes_on(version),
            )
        ]
        self._settle(version)

    def _goes_on(self, version: Version) -> bool:
        """True when the gradient of a version is passed on by the operator that computed it."""
        writer = self._versions.writers.get(version)
        if writer is None or passes_no_gradient(self._net.op[writer]):
            return False
        return any(self._asks(read) for read in self._versions.inputs[writer])

    def _settle(self, version: Version) -> None:
        """Keep the gradient of a version for the caller, if it is the one that counts for its blob."""
        blob = version.blob
        if self._wanted is not None and blob not in self._wanted:
            return
        if version.number and self._versions.starts_outside(blob):
            return
        if blob in self._results:
            release(tensors_of(self._results.pop(blob)[1]))
        part = self._parts[version][0]
        need(tensors_of(part))
        self._results[blob] = (version, part)

    def _give_up_later_result(self, version: Version) -> None:
        """An earlier version of a blob has a gradient, so that of a later one need not last."""
        result = self._results.get(version.blob)
        if result is not None and result[0].number > version.number:
            release(tensors_of(self._results.pop(version.blob)[1]))

    def _asks(self, version: Version) -> bool:
        return self._dependent is None or version in self._dependent

    def _label(self, index: int) -> str:
        return operator_label(self._net.op[index], index, self._net.name)


class _UniqueNames:
    """A def for a maker in which different values have different names, and the meaning of these.

    An operator in place gives its output the name of its input, and the gradients of both have one name as well; so the
    old value of a blob, and the gradients of the outputs, get names that no blob has: `x<before>` and `x_grad<0>`.
    """

    def __init__(self, forward: OperatorDef) -> None:
        self.definition = OperatorDef()
        self.definition.CopyFrom(forward)
        self.values: dict[str, Value] = {}
        self._real: dict[str, str] = {}
        for position, blob in enumerate(forward.input):
            if blob in forward.output:
                self.definition.input[position] = self._cover(blob, "before")
            if position and blob in forward.input[:position]:
                self._real[f"_{self.definition.input[position]}_grad_input_{position}"] = f"{blob}_grad"

    def gradient(self, part: Part) -> Gradient:
        """The gradient of an output, under other names."""
        if isinstance(part, GradientSlices):
            return SparseGradient(self._value(part.indices), self._value(part.values))
        return self._value(part)

    def real_name(self, name: str) -> str:
        """The name without disguise."""
        if name in self._real:
            return self._real[name]
        for covered, real in self._real.items():
            name = name.replace(covered, real)
        return name

    def _value(self, value: Value) -> str:
        name = self._cover(value.name, str(len(self.values)))
        self.values[name] = value
        return name

    def _cover(self, name: str, mark: str) -> str:
        covered = f"{name}<{mark}>"
        self._real[covered] = name
        return covered


def _dependents(net: NetDef, versions: BlobVersions, wanted: Collection[str]) -> frozenset[Version]:
    """The versions that gradients of `wanted` pass through: those of the blobs, and all computed from them."""
    reached = {Version(blob, 0) for blob in wanted}
    for index, definition in enumerate(net.op):
        reached.update(v for v in versions.outputs[index] if v.blob in wanted and not versions.starts_outside(v.blob))
        if not passes_no_gradient(definition) and reached.intersection(versions.inputs[index]):
            reached.update(versions.outputs[index])
    return frozenset(reached)


def _named(part: Part) -> Gradient:
    return SparseGradient(part.indices.name, part.values.name) if isinstance(part, GradientSlices) else part.name
