"""ImageInput: batches of images from a database: decoded, scaled, cropped, mirrored, normalized.

A record is TensorProtos: an image, encoded as in a file or as bytes of rows, columns and channels; a label; what
argument `output_sizes` tells of; perhaps a box. Or it is a Datum of Caffe. Colors are blue, green, red, as Caffe2 has
them. Decoding needs Pillow.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from dagexec.core import dtypes
from dagexec.core.dtypes import FLOAT16, FLOAT32, STRING, UINT8
from dagexec.core.gradient import no_gradient
from dagexec.core.node import Node
from dagexec.core.registry import new_operator
from dagexec.core.schema import UNBOUNDED
from dagexec.core.workspace import Workspace
from dagexec.errors import ArgumentError, StorageError, UnsupportedFeatureError
from dagexec.ops.base.blocks import Array
from dagexec.ops.base.declared_types import DTYPES, SHAPES
from dagexec.ops.families.storage.tensor_input import TensorProtosDBInput, infer_input, whole
from dagexec.platform.extras import install_command
from dagexec.platform.host_memory import check_fits
from dagexec.storage.reader import DBReader
from dagexec.storage.tensor_proto import Segment
from dagexec.storage.wire import LENGTH, VARINT, WireError, fields, read_varint

_FORMATS = ("BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_GRAY = np.array([0.114, 0.587, 0.299], np.float32)
"""Of blue, green and red."""

SINGLE_LABEL, SPARSE, DENSE, WEIGHTED_SPARSE = range(4)
"""What `label_type` says: a number; the classes of a row of 0 and 1; such a row; classes, and their weights."""

_REFUSED = ("color_jitter", "color_lighting", "scale_jitter_type")


def _pillow() -> ModuleType:
    try:
        import PIL.Image
    except ImportError:
        raise StorageError(f"decoding images needs Pillow; install it with: {install_command('images')}") from None
    return PIL.Image


def decoded(content: bytes, *, color: bool) -> Array:
    """An image file's pixels, (rows, columns, channels). Raises StorageError."""
    image_module = _pillow()
    try:
        with image_module.open(io.BytesIO(content), formats=_FORMATS) as image:
            check_fits(image.width * image.height * 4, f"an image of {image.width} x {image.height} pixels")
            pixels = np.asarray(image.convert("RGB" if color else "L"))
    except (OSError, SyntaxError, ValueError, image_module.DecompressionBombError) as error:
        raise StorageError(f"the image cannot be decoded: {error}") from None
    return pixels[:, :, ::-1] if color else pixels[:, :, None]


def in_color(pixels: Array, *, color: bool) -> Array:
    """Pixels of one channel or three as those of the other number. Raises StorageError for others."""
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or not pixels.size:
        raise StorageError(
            f"an image of bytes must have rows, columns and 1 or 3 channels; found {pixels.dtype}{list(pixels.shape)}"
        )
    if color:
        return np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels
    return pixels if pixels.shape[2] == 1 else np.rint(pixels @ _GRAY)[:, :, None].astype(np.uint8)


def resized(pixels: Array, rows: int, columns: int) -> Array:
    """The image in another size: means of areas where it shrinks, linear between pixels where it grows."""
    image_module = _pillow()
    check_fits(rows * columns * pixels.shape[2], f"an image of {columns} x {rows} pixels")
    shrinks = rows <= pixels.shape[0] and columns <= pixels.shape[1]
    method = image_module.Resampling.BOX if shrinks else image_module.Resampling.BILINEAR
    image = image_module.fromarray(np.ascontiguousarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0]))
    return np.asarray(image.resize((columns, rows), method)).reshape(rows, columns, pixels.shape[2])


def datum(content: bytes) -> tuple[Array | bytes, int]:
    """The pixels, or the image file, and the label in a Datum of Caffe. Raises StorageError."""
    sizes, data, label, is_encoded = [0, 0, 0], b"", 0, False
    try:
        for number, kind, value, _ in fields(memoryview(content)):
            if number == 4 and kind == LENGTH:
                data = bytes(value)
            elif kind == VARINT and number in (1, 2, 3, 5, 7):
                decimal = read_varint(value, 0)[0]
                if number <= 3:
                    sizes[number - 1] = decimal
                elif number == 5:
                    label = decimal
                else:
                    is_encoded = bool(decimal)
    except WireError as error:
        raise StorageError(f"not a Datum: {error}") from None
    if not -(1 << 31) <= label < 1 << 31:
        raise StorageError(f"a Datum's label is an int32, found {label}")
    if is_encoded:
        return data, label
    if len(data) != sizes[0] * sizes[1] * sizes[2]:
        raise StorageError(f"a Datum of {len(data)} bytes says that it has {sizes} channels, rows and columns")
    return np.frombuffer(data, np.uint8).reshape(sizes).transpose(1, 2, 0), label


@new_operator(
    "ImageInput",
    outputs=(2, UNBOUNDED),
    infer=infer_input,
    doc="The next images of a database and their labels, with what else its records have. The images are float32, N, "
    "rows, columns, channels (blue, green, red). The next batch is read while the net works, unless other operators "
    "read from the same blob. In training the place of the crop and the mirroring are random, by the operator's seed.",
    input_names=("reader",),
    output_names=("images", "labels", "others..."),
    args={
        "batch_size": "images in a batch",
        "color": "1 (the default): three channels, 0: one",
        "scale": "what the shorter side is scaled to",
        "minsize": "instead of scale: what the shorter side is scaled to where it is shorter",
        "warp": "both sides are scaled to that (default 0)",
        "random_scale": "two sizes: what scale is drawn between, for each image",
        "crop": "rows and columns of the square that is cut out",
        "mirror": "1: half of the images, in training, are mirrored (default 0)",
        "is_test": "1: the middle is cut out, and nothing is random (default 0)",
        "mean": "subtracted from each element (default 0)",
        "std": "what it is divided by then (default 1)",
        "mean_per_channel": "means of the channels",
        "std_per_channel": "divisors of the channels",
        "use_caffe_datum": "1: records are Datums of Caffe (default 0)",
        "label_type": "0: a number; 1: the classes of a row of 0 and 1; 2: such a row; 3: classes, and their weights",
        "num_labels": "the length of such a row",
        "output_sizes": "how many numbers a record has for each output behind the labels (default: 1)",
        "use_gpu_transform": "1: the images are N, channels, rows, columns (default 0)",
        "output_type": "of images with use_gpu_transform: float (the default) or float16",
        "prefetch": "read one batch ahead (default: 1)",
        "shapes": SHAPES,
        "dtypes": DTYPES,
        **dict.fromkeys(_REFUSED, "must be 0"),
    },
    unread_args=("decode_threads", "db", "db_type", "order", "img_saturation", "img_brightness", "img_contrast"),
    required_args=("batch_size", "crop"),
    inferred_if="shapes",
    handles=(0,),
    mutates=(0,),
    effects=True,
    reproducible=False,
)
class ImageInput(TensorProtosDBInput):
    """Images from records."""

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        """Raises ArgumentError for sizes that do not fit, UnsupportedFeatureError for a jitter of colors or sizes."""
        super().__init__(definition, workspace, index=index, net=net)
        arguments = self.arguments
        for name in _REFUSED:
            if arguments.int(name, 0):
                raise UnsupportedFeatureError(f"{self.label}: argument {name!r} is not there")
        scale, least = arguments.int("scale", -1), arguments.int("minsize", -1)
        self._scales = arguments.ints("random_scale") if max(arguments.ints("random_scale"), default=0) > 0 else []
        self._crop = arguments.int("crop", 0)
        self._size = max(scale, least)
        self._always = scale > 0 or bool(self._scales)
        smallest = min(self._scales or [self._size])
        if self.size < 1 or not 0 < self._crop <= smallest or (scale > 0) + (least > 0) + bool(self._scales) != 1:
            raise ArgumentError(
                f"{self.label}: expected a batch_size, and a crop of at most either scale, minsize or random_scale; "
                f"found batch_size {self.size}, crop {self._crop}, scale {scale}, minsize {least}, {self._scales}"
            )
        if len(self._scales) not in (0, 2) or self._scales != sorted(self._scales):
            raise ArgumentError(f"{self.label}: 'random_scale' must be two sizes, in order; found {self._scales}")
        self._color, self._is_test = arguments.bool("color", True), arguments.bool("is_test")
        self._mean, self._std = self._of_channels("mean", 0.0), self._of_channels("std", 1.0)
        self._label_type, self._classes = arguments.int("label_type", 0), arguments.int("num_labels", 0)
        if not 0 <= self._label_type <= WEIGHTED_SPARSE or (self._label_type and self._classes < 1):
            raise ArgumentError(
                f"{self.label}: expected a label_type from 0 to {WEIGHTED_SPARSE}, and num_labels for others than 0; "
                f"found {self._label_type}, {self._classes}"
            )
        others = len(self.output_blobs) - 2
        self._sizes = arguments.ints("output_sizes") or [1] * others
        if len(self._sizes) != others:
            raise ArgumentError(f"{self.label}: expected {others} 'output_sizes', found {self._sizes}")
        self._type = dtypes.from_name(arguments.string("output_type", "float"))
        if self._type not in (FLOAT32, FLOAT16):
            raise ArgumentError(f"{self.label}: 'output_type' must be float or float16, found {self._type}")

    def _of_channels(self, name: str, default: float) -> Array:
        count = 3 if self._color else 1
        values = self.arguments.floats(f"{name}_per_channel") or [self.arguments.float(name, default)]
        if len(values) not in (1, count) or (name == "std" and 0 in values):
            raise ArgumentError(f"{self.label}: expected {count} numbers as '{name}_per_channel', found {values}")
        return np.array(values, np.float32)

    def read_batch(self, reader: DBReader) -> None:
        """Read and transform so many records."""
        records = [self._tensors(*reader.read(), reader.path) for _ in range(self.size)]
        batch = [np.stack(column) for column in zip(*records, strict=True)]
        if self.arguments.bool("use_gpu_transform"):
            batch[0] = np.ascontiguousarray(batch[0].transpose(0, 3, 1, 2).astype(self._type.numpy))
        self.batch = batch

    def _tensors(self, key: bytes, value: bytes, path: str) -> list[Array]:
        """What a record has for each output. Raises StorageError, naming it."""
        try:
            if self.arguments.bool("use_caffe_datum"):
                content, label = datum(value)
                image = decoded(content, color=self._color) if isinstance(content, bytes) else content
                return [self._transformed(in_color(image, color=self._color)), np.array(label, np.int32)]
            return self._of_protos(self.segments(value))
        except (StorageError, WireError) as error:
            raise StorageError(f"{self.label}: {path}: record {key[:80]!r}: {error}") from None

    def _of_protos(self, segments: Sequence[Segment]) -> list[Array]:
        weights = self._label_type == WEIGHTED_SPARSE
        others = 2 + weights
        end = others + len(self._sizes)
        if not end <= len(segments) <= end + 1:
            raise StorageError(f"expected {end} tensors, or one more with a box; found {len(segments)}")
        image = self._pixels(segments[0])
        if len(segments) > end:
            image = _boxed(image, segments[end].values)
        label = self._target(segments[1].values, segments[2].values if weights else np.ones(1, np.int32))
        rest = [segment.values for segment in segments[others:end]]
        for values, size in zip(rest, self._sizes, strict=True):
            if values.size != size:
                raise StorageError(
                    f"expected {self._sizes} numbers for the outputs behind the labels, found {values.size}"
                )
        return [self._transformed(image), label, *rest]

    def _pixels(self, segment: Segment) -> Array:
        if segment.meta is STRING and segment.values.size == 1:
            return in_color(decoded(segment.values[0], color=self._color), color=self._color)
        if segment.meta is not UINT8:
            raise StorageError(f"an image is a string or bytes, found {segment.meta}{list(segment.shape)}")
        return in_color(whole(segment), color=self._color)

    def _target(self, values: Array, weights: Array) -> Array:
        """A scalar, or a row with a place for each class."""
        kind, classes = self._label_type, self._classes
        expected = {SINGLE_LABEL: 1, DENSE: classes}.get(kind, values.size)
        if values.size != expected or values.dtype.kind not in "if":
            raise StorageError(f"expected {expected} numbers as the label, found {values.dtype}{list(values.shape)}")
        if kind in (SINGLE_LABEL, DENSE):
            return values.reshape(() if kind == SINGLE_LABEL else classes)
        if (
            values.dtype.kind != "i"
            or ((values < 0) | (values >= classes)).any()
            or weights.size not in (1, values.size)
        ):
            raise StorageError(f"expected classes below {classes}, and as many weights; found {values}, {weights}")
        row = np.zeros(classes, np.float32 if kind == WEIGHTED_SPARSE else np.int32)
        row[values] = weights
        return row

    def _transformed(self, pixels: Array) -> Array:
        """Scaled, cropped, mirrored, normalized."""
        rows, columns, _ = pixels.shape
        side = int(self.random.integers(self._scales[0], self._scales[1] + 1)) if self._scales else self._size
        if self.arguments.bool("warp"):
            wanted = side, side
        elif rows > columns:
            wanted = int(np.float32(rows) * side / columns), side
        else:
            wanted = side, int(np.float32(columns) * side / rows)
        if wanted != (rows, columns) if self._always else wanted[0] > rows or wanted[1] > columns:
            pixels = resized(pixels, *wanted)
        room = pixels.shape[0] - self._crop, pixels.shape[1] - self._crop
        if min(room) < 0:
            raise StorageError(
                f"an image of {pixels.shape[1]} x {pixels.shape[0]} is smaller than the crop, {self._crop}"
            )
        mirrored = False
        if self._is_test:
            top, left = room[0] // 2, room[1] // 2
        else:
            top, left = (int(self.random.integers(most + 1)) for most in room)
            mirrored = self.arguments.bool("mirror") and bool(self.random.integers(2))
        cut = pixels[top : top + self._crop, left : left + self._crop]
        values = (cut[:, ::-1] if mirrored else cut).astype(np.float32)
        return (values - self._mean) / self._std


def _boxed(pixels: Array, box: Array) -> Array:
    """The part of an image in a box: top, left, height, width; all of it where they have nothing in common."""
    if box.size != 4 or box.dtype.kind != "i":
        raise StorageError(f"a box is four integers, found {box.dtype}{list(box.shape)}")
    top, left, height, width = map(int, box)
    part = pixels[max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)]
    return part if part.size else pixels


no_gradient("ImageInput")
