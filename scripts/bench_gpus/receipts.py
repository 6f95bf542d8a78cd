"""What each rank tells the coordinator about its part, noted on the rank itself.

A version's statistics hold the slowest rank's times only. The function that uploads a rank's
payload returns its receipt; in a trainer's process it is wrapped, so that a copy stays here.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, Final

import ray_actors.trainer
from weightdelta.publish import Receipt

#: The module whose ``upload`` the sessions of a process call.
_CALLER: Final[Any] = ray_actors.trainer
_NOTED: list[dict[str, Any]] = []


def watch(actor: Any) -> None:  # noqa: ARG001 (passed by __ray_call__)
    """Note receipts from now on; once for each process."""
    upload: Callable[..., Receipt] = _CALLER.upload
    if hasattr(upload, "__wrapped__"):
        return

    @functools.wraps(upload)
    def noting(*args: Any, **options: Any) -> Receipt:
        receipt = upload(*args, **options)
        _NOTED.append(_as_dict(receipt))
        return receipt

    _CALLER.upload = noting


def noted(actor: Any) -> list[dict[str, Any]]:  # noqa: ARG001 (passed by __ray_call__)
    """All receipts since the last call, oldest first."""
    found = list(_NOTED)
    _NOTED.clear()
    return found


def _as_dict(receipt: Receipt) -> dict[str, Any]:
    return {
        "write_id": receipt.write_id,
        "rank": receipt.rank,
        "capture_s": receipt.capture_s,
        "encode_s": receipt.encode_s,
        "hand_over_s": receipt.upload_s,
        "handed_over": time.time(),
        "payload_bytes": receipt.payload_bytes,
        "changed": int(receipt.changed.sum()),
        "costs": receipt.costs.as_dict(),
    }
