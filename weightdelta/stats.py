"""What happened: plain records of one publication, one preparation, one apply."""

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Base of the records; every time is in seconds, every size in bytes."""

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON-ready values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureCosts(Stats):
    """What one rank's capture of weights in device memory took.

    Attributes:
        windows: Windows that were compared.
        down_bytes: Old bytes sent to the device.
        up_bytes: Planes and digests fetched from it.
        device_bytes: Device memory used beside the weights.
        pinned_bytes: Pinned host memory, the baseline included.
        upload_s: Time that copies to the device ran.
        compare_s: Time that gathering and comparing ran on the device.
    """

    windows: int = 0
    down_bytes: int = 0
    up_bytes: int = 0
    device_bytes: int = 0
    pinned_bytes: int = 0
    upload_s: float = 0.0
    compare_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishStats(Stats):
    """One publication.

    Attributes:
        committed: False when it was skipped because another one was still running; then
            ``version`` is the newest committed version and the sizes are 0.
        version: Version that the publication created.
        step: Training step that the caller named, if any.
        changed: Elements that differ from the parent version.
        elements: Elements of the whole model.
        raw_bytes: Bytes of the whole model.
        payload_bytes: Bytes of all encoded frames.
        index_bytes: Bytes of the index.
        bound_bytes: Zero-order entropy of the delta's XOR mask, when ``measure_bound`` is set.
        capture_s: Longest time a rank's capture held up its caller.
        encode_s: Longest time a rank spent on encoding after the capture.
        upload_s: Longest time from a rank's encoded payload to its receipt.
        commit_s: Time from the last receipt to the committed log entry.
        down_bytes: Old bytes that all ranks sent to their devices.
        up_bytes: Planes that all ranks fetched from their devices.
        device_bytes: Most device memory that a rank used beside its weights.
        pinned_bytes: Most host memory that a rank had pinned.
    """

    committed: bool
    version: int
    step: int | None
    changed: int = 0
    elements: int = 0
    raw_bytes: int = 0
    payload_bytes: int = 0
    index_bytes: int = 0
    bound_bytes: int | None = None
    capture_s: float = 0.0
    encode_s: float = 0.0
    upload_s: float = 0.0
    commit_s: float = 0.0
    down_bytes: int = 0
    up_bytes: int = 0
    device_bytes: int = 0
    pinned_bytes: int = 0

    @property
    def changed_fraction(self) -> float:
        """Share of the model's elements that changed."""
        return self.changed / self.elements if self.elements else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareStats(Stats):
    """One preparation: the path taken and what was fetched and staged.

    Attributes:
        fetch_s: Time until the last frame was there; decoding begins with the first.
        decode_s: What decoding, and the dry run of what lies in host memory, took beside that.
        stage_s: Time for handing planes to devices and waiting for their dry run.
        device_bytes: Device memory that staged values wait in, and slots for raw blocks.
        pinned_bytes: Pinned host memory that staged values wait in, to be streamed in the pause.
        raw_frames: Frames that wait as raw blocks (``device.blocks``); all others wait as lists.
        decoder: What decodes raw blocks in the pause: a decompression engine, multiprocessors, or
            the CPU, and why not an engine; empty where none wait.
    """

    from_version: int
    version: int
    hops: int
    fetched_bytes: int
    changed: int
    fetch_s: float
    decode_s: float
    prepare_s: float
    stage_s: float = 0.0
    device_bytes: int = 0
    pinned_bytes: int = 0
    raw_frames: int = 0
    decoder: str = ""


Verdict = Literal["verified", "partial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyStats(Stats):
    """One apply or rollback.

    Attributes:
        apply_s: Time spent storing new values.
        pause_s: Time for which the engine stood still, the wait for its next token boundary
            excluded; equal to ``apply_s`` for a model that has no engine.
        integrity: ``verified`` when the resulting state's digest equals the version's,
            ``partial`` when this receiver holds only a part of the model.
    """

    from_version: int
    version: int
    changed: int
    apply_s: float
    pause_s: float
    integrity: Verdict
