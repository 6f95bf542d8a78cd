"""encode: planes of changed frames to compressed, hashed frames; their entropy bound."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from weightdelta.baseline import Baseline, EncodedFrame
from weightdelta.codecs.batch import encode_frames
from weightdelta.codecs.names import DEFAULT, Codec, Values
from weightdelta.codecs.registry import decode_frame, encode_frame
from weightdelta.config import Config
from weightdelta.digest import U64
from weightdelta.hashing import hash_each
from weightdelta.index import HASH_BYTES
from weightdelta.kernels import ops
from weightdelta.kernels.planes import UINTS, Chunks

if TYPE_CHECKING:  # a coordinator needs no torch
    from weightdelta.capture import FramePlanes

#: Distinct XOR values and how often each occurs, by element width in bytes.
Histogram = Mapping[int, tuple[U64, npt.NDArray[np.int64]]]


#: Frames and bytes of values that one task encodes at most, or one frame. Those of a window that a
#: device hands over may be one task, for others follow while it runs.
GROUP_FRAMES: Final = 8
WINDOW_FRAMES: Final = 32
GROUP_BYTES: Final = 1 << 20
#: One chunk of a segment of eight elements.
_FEW: Final = Chunks(
    start=np.array([0], np.int64),
    length=np.array([8], np.int64),
    key=np.array([0], np.uint64),
    skip=np.array([0], np.int64),
    run=np.array([8], np.int64),
    stride=np.array([8], np.int64),
)


class Encoding:
    """The encoding of one capture's frames, a few a task, from when they are handed in.

    A frame's codec is what ``config`` says of its tensors, which all have the same.
    """

    def __init__(self, *, baseline: Baseline, pool: Executor, config: Config) -> None:
        self._baseline = baseline
        self._pool = pool
        self._config = config
        self._jobs: dict[int, Future[EncodedFrame]] = {}

    def add(self, items: Sequence["FramePlanes"]) -> None:
        """Start on the frames of a window; those handed in before are left out."""
        self._add(items, WINDOW_FRAMES)

    def _add(self, items: Sequence["FramePlanes"], most: int) -> None:
        left = [item for item in items if item.frame not in self._jobs]
        for group in _groups(left, self._baseline, most=most):
            jobs = [Future[EncodedFrame]() for _ in group]
            self._jobs.update((item.frame, job) for item, job in zip(group, jobs, strict=True))
            task = self._pool.submit(_settle, jobs, partial(self._encode, group))
            task.add_done_callback(partial(_drop, jobs))

    def _encode(self, group: Sequence["FramePlanes"]) -> list[EncodedFrame]:
        return _encode(group, self._baseline, self._config)

    def coming(self, planes: Sequence["FramePlanes"]) -> "list[Future[EncodedFrame]]":
        """The encoded frames of ``planes``, in their order, as they become ready."""
        self._add(planes, GROUP_FRAMES)
        return [self._jobs[item.frame] for item in planes]

    def cancel(self) -> None:
        """Leave out what has not begun."""
        for job in self._jobs.values():
            job.cancel()


def encode(
    planes: Sequence["FramePlanes"], *, baseline: Baseline, pool: Executor, config: Config
) -> list[EncodedFrame]:
    """Compress and hash every frame, in frame order."""
    encoding = Encoding(baseline=baseline, pool=pool, config=config)
    return [job.result() for job in encoding.coming(planes)]


def rehearse(baseline: Baseline, *, config: Config) -> None:
    """Run a publication's kernels on a few elements, so that they are compiled ahead.

    Else the first publication would compile them, and the next one find it still under way.
    """
    names = [tensor.name for tensor in baseline.layout.tensors]
    codecs = {config.codec_for(name) for name in names}
    for width in {tensor.width for tensor in baseline.layout.tensors}:
        _rehearse(width, codecs, baseline.values)


def _rehearse(width: int, codecs: Iterable[Codec], values: Values) -> None:
    xor = values == "xor"
    old = np.ones(int(_FEW.length[0]), UINTS[width])
    # As gaps, all planes of zeros left out; then as a bitmap, with a value too large for a nibble.
    for changed in ({3: 0}, {3: 0, 5: 100}):
        new = old.copy()
        new[list(changed)] = list(changed.values())
        planes, _ = ops().encode(old, new, chunks=_FEW, xor=xor)
        ops().expand(planes, chunks=_FEW)
        hash_each(
            [data for data, _ in encode_frames([planes] * 2, width=width, values=values) or ()]
        )
        for codec in codecs:
            data, sizes = encode_frame(planes, codec=codec, chunks=_FEW, width=width, values=values)
            found = decode_frame(
                data, sizes, codec=codec, chunks=_FEW, width=width, values=values, where="rehearsal"
            )
            ops().decode_into(old.copy(), found, chunks=_FEW, xor=xor)


def _groups(
    items: Sequence["FramePlanes"], baseline: Baseline, *, most: int
) -> "list[list[FramePlanes]]":
    """Runs of frames of one width that one task encodes, small enough to share out the work."""
    groups: list[list[FramePlanes]] = []
    width, size = baseline.plan.width, 0
    for item in items:
        size += item.planes.values.nbytes
        last = groups[-1] if groups else []
        full = len(last) == most or size > GROUP_BYTES
        if not last or full or width[last[0].frame] != width[item.frame]:
            groups.append([])
            size = item.planes.values.nbytes
        groups[-1].append(item)
    return groups


def _drop(jobs: "Sequence[Future[EncodedFrame]]", task: "Future[None]") -> None:
    """Leave nobody waiting for frames whose task never ran: the pool was shut down."""
    if task.cancelled():
        for job in jobs:
            if job.cancel():
                job.set_running_or_notify_cancel()


def _settle(jobs: "Sequence[Future[EncodedFrame]]", work: Callable[[], list[EncodedFrame]]) -> None:
    """Run a task that settles several futures, unless they have all been cancelled."""
    wanted = [job.set_running_or_notify_cancel() for job in jobs]
    if not any(wanted):
        return
    try:
        found = work()
    except BaseException as e:  # noqa: BLE001 (whoever waits for the frames is told)
        for job, kept in zip(jobs, wanted, strict=True):
            if kept:
                job.set_exception(e)
        return
    for job, kept, frame in zip(jobs, wanted, found, strict=True):
        if kept:
            job.set_result(frame)


def _encode(
    group: Sequence["FramePlanes"], baseline: Baseline, config: Config
) -> list[EncodedFrame]:
    codecs = [_codec_of(item, baseline, config) for item in group]
    width = int(baseline.plan.width[group[0].frame])
    encoded = None
    if len(group) > 1 and set(codecs) == {DEFAULT}:
        encoded = encode_frames([i.planes for i in group], width=width, values=baseline.values)
    if encoded is None:
        encoded = [
            encode_frame(
                item.planes,
                codec=codec,
                chunks=baseline.chunks(item.frame),
                width=width,
                values=baseline.values,
            )
            for item, codec in zip(group, codecs, strict=True)
        ]
    digests = hash_each([data for data, _ in encoded])
    return [
        EncodedFrame(
            frame=item.frame,
            codec=codec,
            data=data,
            sizes=sizes,
            digest=bytes(digest[:HASH_BYTES]),
            digest_change=item.digest_change,
            changed=item.planes.changed,
        )
        for item, codec, (data, sizes), digest in zip(group, codecs, encoded, digests, strict=True)
    ]


def _codec_of(item: "FramePlanes", baseline: Baseline, config: Config) -> Codec:
    segment = int(baseline.plan.bounds[item.frame])
    return config.codec_for(baseline.layout.tensors[int(baseline.plan.tensor[segment])].name)


def tensor_digests(planes: Sequence["FramePlanes"], *, baseline: Baseline) -> U64:
    """Each tensor's digest change over the owned frames: uint64, one per tensor."""
    table = np.zeros(len(baseline.layout.tensors), np.uint64)
    if planes:
        tensor = np.concatenate([baseline.tensors(item.frame) for item in planes])
        np.add.at(table, tensor, np.concatenate([item.chunk_digest for item in planes]))
    return table


def histogram(planes: Sequence["FramePlanes"], *, baseline: Baseline) -> Histogram:
    """How often each XOR value occurs, while the baseline still holds the old bytes."""
    found: dict[int, list[U64]] = {}
    for item in planes:
        if not item.planes.changed:
            continue
        old = baseline.frames[item.frame]
        values = item.planes.values
        if baseline.values == "diff":
            at = ops().expand(item.planes, chunks=baseline.chunks(item.frame))
            values = old[at] ^ (old[at] + values)
        found.setdefault(old.itemsize, []).append(values.astype(np.uint64))
    counted = {w: np.unique(np.concatenate(v), return_counts=True) for w, v in found.items()}
    return {w: (values, counts.astype(np.int64)) for w, (values, counts) in counted.items()}


def bound_bytes(histograms: Sequence[Histogram], *, elements: Mapping[int, int]) -> int:
    """Zero-order entropy of a delta's XOR mask, in bytes.

    The bound is ``N * h(k / N)`` bits for the positions of ``k`` changes among ``N`` elements and
    ``k * H(values)`` bits for their XOR values (Shannon), summed over the element widths.

    Args:
        histograms: One per rank.
        elements: Elements of the whole model by width.
    """
    bits = 0.0
    for width, total in elements.items():
        parts = [h[width] for h in histograms if width in h]
        if not parts:
            continue
        values = np.concatenate([p[0] for p in parts])
        weights = np.concatenate([p[1] for p in parts]).astype(np.float64)
        counts = np.bincount(np.unique(values, return_inverse=True)[1], weights)
        changed = counts.sum()
        bits += _entropy(np.array([changed, total - changed], np.float64))
        bits += _entropy(counts.astype(np.float64))
    return round(bits / 8)


def _entropy(counts: npt.NDArray[np.float64]) -> float:
    """Bits to tell which of the classes each item belongs to."""
    used = counts[counts > 0]
    total = used.sum()
    return float((used * np.log2(total / used)).sum())
