"""Everything that weightdelta raises, grouped by what the caller should do about it.

    WeightDeltaError
    |-- RetryError          the same call may succeed later; nothing was lost
    |   |-- StoreUnavailable     the store failed, is full or is read-only   (also OSError)
    |   |-- StoreTimeout         an operation outlasted its bound            (also TimeoutError)
    |   |-- NotYet               that version or ref is not published yet    (also LookupError)
    |   |-- Busy                 another publication or preparation is running
    |   |-- CaptureDropped       the optimizer could not wait any longer for the capture
    |   |-- CaptureSkew          ranks captured different training steps
    |   |-- PublicationLost      a rank, publisher or coordinator went away; the next one covers
    |   |                        the span
    |   |-- CommitInDoubt        a version entry was sent and its slot is not known yet
    |   `-- DeviceMemory         a device or pinned memory has no room left
    |-- ResyncError         these weights or objects cannot be used; prepare, attach or reseed
    |   |-- DamagedObject        an object's bytes are not what its name or hash promises
    |   |-- MissingObject        a named object is not in the store          (also LookupError)
    |   |-- StateMismatch        weights differ from the version they should be
    |   |-- NoPath               no chain of deltas leads to the version     (also LookupError)
    |   |-- Dirty                a failed apply left the weights in no known version
    |   `-- DeviceLost           a device failed; the weights in it can no longer be told
    |-- StopError           stop; a person has to look
    |   |-- Fenced               a newer writer owns this run
    |   |-- UnsupportedFormat    written by a newer or foreign format        (also ValueError)
    |   |-- UnsafeStore          the store does not honour create-once
    |   `-- ReplicaDivergence    ranks hold different bytes for the same box
    `-- InputError          fix the input                                    (also ValueError)
        |-- LayoutMismatch       names, shapes or dtypes differ from base
        |-- OwnershipError       shards leave a gap or overlap
        |-- UnsupportedSharding  a placement this version cannot map
        |-- ConfigError          a setting is wrong
        |-- UnfencedWriter       weights may be written outside any torch optimizer
        `-- NotPrepared          apply() before prepare()

Each concrete class has a stable ``kind``: match on it, not on the message.
"""

from typing import ClassVar


class WeightDeltaError(Exception):
    """Base of every error that weightdelta raises on purpose."""

    kind: ClassVar[str] = "error"


class RetryError(WeightDeltaError):
    """The same call may succeed later; no state was lost."""

    kind = "retry"


class StoreUnavailable(RetryError, OSError):
    """The store refused or failed an operation: no space, read-only, connection refused."""

    kind = "store-unavailable"


class StoreTimeout(RetryError, TimeoutError):
    """A store operation did not end within its bound; it may still take effect."""

    kind = "store-timeout"


class NotYet(RetryError, LookupError):
    """The version or ref asked for has not been published."""

    kind = "not-yet"


class Busy(RetryError):
    """A publication or preparation is already running."""

    kind = "busy"


class CaptureDropped(RetryError):
    """The next optimizer step had waited its bound, so the running capture was given up."""

    kind = "capture-dropped"


class CaptureSkew(RetryError):
    """Ranks captured different training steps; the mixture was refused."""

    kind = "capture-skew"


class PublicationLost(RetryError):
    """A participant went away mid-publication; the next publication covers the span."""

    kind = "publication-lost"


class CommitInDoubt(RetryError):
    """A version entry has been sent and it is not yet known whether its slot is ours."""

    kind = "commit-in-doubt"


class DeviceMemory(RetryError):
    """Device memory, or pinned host memory, has no room for even the smallest window."""

    kind = "device-memory"


class ResyncError(WeightDeltaError):
    """These objects or weights cannot be used as they are; prepare, attach or reseed."""

    kind = "resync"


class DamagedObject(ResyncError):
    """An object's bytes differ from what its name or recorded hash promises."""

    kind = "damaged-object"


class MissingObject(ResyncError, LookupError):
    """An object that a record names is not in the store."""

    kind = "missing-object"


class StateMismatch(ResyncError):
    """Weights are not bit for bit the version they should be."""

    kind = "state-mismatch"


class NoPath(ResyncError, LookupError):
    """No chain of deltas leads from the receiver's version to the one asked for."""

    kind = "no-path"


class Dirty(ResyncError):
    """An apply failed half way; the weights belong to no version until reseeded."""

    kind = "dirty"


class DeviceLost(ResyncError):
    """A launch or copy on a device failed; what its memory holds is unknown until reseeded."""

    kind = "device-lost"


class StopError(WeightDeltaError):
    """Going on could do harm; a person has to look."""

    kind = "stop"


class Fenced(StopError):
    """A writer with a newer epoch has taken over this run."""

    kind = "fenced"


class UnsupportedFormat(StopError, ValueError):
    """The object was written by a newer or foreign format version."""

    kind = "unsupported-format"


class UnsafeStore(StopError):
    """The store lets an existing object be created again, so it cannot fence writers."""

    kind = "unsafe-store"


class ReplicaDivergence(StopError):
    """Ranks that should hold the same bytes of a tensor do not."""

    kind = "replica-divergence"


class InputError(WeightDeltaError, ValueError):
    """The caller's input is wrong; nothing was changed."""

    kind = "input"


class LayoutMismatch(InputError):
    """A tensor's name, shape or dtype differs from base, or a tensor is missing or extra."""

    kind = "layout-mismatch"


class OwnershipError(InputError):
    """The ranks' shards leave part of a tensor uncovered or cover it with clashing boxes."""

    kind = "ownership"


class UnsupportedSharding(InputError):
    """A placement that weightdelta cannot map to boxes of the global tensor."""

    kind = "unsupported-sharding"


class ConfigError(InputError):
    """A setting is unknown or out of range."""

    kind = "config"


class UnfencedWriter(InputError):
    """Parameters may be written by something that the step fence cannot see."""

    kind = "unfenced-writer"


class NotPrepared(InputError):
    """``apply()`` was called with nothing prepared."""

    kind = "not-prepared"
