"""Requests and responses between the messages of gRPC and dagexec's own, which HTTP has too (`inference.py`).

The fields of the messages are told in `proto/inference.proto`. Nothing here waits, runs a model or knows what it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType

import numpy as np

from dagexec.core.feeds import Array
from dagexec.server.datatypes import BYTES
from dagexec.server.inference import (
    GeneratedToken,
    InferenceRequest,
    InferenceResponse,
    ModelMetadata,
    Parameter,
    RequestError,
    TensorMetadata,
)
from dagexec.server.limits import Limits
from dagexec.server.proto import inference_pb2 as messages
from dagexec.server.shared_memory import NO_REGIONS, Part, Regions, from_shared_memory
from dagexec.server.tensors import checked_datatype, checked_shape, datatype_of_output, from_binary, to_binary

_CONTENTS: Mapping[str, str] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""By datatype, the field of its elements. FP16 and BF16 have none."""


def request_from(
    message: messages.ModelInferRequest,
    limits: Limits,
    regions: Regions = NO_REGIONS,
    read: Callable[[Part], memoryview] = Part.read,
) -> InferenceRequest:
    """The request in a message; raises `RequestError` (400) where it contradicts itself, or is beyond the limits.

    Inputs in `regions` of shared memory are copied by `read`.
    """
    for what, count in (("inputs", len(message.inputs)), ("outputs", len(message.outputs))):
        if count > limits.tensors:
            raise RequestError(400, f"{count} {what}; at most {limits.tensors} are taken")
    for output in message.outputs:
        if output.parameters and parameters_from(output.parameters).get("classification"):
            raise RequestError(400, f"output {output.name!r:.80}: classification is not supported")
    names = [tensor.name for tensor in message.inputs]
    if len(set(names)) != len(names):
        raise RequestError(400, f"an input is given twice: {', '.join(map(repr, names)):.200}")
    return InferenceRequest(
        model=message.model_name,
        version=message.model_version or None,
        id=message.id,
        inputs=dict(zip(names, _arrays(message, limits, regions, read), strict=True)),
        outputs=tuple(output.name for output in message.outputs),
        parameters=parameters_from(message.parameters),
    )


def parameters_from(
    given: Mapping[str, messages.Parameter]
    | Mapping[str, messages.RepositoryParameter]
    | Mapping[str, messages.LogSetting],
) -> dict[str, Parameter]:
    """Parameters as Python's values; one without a value is left out."""
    chosen = {name: message.WhichOneof("value") for name, message in given.items()}
    return {name: getattr(given[name], field) for name, field in chosen.items() if field is not None}


def shared_outputs(message: messages.ModelInferRequest, regions: Regions) -> dict[str, Part]:
    """Where results are to be left in shared memory. Raises RequestError."""
    parts = ((one.name, _part("output", one, regions)) for one in message.outputs if one.parameters)
    return {name: part for name, part in parts if part is not None}


def response_message(
    response: InferenceResponse, shared: Mapping[str, Part] = MappingProxyType({})
) -> messages.ModelInferResponse:
    """A response with the results as raw bytes, which every client reads, but for those that are `shared`."""
    message = messages.ModelInferResponse(model_name=response.model, model_version=response.version, id=response.id)
    for name, array in response.outputs.items():
        tensor = message.outputs.add(name=name, datatype=datatype_of_output(name, array), shape=array.shape)
        data = to_binary(array)
        if name in shared:
            for key, value in shared[name].write(name, data).items():
                field = "string_param" if isinstance(value, str) else "int64_param"
                setattr(tensor.parameters[key], field, value)
            data = memoryview(b"")
        message.raw_output_contents.append(bytes(data))
    return message


def token_message(token: GeneratedToken) -> messages.ModelInferResponse:
    """A token as the one result of an answer."""
    response = InferenceResponse(
        model=token.model, version=token.version, id=token.id, outputs={"token": np.array([token.token])}
    )
    message = response_message(response)
    if token.finish_reason:
        message.parameters["finish_reason"].string_param = token.finish_reason
    return message


def metadata_message(metadata: ModelMetadata) -> messages.ModelMetadataResponse:
    """What a model takes and gives."""
    return messages.ModelMetadataResponse(
        name=metadata.name,
        versions=metadata.versions,
        platform=metadata.platform,
        inputs=map(_described, metadata.inputs),
        outputs=map(_described, metadata.outputs),
    )


def _arrays(
    message: messages.ModelInferRequest, limits: Limits, regions: Regions, read: Callable[[Part], memoryview]
) -> list[Array]:
    parts = [_part("input", tensor, regions) if tensor.parameters else None for tensor in message.inputs]
    raw, sent = message.raw_input_contents, parts.count(None)
    if raw and len(raw) != sent:
        raise RequestError(400, f"raw_input_contents has {len(raw)} entries, for {sent} inputs")
    contents = iter(raw)
    arrays = []
    for tensor, part in zip(message.inputs, parts, strict=True):
        if part is not None:
            shape = checked_shape(tensor.name, tensor.shape, limits)
            arrays.append(from_shared_memory(tensor.name, tensor.datatype, shape, part, read))
        else:
            arrays.append(_raw(tensor, next(contents), limits) if raw else _typed(tensor, limits))
    return arrays


def _part(kind: str, tensor: messages.Tensor | messages.RequestedOutput, regions: Regions) -> Part | None:
    return regions.part(f"{kind} {tensor.name!r:.80}", parameters_from(tensor.parameters))


def _raw(tensor: messages.Tensor, data: bytes, limits: Limits) -> Array:
    if tensor.HasField("contents"):
        raise RequestError(400, f"input {tensor.name!r:.80} has contents beside raw_input_contents")
    shape = checked_shape(tensor.name, tensor.shape, limits)
    return from_binary(tensor.name, tensor.datatype, shape, memoryview(data))


def _typed(tensor: messages.Tensor, limits: Limits) -> Array:
    """The elements of the datatype's own field. Those of 8 and 16 bits come in one of 32, so their range is checked."""
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        raise RequestError(400, f"input {tensor.name!r:.80}: {tensor.datatype!r:.80} has no contents but raw bytes")
    others = [descriptor.name for descriptor, _ in tensor.contents.ListFields() if descriptor.name != field]
    if others:
        raise RequestError(400, f"input {tensor.name!r:.80}: {tensor.datatype} is given in {field}, not {others[0]}")
    values = getattr(tensor.contents, field)
    shape = checked_shape(tensor.name, tensor.shape, limits)
    if len(values) != prod(shape):
        raise RequestError(
            400, f"input {tensor.name!r:.80}: {len(values)} elements; shape {list(shape)} has {prod(shape)}"
        )
    if tensor.datatype == BYTES:
        return np.array([*values, None], np.object_)[:-1].reshape(shape)
    dtype = checked_datatype(tensor.name, tensor.datatype)
    if field not in ("int_contents", "uint_contents"):
        return np.array(values, dtype).reshape(shape)
    wide = np.array(values, np.int64)
    range_ = np.iinfo(dtype)
    if wide.size and not range_.min <= wide.min() <= wide.max() <= range_.max:
        raise RequestError(400, f"input {tensor.name!r:.80} has elements that {tensor.datatype} cannot hold")
    return wide.astype(dtype).reshape(shape)


def _described(tensor: TensorMetadata) -> messages.TensorMetadata:
    return messages.TensorMetadata(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape or ())
