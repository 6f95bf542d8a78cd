"""Any version as a checkpoint folder: a copy of the base, patched in place, checked, renamed.

What is written keeps the base's files: sharding, metadata, order of tensors, index. Weights are
mapped from disk and patched frame by frame, so memory is bounded by frames, not by the model.
The folder appears under its name only after the digest of everything in it has turned out to be
the version's own in the log.

Nothing in a store names a file: tensors are looked up in the base by name, and file names are
the base's own.
"""

import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from weightdelta import threads
from weightdelta.base import INDEX, Base
from weightdelta.batches import Progress, batches
from weightdelta.config import Config
from weightdelta.delta import Delta, DeltaReader, canonical
from weightdelta.digest import MASK, U64, seed, version_digest
from weightdelta.errors import (
    InputError,
    LayoutMismatch,
    StateMismatch,
    StoreUnavailable,
    WeightDeltaError,
)
from weightdelta.kernels import ops
from weightdelta.kernels.planes import UINTS, Elements
from weightdelta.layout import Layout, TensorSpec
from weightdelta.log import Log
from weightdelta.versions import Hop, find_path

#: Elements hashed at a time, and bytes copied at a time.
PART: Final = 4 << 20
BLOCK: Final = 1 << 20
#: Weights in other formats would still be version 0, so they are not copied.
WEIGHTS: Final = frozenset(
    {
        ".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".npy", ".npz", ".onnx", ".ot", ".pkl",
        ".pt", ".pth", ".safetensors",
    }
)  # fmt: skip
#: The one folder that a tokenizer may have beside its files.
FOLDERS: Final = ("additional_chat_templates",)


@dataclass(frozen=True, slots=True)
class Materialized:
    """A checkpoint that was written.

    Attributes:
        version: What it holds.
        digest: Its digest, 64 hex digits.
        start: The version that ``base`` was found to be.
        hops: Deltas applied.
        changed: Elements patched, over all hops.
        nbytes: Bytes of all safetensors files.
        files: Names of all files written.
        left_out: Names of the base's files that hold weights in another format.
    """

    version: int
    digest: str
    start: int
    hops: int
    changed: int
    nbytes: int
    files: tuple[str, ...]
    left_out: tuple[str, ...]


def materialize(
    log: Log,
    *,
    version: int,
    base: Path,
    out: Path,
    config: Config,
    progress: Progress = lambda *_: None,
) -> Materialized:
    """Write a version of a run as a folder that ``transformers`` loads.

    Args:
        log: The run's log, refreshed.
        version: The version to write.
        base: A checkpoint that holds any version of this run, usually the run's base. It is
            only read.
        out: The folder to make; it must not exist, or be empty.
        config: Threads and reader limits.
        progress: Called with what is being done.

    Raises:
        NotYet: The run has no such version, or was never opened.
        InputError: ``base`` is no checkpoint, ``out`` is taken, or one of their names is unfit.
        LayoutMismatch: ``base`` is a checkpoint of another model.
        StateMismatch: ``base`` holds no version of this run, or the result is not the version.
        DamagedObject, MissingObject, NoPath: The store cannot deliver it.
        StoreUnavailable: The store failed, or ``out`` could not be written (no space).
    """
    digest = log.digest(version)
    source = _Source.of(base)
    _refuse_taken(out)
    reader = DeltaReader(log.store, config=config)
    layout = reader.layout(log.opened.layout if log.opened else "")
    held = Base(base)
    _check_fits(held, layout)
    with threads.pool(config.threads, "weightdelta-work") as pool:
        work = _Work(layout, reader, config, pool, progress)
        start = _recognize(log, held, work)
        path = find_path(log, start=start, end=version, max_chain=config.limits.max_chain)
        with _draft(out) as draft:
            nbytes = source.copy(draft, progress=progress)
            changed = _patch_all(draft, path, work)
            found = version_digest(_table(Base(draft), work, "checking result"))
            if found != digest:
                raise StateMismatch(
                    f"{out}: expected digest {digest[:16]} of version {version}, the result has "
                    f"{found[:16]}; nothing was written. Run weightdelta verify --deep"
                )
    return Materialized(
        version, digest, start, len(path), changed, nbytes, source.names, source.left_out
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """What every stage needs."""

    layout: Layout
    reader: DeltaReader
    config: Config
    pool: Executor
    progress: Progress


# --- files ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Source:
    """The files of a base checkpoint: weights, and what else belongs to a checkpoint."""

    weights: tuple[Path, ...]
    others: tuple[tuple[Path, str], ...]
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, base: Path) -> "_Source":
        weights = tuple(sorted({place.file for place in Base(base).places.values()}))
        if base.is_file():
            return cls(weights, (), ())
        files = sorted(p for p in base.iterdir() if p.is_file() and not p.name.startswith("."))
        mine = {p.name for p in weights}
        others = [(p, p.name) for p in files if not _is_weights(p.name)]
        for folder in FOLDERS:
            others += [(p, f"{folder}/{p.name}") for p in sorted((base / folder).glob("*.jinja"))]
        left = tuple(p.name for p in files if _is_weights(p.name) and p.name not in mine)
        return cls(weights, tuple(others), left)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted([*(p.name for p in self.weights), *(n for _, n in self.others)]))

    def copy(self, draft: Path, *, progress: Progress) -> int:
        """Copy everything; returns the bytes of the weights."""
        for file, name in self.others:
            (draft / name).parent.mkdir(exist_ok=True)
            _copy(file, draft / name)
        total, done = sum(p.stat().st_size for p in self.weights), 0
        for file in self.weights:
            for size in _copy_blocks(file, draft / file.name):
                done += size
                progress("copying base", done, total)
        return done


def _is_weights(name: str) -> bool:
    """Whether a file holds weights, or is an index of files that do and are not copied."""
    if name.endswith(".index.json"):
        return name != INDEX
    return Path(name).suffix.lower() in WEIGHTS


def _copy_blocks(source: Path, target: Path) -> Iterator[int]:
    """Copy a file; yields the size of each block.

    Plain writes, no clone: later stores into a mapping must not be the first to ask the disk
    for space, because a mapping can only answer with a signal.
    """
    with source.open("rb") as i, target.open("xb") as o:
        while block := i.read(BLOCK):
            o.write(block)
            yield len(block)
        o.flush()
        os.fsync(o.fileno())


def _copy(source: Path, target: Path) -> None:
    for _ in _copy_blocks(source, target):
        pass


def _refuse_taken(out: Path) -> None:
    try:
        taken = out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir())))
    except OSError as e:
        raise InputError(f"{out}: expected the name of a new folder: {e.strerror or e}") from e
    if taken:
        raise InputError(f"{out}: expected a folder that does not exist yet, found one; move it")


@contextmanager
def _draft(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` that becomes ``out`` when the block ends well, and else nothing."""
    draft = out.absolute().parent / f".{out.absolute().name}.{secrets.token_hex(8)}.tmp"
    try:
        draft.mkdir(parents=True)
        try:
            yield draft
            _sync(draft)
            os.rename(draft, out)
            _sync(out.absolute().parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except WeightDeltaError:  # a store's errors are OSErrors too
        raise
    except OSError as e:
        raise StoreUnavailable(e.errno or 0, f"{out}: cannot be written: {e.strerror or e}") from e


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- what the weights are ---------------------------------------------------------------------


def _check_fits(base: Base, layout: Layout) -> None:
    for spec in layout.tensors:
        place = base.places.get(spec.name)
        if place is None or place.spec != spec:
            found = f"{place.spec.dtype} {place.spec.shape}" if place else "none"
            raise LayoutMismatch(
                f"base {base.path}: expected tensor {spec.name!r}, {spec.dtype} {spec.shape}, as "
                f"in the run's layout, found {found}; give the checkpoint that the run started from"
            )


def _table(base: Base, work: _Work, what: str) -> U64:
    """Digest of every tensor, read part by part."""
    layout, done = work.layout, 0
    table = np.zeros(len(layout.tensors), np.uint64)
    digests = work.pool.map(partial(_digest, base), layout.tensors)
    for i, (spec, value) in enumerate(zip(layout.tensors, digests, strict=True)):
        table[i] = value
        done += spec.nbytes
        work.progress(what, done, layout.nbytes)
    return table


def _digest(base: Base, spec: TensorSpec) -> int:
    values, total = base.elements(spec.name), 0
    for skip in range(0, spec.numel, PART):
        total += ops().digest(
            values[skip : skip + PART], key=seed(spec.name), skip=skip,
            run=spec.numel, stride=spec.numel,
        )  # fmt: skip
    return total & MASK


def _recognize(log: Log, base: Base, work: _Work) -> int:
    """Which version a checkpoint holds."""
    table = _table(base, work, "checking base")
    digest = version_digest(table)
    for version in range(log.newest, -1, -1):
        if log.digest(version) == digest:
            return version
    first = work.reader.table(log.digest(0), layout=work.layout)
    differ = [work.layout.tensors[i].name for i in np.flatnonzero(first != table).tolist()]
    raise StateMismatch(
        f"base {base.path}: expected a version of {log.store.url} (0 to {log.newest}), found "
        f"none; {len(differ)} of {len(table)} tensors differ from the run's base, first "
        f"{differ[0]!r}. Give the checkpoint that the run started from"
    )


# --- patching ---------------------------------------------------------------------------------


class _Target:
    """Writable mappings of a draft's tensors. Frames share no element, so threads may share it."""

    def __init__(self, draft: Path) -> None:
        self._places = Base(draft).places
        files = {place.file for place in self._places.values()}
        self._maps = {file: np.memmap(file, np.uint8, "r+") for file in files}

    def elements(self, name: str) -> Elements:
        """A tensor's elements, perhaps unaligned: numpy copes, compiled kernels would not."""
        place = self._places[name]
        part = self._maps[place.file][place.start : place.start + place.spec.nbytes]
        elements: Elements = part.view(np.ndarray).view(UINTS[place.spec.width])
        return elements

    def flush(self) -> None:
        """Onto the disk."""
        for mapping in self._maps.values():
            mapping.flush()


def _patch_all(draft: Path, path: Sequence[Hop], work: _Work) -> int:
    """Take the draft along a path; returns how many elements were stored."""
    if not path:
        return 0
    target, changed = _Target(draft), 0
    ahead = work.config.store.threads
    with threads.pool(ahead, "weightdelta-fetch") as fetchers:
        for n, hop in enumerate(path, 1):
            delta = work.reader.delta(hop.entry, layout=work.layout)
            patch, done = partial(_patch, target, delta, hop.forward), 0
            every = range(len(delta.plan))
            for batch in batches(work.reader, delta, every, pool=fetchers, ahead=ahead):
                changed += sum(work.pool.map(patch, batch))
                done += sum(len(data) for _, data in batch)
                work.progress(f"delta {n} of {len(path)}", done, hop.entry.payload_bytes)
    target.flush()
    return changed


def _patch(target: _Target, delta: Delta, forward: bool, item: tuple[int, memoryview]) -> int:
    """Store one frame's changes; returns how many there were."""
    frame, data = item
    xor, total, changed = delta.entry.values == "xor", 0, 0
    for segment, index, values in canonical(delta, frame, data):
        name = delta.layout.tensors[segment.tensor].name
        elements = target.elements(name)
        if not (xor or forward):
            values = (~values + values.dtype.type(1)).astype(values.dtype)
        places = np.arange(len(index), dtype=np.uint64)
        _, new, change = ops().dry_run(
            elements[index], index, values, seed=seed(name), offsets=places, xor=xor
        )
        elements[index] = new
        total += change
        changed += len(index)
    expected = int(delta.index.digest_change[frame])
    if (total if forward else -total) & MASK != expected:
        raise StateMismatch(
            f"{delta.where(frame)}: expected digest change {expected:#018x}, found another; "
            "nothing was written. Run weightdelta verify --deep"
        )
    return changed
