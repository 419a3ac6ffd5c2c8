"""A case of fuzzing: which seed, which damage and which use, all drawn from one number."""

from __future__ import annotations

import itertools
import json
import random
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import onnx
from google.protobuf import text_format
from google.protobuf.message import DecodeError, Message

from dagexec.core.proto import BlobProto, MetaNetDef, NetDef
from dagexec.frontend.predictor import META_NET_DEF
from dagexec.storage.blob_file import INTEGRITY_KEY, integrity_of
from dagexec.storage.blob_proto import encode_string
from tests.fuzz.damage import damaged_bytes, damaged_json, damaged_json_bytes, damaged_zip
from tests.fuzz.messages import Vocabulary, damage_message, nudge_message
from tests.fuzz.seeds import Kind, Seed
from tests.plans.files import put_together, taken_apart

M = TypeVar("M", bound=Message)

_SHARES: dict[Kind, int] = {
    "onnx": 36, "caffe2": 22, "predictor": 2, "checkpoint": 6, "minidb": 5, "lmdb": 5, "npz": 4, "safetensors": 4,
    "choices": 4, "plan": 8, "drawn": 4,
}  # fmt: skip
"""Cases of each kind in a hundred."""


@dataclass(frozen=True)
class Case:
    """What one number stands for.

    Attributes:
        number: it.
        seed: the files before they were damaged.
        files: the files, by path within the folder.
        rng: what draws how they are used, after it has drawn the damage.
    """

    number: int
    seed: Seed
    files: Mapping[str, bytes]
    rng: random.Random

    def write(self, folder: Path) -> Path:
        """Put the files into `folder`; returns what a user names."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return folder / self.seed.main


class Cases:
    """All cases, from the seeds they damage."""

    def __init__(self, seeds: Sequence[Seed], kinds: Iterable[Kind] = ()) -> None:
        self.seeds = seeds
        self._seeds: dict[Kind, list[Seed]] = defaultdict(list)
        for seed in seeds:
            self._seeds[seed.kind].append(seed)
        self._kinds = list(kinds) or list(_SHARES)
        self._onnx = Vocabulary(_parsed(self._seeds["onnx"], onnx.ModelProto, ".onnx"))
        nets, blobs = _parsed(self._seeds["caffe2"], NetDef, ".pb"), _blobs(self._seeds["minidb"])
        self._caffe2 = Vocabulary(itertools.chain[Message](nets, blobs))

    def case(self, number: int) -> Case:
        """The case of `number`."""
        rng = random.Random(number)
        kind = rng.choices(self._kinds, [_SHARES[kind] for kind in self._kinds])[0]
        seed = rng.choice(self._seeds[kind])
        if not seed.files:  # all of it is drawn when it is used
            return Case(number, seed, {}, rng)
        files = dict(seed.files)
        for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3, 5))):
            name = rng.choice(list(files))
            files[name] = self._damaged(rng, seed, name, files[name])
        if files == seed.files:  # a value took its own place
            files[name] = self._damaged(rng, seed, name, files[name])
        _with_page_checksum(rng, files)
        return Case(number, seed, files, rng)

    def _damaged(self, rng: random.Random, seed: Seed, name: str, content: bytes) -> bytes:
        if rng.random() < 0.07:
            other = rng.choice(self._seeds[seed.kind])
            return damaged_bytes(rng, content, next(iter(other.files.values())))
        if name.endswith(".onnx"):
            return _damaged_message(rng, content, onnx.ModelProto, self._onnx)
        if name.endswith(".pb"):
            return _damaged_message(rng, content, NetDef, self._caffe2)
        if name.endswith(".pbtxt"):
            return self._damaged_text(rng, content)
        if name.endswith((".minidb", ".mdl")):
            return _damaged_records(rng, content, self._caffe2)
        if name.endswith(".npz"):
            return damaged_zip(rng, content)
        if name.endswith(".json"):
            return damaged_json_bytes(rng, content)
        if name.endswith(".safetensors"):
            return _damaged_safetensors(rng, content)
        if name.endswith(".dagexec"):
            return _damaged_plan(rng, content, self._caffe2)
        return damaged_bytes(rng, content)

    def _damaged_text(self, rng: random.Random, content: bytes) -> bytes:
        net = NetDef()
        try:
            text_format.Parse(content.decode(), net)
        except (text_format.ParseError, UnicodeDecodeError):
            return damaged_bytes(rng, content)
        damage_message(rng, net, self._caffe2)
        return text_format.MessageToString(net).encode()


class WholeCases(Cases):
    """The seeds as they are, by number: what fuzzing starts from should be taken."""

    def case(self, number: int) -> Case:
        """The seed of `number`."""
        seed = self.seeds[number]
        return Case(number, seed, seed.files, random.Random(number))


def _parsed(seeds: Iterable[Seed], kind: type[M], suffix: str) -> Iterable[M]:
    for seed in seeds:
        for name, content in seed.files.items():
            if name.endswith(suffix):
                yield kind.FromString(content)


def _blobs(seeds: Iterable[Seed]) -> Iterable[BlobProto]:
    for seed in seeds:
        if seed.name.startswith("blobs"):
            for content in seed.files.values():
                yield from (BlobProto.FromString(value) for _, value in _records(content))


def _damaged_message(rng: random.Random, content: bytes, kind: type[M], vocabulary: Vocabulary) -> bytes:
    try:
        message = kind.FromString(content)
    except DecodeError:
        return damaged_bytes(rng, content)
    change = nudge_message if rng.random() < 0.6 else damage_message
    change(rng, message, vocabulary)
    return message.SerializePartialToString(deterministic=True)


_LENGTHS = struct.Struct("<ii")


def _records(content: bytes) -> list[tuple[bytes, bytes]]:
    """The records of a minidb, as far as they are whole."""
    found, place = [], 0
    while place + _LENGTHS.size <= len(content):
        key, value = _LENGTHS.unpack_from(content, place)
        place += _LENGTHS.size
        if key < 0 or value < 0 or place + key + value > len(content):
            break
        found.append((content[place : place + key], content[place + key : place + key + value]))
        place += key + value
    return found


def _damaged_records(rng: random.Random, content: bytes, vocabulary: Vocabulary) -> bytes:
    """A minidb in which a record has changed, occurs twice, is missing or moved; mostly with the right checksums."""
    records = _records(content)
    if not records:
        return damaged_bytes(rng, content)
    place, other = rng.randrange(len(records)), rng.randrange(len(records))
    key, value = records[place]
    way = rng.randrange(8)
    if way == 0:
        del records[place]
    elif way == 1:
        records.append(records[place])
    elif way == 2:
        records[place], records[other] = records[other], records[place]
    elif way == 3:
        records[place] = damaged_bytes(rng, key), value
    else:
        records[place] = key, _damaged_blob(rng, value, vocabulary)
    if rng.random() < 0.8:
        records = _with_checksums(records)
    return b"".join(_LENGTHS.pack(len(key), len(value)) + key + value for key, value in records)


def _damaged_blob(rng: random.Random, value: bytes, vocabulary: Vocabulary) -> bytes:
    try:
        blob = BlobProto.FromString(value)
    except DecodeError:
        return damaged_bytes(rng, value)
    if blob.name == META_NET_DEF:
        blob.content = _damaged_message(rng, blob.content, MetaNetDef, vocabulary)
    elif blob.content.startswith(b"{"):  # the state of a checkpoint
        try:
            blob.content = json.dumps(damaged_json(rng, json.loads(blob.content))).encode()
        except (ValueError, RecursionError):
            blob.content = damaged_bytes(rng, blob.content)
    else:
        damage_message(rng, blob, vocabulary)
    return blob.SerializePartialToString(deterministic=True)


def _with_checksums(records: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The records with a record of their checksums that is right, where there was one."""
    wanted = INTEGRITY_KEY.encode()
    others = [(key, value) for key, value in records if key != wanted]
    if len(others) == len(records):
        return records
    sums = {key.decode(errors="replace"): (zlib.crc32(value), len(value)) for key, value in others}
    return [*others, (wanted, encode_string(INTEGRITY_KEY, integrity_of(sums)))]


def _damaged_safetensors(rng: random.Random, content: bytes) -> bytes:
    """A file whose header, in JSON, says something else; its length is right."""
    length = int.from_bytes(content[:8], "little")
    try:
        header: Any = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError):
        return damaged_bytes(rng, content)
    changed = json.dumps(damaged_json(rng, header)).encode()
    return len(changed).to_bytes(8, "little") + changed + content[8 + length :]


def _damaged_plan(rng: random.Random, content: bytes, vocabulary: Vocabulary) -> bytes:
    """A plan whose manifest says something else, or of which a section has changed; mostly with the right hashes."""
    way = rng.random()
    if way < 0.2:
        return damaged_bytes(rng, content)
    try:
        plan, sections = taken_apart(content)
    except (ValueError, LookupError, TypeError, struct.error):
        return damaged_bytes(rng, content)
    if way < 0.6:
        return put_together(damaged_json(rng, plan), sections)
    models = [plan.get(name) for name in ("compiled", "given")] if isinstance(plan, dict) else []
    nets = [one.get("net") for one in models if isinstance(one, dict)]
    if nets and way < 0.9 and (number := rng.choice(nets)) in range(len(sections)):
        sections[number] = _damaged_message(rng, sections[number], NetDef, vocabulary)
    elif sections:
        number = rng.randrange(len(sections))
        sections[number] = damaged_bytes(rng, sections[number])
    return put_together(plan, sections)


def _with_page_checksum(rng: random.Random, files: dict[str, bytes]) -> None:
    """Of an lmdb database that has changed: the old checksum stays, is missing, or is made right, as malice would."""
    pages = next((name for name in files if name.endswith("data.mdb")), None)
    way = rng.randrange(5)
    if pages is None or way == 0:
        return
    name = pages.removesuffix("data.mdb") + "data.crc32"
    files.pop(name, None)
    if way >= 3:
        files[name] = f"{zlib.crc32(files[pages]):08x} {len(files[pages])}\n".encode()
