"""Bodies of inference requests and responses over HTTP: a JSON object, and the bytes of tensors behind it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from dagexec.core.feeds import Array
from dagexec.core.spelling import did_you_mean
from dagexec.platform.records import dataclass
from dagexec.server.inference import GeneratedToken, InferenceRequest, InferenceResponse, TensorMetadata
from dagexec.server.limits import Limits
from dagexec.server.shared_memory import NO_REGIONS, Part, Regions, from_shared_memory
from dagexec.server.tensors import (
    ProtocolError,
    checked_shape,
    datatype_of_output,
    from_binary,
    from_json,
    from_nested,
    to_binary,
    to_json,
    whole_parameter,
)

HEADER_LENGTH = "Inference-Header-Content-Length"
"""The header of HTTP that has the length of the JSON object, where bytes are behind it."""

CheckInputs = Callable[[str, str | None, Iterable[str]], object]
"""Is told a model, a version and names of inputs, and raises RequestError for names that the model does not have."""

_INPUT_KEYS = frozenset(("name", "shape", "datatype", "parameters", "data"))


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request, and which of its results the client wants as bytes: those in `binary`, others by `binary_default`.

    Those in `shared` are left in shared memory.
    """

    request: InferenceRequest
    binary: Mapping[str, bool]
    binary_default: bool
    shared: Mapping[str, Part]


def parse_request(
    model: str,
    version: str | None,
    body: memoryview,
    header_length: int | None,
    limits: Limits,
    check_inputs: CheckInputs = lambda model, version, names: None,
    regions: Regions = NO_REGIONS,
    read: Callable[[Part], memoryview] = Part.read,
) -> ParsedRequest:
    """The request in a body of which the first `header_length` bytes are JSON, all with None.

    Its inputs are in the memory of the body, or in one of the `regions` of shared memory, from which `read` copies.
    Where one is wrong, `check_inputs` is told their names. Raises ProtocolError, and what `check_inputs` and `read`
    raise.
    """
    if header_length is None:
        header_length = body.nbytes
    if header_length > body.nbytes:
        raise ProtocolError(f"{HEADER_LENGTH}: {header_length}, and the body has {body.nbytes} bytes")
    message = parse_json(body[:header_length])
    parameters = _parameters(message)
    listed = _named_inputs(message.get("inputs"), limits)
    try:
        inputs = _inputs(listed, body[header_length:], limits, regions, read)
    except ProtocolError:
        check_inputs(model, version, listed)
        raise
    binary: dict[str, bool] = {}
    shared: dict[str, Part] = {}
    outputs = message.get("outputs", [])
    _check_list("outputs", outputs, limits)
    for output in outputs:
        name = _name("output", output, binary)
        asked = _parameters(output)
        part = regions.part(f"output {name!r:.80}", asked)
        if part is not None:
            shared[name] = part
        if asked.get("classification"):
            raise ProtocolError(f"output {name!r:.80}: classification is not supported")
        binary[name] = _flag(asked, "binary_data", _flag(parameters, "binary_data_output", False))
    request = InferenceRequest(
        model=model,
        version=version,
        id=_identity(message),
        inputs=inputs,
        outputs=tuple(binary),
        parameters=parameters,
    )
    return ParsedRequest(request, binary, _flag(parameters, "binary_data_output", False), shared)


def parse_generation(
    model: str, version: str | None, body: memoryview, inputs: Iterable[TensorMetadata], limits: Limits
) -> InferenceRequest:
    """The request in a body of Triton's generate extension: the model's `inputs` and parameters by name.

    Axes that a list lacks are of one element. Raises ProtocolError.
    """
    message = parse_json(body)
    by_name = {one.name: one for one in inputs}
    parameters = dict(_parameters(message))
    arrays: dict[str, Array] = {}
    for name, value in message.items():
        if name in by_name:
            arrays[name] = from_nested(by_name[name], value, limits)
        elif isinstance(value, str | int | float):
            parameters[name] = value
        elif name != "parameters":
            raise ProtocolError(f"model {model!r} has no input {name!r:.80}{did_you_mean(name, by_name)}")
    return InferenceRequest(model=model, version=version, id=_identity(message), inputs=arrays, parameters=parameters)


def token_object(token: GeneratedToken) -> dict[str, Any]:
    """A token as JSON has it, with all that its answer tells."""
    return {**_about(token), "token": token.token, "finish_reason": token.finish_reason}


def tokens_object(tokens: Sequence[GeneratedToken]) -> dict[str, Any]:
    """All tokens of a request as JSON has them."""
    reason = tokens[-1].finish_reason
    return {**_about(tokens[-1]), "tokens": [one.token for one in tokens], "finish_reason": reason}


def _about(token: GeneratedToken) -> dict[str, Any]:
    about = {"model_name": token.model, "model_version": token.version}
    return {**about, "id": token.id} if token.id else about


def parse_json(text: memoryview | bytes) -> dict[str, Any]:
    """The JSON object in `text`. Raises ProtocolError."""
    try:
        message = json.loads(bytes(text), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"no JSON: {error}") from None
    if not isinstance(message, dict):
        raise ProtocolError("expected a JSON object")
    return message


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"it has no {name}; send such values as binary data")


def _named_inputs(listed: object, limits: Limits) -> dict[str, dict[str, Any]]:
    _check_list("inputs", listed, limits)
    assert isinstance(listed, list)
    found: dict[str, dict[str, Any]] = {}
    for one in listed:
        found[_name("input", one, found)] = one
    return found


def _inputs(
    listed: Mapping[str, dict[str, Any]],
    binary: memoryview,
    limits: Limits,
    regions: Regions,
    read: Callable[[Part], memoryview],
) -> dict[str, Array]:
    found: dict[str, Array] = {}
    place = 0
    for name, one in listed.items():
        unknown = one.keys() - _INPUT_KEYS
        if unknown:
            raise ProtocolError(f"input {name!r:.80}: unknown keys {sorted(unknown)!r:.200}")
        parameters = _parameters(one)
        shape = checked_shape(name, one.get("shape"), limits)
        part = regions.part(f"input {name!r:.80}", parameters)
        if part is not None:
            found[name] = from_shared_memory(name, one.get("datatype"), shape, part, read)
            continue
        size = whole_parameter(parameters, "binary_data_size")
        if size is None:
            found[name] = from_json(name, one.get("datatype"), shape, one.get("data"))
            continue
        if "data" in one:
            raise ProtocolError(f"input {name!r:.80}: has data and binary_data_size")
        if size > binary.nbytes - place:
            raise ProtocolError(f"input {name!r:.80}: {size} bytes are announced, {binary.nbytes - place} are left")
        found[name] = from_binary(name, one.get("datatype"), shape, binary[place : place + size])
        place += size
    if place != binary.nbytes:
        raise ProtocolError(f"{binary.nbytes - place} bytes behind the last input")
    return found


def _check_list(what: str, listed: object, limits: Limits) -> None:
    if not isinstance(listed, list):
        raise ProtocolError(f"{what} must be a list")
    if len(listed) > limits.tensors:
        raise ProtocolError(f"{len(listed)} {what}; at most {limits.tensors} are taken")


def _name(what: str, tensor: object, others: Mapping[str, object]) -> str:
    if not isinstance(tensor, dict):
        raise ProtocolError(f"an {what} must be a JSON object, not {tensor!r:.80}")
    name = tensor.get("name")
    if not isinstance(name, str):
        raise ProtocolError(f"an {what}'s name must be a text, not {name!r:.80}")
    if name in others:
        raise ProtocolError(f"{what} {name!r:.80} is there twice")
    return name


def _parameters(holder: Mapping[str, Any]) -> dict[str, Any]:
    parameters = holder.get("parameters", {})
    if not isinstance(parameters, dict):
        raise ProtocolError(f"parameters must be a JSON object, not {parameters!r:.80}")
    return parameters


def _identity(message: Mapping[str, Any]) -> str:
    identity = message.get("id", "")
    if not isinstance(identity, str):
        raise ProtocolError(f"id must be a text, not {identity!r:.80}")
    return identity


def _flag(parameters: Mapping[str, Any], name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise ProtocolError(f"parameter {name!r} must be true or false, not {value!r:.80}")
    return value


def write_response(parsed: ParsedRequest, response: InferenceResponse) -> tuple[bytes, list[memoryview]]:
    """The JSON object of a response, and the bytes of those results that the client wants behind it."""
    outputs: list[dict[str, Any]] = []
    binary: list[memoryview] = []
    for name, array in response.outputs.items():
        datatype = datatype_of_output(name, array)
        output: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(array.shape)}
        if name in parsed.shared:
            output["parameters"] = parsed.shared[name].write(name, to_binary(array))
        elif parsed.binary.get(name, parsed.binary_default):
            data = to_binary(array)
            output["parameters"] = {"binary_data_size": data.nbytes}
            binary.append(data)
        else:
            output["data"] = to_json(name, datatype, array)
        outputs.append(output)
    message: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if response.id:
        message["id"] = response.id
    message["outputs"] = outputs
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode(), binary
