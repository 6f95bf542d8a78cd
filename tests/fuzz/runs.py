"""A target that is a whole run: hostile objects under right hashes, read by a fresh receiver.

An input lists objects that are replaced. Every hash above them is mended, up to the log: what is
refused is refused by a parser, a bound or a digest, and what is not reaches the kernels.
"""

import json
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3
from small_runs import SmallRun, all_bits

from fuzz import binary, frames
from fuzz.mutate import Rng, any_bytes, reshape
from fuzz.target import Target
from fuzz.texts import chain, documents
from weightdelta.config import Config
from weightdelta.errors import WeightDeltaError
from weightdelta.frame import FramePlan
from weightdelta.index import Index
from weightdelta.layout import Layout
from weightdelta.receiver import Receiver
from weightdelta.record import data_name, index_name, layout_name, log_name, plan_name
from weightdelta.store import Store
from weightdelta.verify import verify

SETTINGS = Config.of({"threads": 1, "store": {"threads": 1, "fsync": False}})
Objects = Mapping[str, bytes]


class Repository:
    """A run of three versions, three codecs, two plans; its names and ids are always the same.

    Attributes:
        objects: Bytes by a short name, such as ``layout``, ``plan 0``, ``data 2 1`` or ``log 4``.
        run: The run itself, for models and the weights of its versions.
    """

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp())
        xor = {"values": "xor"}
        self.run = SmallRun(folder, config=Config.of({"codec": "snappy+zstd", **xor}), max_bytes=64)
        self.run.step(1)
        self.run.open(config=Config(), ranks=3, max_bytes=512)
        self.run.step(2, share=0.5)
        self.run.writer.tag("eval")
        self.run.open(config=Config.of({"codec": "none", **xor}), ranks=3, max_bytes=512)
        self.run.step(3, share=0.02)
        self.run.close()
        store = self.run.store
        entries = [store.read(name) for name in store.names("log/")]
        self.log = documents(entries)
        self.plans: list[str] = []
        self.objects: dict[str, bytes] = {}
        ids: dict[str, str] = {}
        for document in self.log:
            document["nonce"] = f"{document['epoch']:032x}"
            if document["kind"] == "open":
                self.objects["layout"] = store.read(layout_name(document["layout"]))
            if document["kind"] != "version":
                continue
            version, old = document["version"], document["write_id"]
            ids[old] = f"{version:032x}"
            if document["plan"] not in self.plans:
                self.plans.append(document["plan"])
                self.objects[f"plan {len(self.plans) - 1}"] = store.read(
                    plan_name(document["plan"])
                )
            index = store.read(index_name(old))
            self.objects[f"index {version}"] = index[:72] + bytes.fromhex(ids[old]) + index[88:]
            for rank in range(3):
                if data_name(old, rank) in store.names(f"data/{old}"):
                    self.objects[f"data {version} {rank}"] = store.read(data_name(old, rank))
            document["write_id"] = ids[old]
        for seq, document in enumerate(self.log):
            self.objects[f"log {seq}"] = json.dumps(document, sort_keys=True).encode()
        self.names = sorted(self.objects)

    def plan_of(self, version: int) -> str:
        """Short name of a version's plan."""
        entry = next(d for d in self.log if d.get("version") == version and d["kind"] == "version")
        return f"plan {self.plans.index(entry['plan'])}"

    def stored(self, objects: Objects) -> dict[str, bytes]:
        """What lies in a store: names, hashes, chain and offsets made right."""
        layout = objects["layout"]
        found = {layout_name(_hash(layout)): layout}
        names = {self.log[0]["layout"]: _hash(layout)}
        plans = {}
        for number, old in enumerate(self.plans):
            data = objects[f"plan {number}"]
            plans[f"plan {number}"] = data[:8] + bytes.fromhex(_hash(layout)) + data[40:]
            names[old] = _hash(plans[f"plan {number}"])
            found[plan_name(names[old])] = plans[f"plan {number}"]
        sizes = {}
        for version in (1, 2, 3):
            data = [objects.get(f"data {version} {rank}", b"") for rank in range(3)]
            for rank, part in enumerate(data):
                found[data_name(f"{version:032x}", rank)] = part
            plan = plans[self.plan_of(version)]
            index = _mend_index(objects[f"index {version}"], plan, layout, data)
            found[index_name(f"{version:032x}")] = index
            entry = next(d for d in self.log if d["kind"] == "version" and d["version"] == version)
            names[entry["index"]] = _hash(index)
            sizes[version] = (entry["index_bytes"], len(index))
        entries = [
            _mend_entry(json.loads(objects[f"log {seq}"]), names, sizes)
            for seq in range(len(self.log))
        ]
        return found | {log_name(seq): data for seq, data in enumerate(chain(entries))}


def _hash(data: bytes) -> str:
    return blake3(data).hexdigest()


def _mend_entry(document: Any, names: dict[str, str], sizes: dict[int, tuple[int, int]]) -> Any:
    if not isinstance(document, dict):
        return {"kind": document}
    for key in ("layout", "plan", "index"):
        if isinstance(document.get(key), str):
            document[key] = names.get(document[key], document[key])
    version = document.get("version")
    old, new = sizes.get(version, (None, None)) if type(version) is int else (None, None)
    if old is not None and document.get("index_bytes") == old:
        document["index_bytes"] = new
    return document


def _mend_index(index: bytes, plan: bytes, layout: bytes, data: list[bytes]) -> bytes:
    """The index for this plan; with the hashes of these frames, if it can be read."""
    index = index[:40] + bytes.fromhex(_hash(plan)) + index[72:]
    try:
        shape = Layout.from_bytes(layout)
        frames_of = FramePlan.from_bytes(plan, layout=shape)
        read = Index.from_bytes(index, plan=frames_of, layout=shape)
    except WeightDeltaError:
        return index
    hashes = b""
    for i in range(len(frames_of)):
        owner, low = int(frames_of.owner[i]), read.offset(i)
        part = data[owner][low : low + read.length(i)] if owner < len(data) else b""
        hashes += blake3(part).digest(length=16)
    return index[: len(index) - len(hashes)] + hashes if hashes else index


def _pack(edits: Mapping[int, bytes]) -> bytes:
    return b"".join(
        bytes([number]) + len(data).to_bytes(4, "little") + data for number, data in edits.items()
    )


def _unpack(raw: bytes) -> dict[int, bytes]:
    edits: dict[int, bytes] = {}
    while raw and len(edits) < 16:
        size = int.from_bytes(raw[1:5], "little")
        edits[raw[0]] = raw[5 : 5 + size]
        raw = raw[5 + size :]
    return edits


def _mutated(rng: Rng, name: str, data: bytes) -> bytes:
    """One object, changed by what fits its kind."""
    kind = name.split()[0]
    if kind == "log":
        return reshape(rng, data, sort=True)
    if kind == "layout" and rng.random() < 0.5:
        return reshape(rng, data, sort=False)
    structured = {
        "plan": (binary._plan_edit, binary._plan_split, binary._plan_header),
        "index": (binary._index_mask, binary._index_entry),
    }.get(kind)
    return rng.choice(structured)(rng, data) if structured else any_bytes(rng, data)


def run_target() -> Target:
    """A whole run."""
    repository = Repository()
    run, names = repository.run, repository.names

    def edit(rng: Rng, raw: bytes) -> bytes:
        edits = _unpack(raw)
        for _ in range(rng.choice((1, 1, 2, 3))):
            number = rng.randrange(len(names))
            data = edits.get(number, repository.objects[names[number]])
            edits[number] = _mutated(rng, names[number], data)
        return _pack(edits)

    def recoded(rng: Rng, _: bytes) -> bytes:
        """A frame re-encoded with other contents, the index's sizes to match."""
        version = rng.choice((1, 2, 3))
        layout = Layout.from_bytes(repository.objects["layout"])
        plan = FramePlan.from_bytes(repository.objects[repository.plan_of(version)], layout=layout)
        index = Index.from_bytes(repository.objects[f"index {version}"], plan=plan, layout=layout)
        i = rng.choice([i for i in range(len(plan)) if index.length(i)])
        name, low = f"data {version} {int(plan.owner[i])}", index.offset(i)
        whole = repository.objects[name]
        part = whole[low : low + index.length(i)]
        item = frames.Input(0, "diff", index.sizes_of(i).copy(), part)
        other = frames.Input.of(frames._contents(rng, item.to_bytes()))
        index.sizes[i] = other.sizes
        changed = whole[:low] + other.data + whole[low + len(part) :]
        return _pack({
            names.index(name): changed, names.index(f"index {version}"): index.to_bytes()
        })  # fmt: skip

    def check(raw: bytes) -> None:
        edits = {names[n]: data for n, data in _unpack(raw).items() if n < len(names)}
        try:
            objects = repository.stored(repository.objects | edits)
        except (ValueError, RecursionError):  # edits that are no JSON any more
            return
        store = Store(f"memory://{secrets.token_hex(8)}", timeout_s=None)
        try:
            for name, data in objects.items():
                store.write(name, data)
            verify(store, config=SETTINGS, deep=True)  # finds, and never raises
            _follow(store, run)
        finally:
            for name in objects:
                store.delete(name)

    return Target("run", [b""], check, (edit, edit, recoded), weight=0.05, share=0.98)


def _follow(store: Store, run: SmallRun) -> None:
    """A fresh receiver: the weights of a committed version, or an error and not a bit changed."""
    model = run.model()
    receiver = None
    try:
        receiver = Receiver(store, model, config=SETTINGS)
        receiver.prepare().wait()
    except WeightDeltaError:
        assert all_bits(model) == run.versions[0]
        raise
    else:
        receiver.apply()
        assert all_bits(model) in run.versions
        assert receiver.scrub() == receiver.version
    finally:
        if receiver:
            receiver.close()


def run_targets() -> list[Target]:
    """All of them."""
    return [run_target()]
