"""Zstd as the outer stage: one frame, level 1, with content size and checksum.

Decoding never trusts a frame about its own size: the caller knows the size, and a frame that
declares another is refused before anything is allocated.
"""

import threading
from typing import Final

import zstandard

from weightdelta.errors import DamagedObject

#: Bytes of any kind; numpy arrays go in as ``array.data``.
Data = bytes | bytearray | memoryview

LEVEL: Final = 1
#: Shortest match the compressor looks for: level 1's own value for large inputs, used for small
#: ones too. Planes hold hardly any repeats, so shorter matches are flukes that cost 1 to 7 %.
MIN_MATCH: Final = 7
#: Largest window that a frame may ask for, unless its content itself is larger.
MAX_WINDOW: Final = 8 << 20

_MAGIC: Final = b"\x28\xb5\x2f\xfd"


#: What every compressor is set to.
PARAMETERS: Final = zstandard.ZstdCompressionParameters.from_level(
    LEVEL, min_match=MIN_MATCH, write_checksum=True, write_content_size=True
)


class _Contexts(threading.local):
    """One compressor and one decompressor a thread: they must not be shared."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def bound(size: int) -> int:
    """Most bytes that a frame of ``size`` bytes of content may take."""
    return size + (size >> 8) + 64


def compress(data: Data) -> bytes:
    """One Zstd frame of ``data``. Releases the interpreter's lock."""
    return _contexts.compressor.compress(data)


def _damaged(where: str, problem: str) -> DamagedObject:
    return DamagedObject(f"{where}: {problem}; fetch the object again, or write it anew")


def _check_header(data: Data, *, size: int, where: str) -> None:
    head = bytes(memoryview(data)[:18])
    if not head.startswith(_MAGIC):
        raise _damaged(where, f"expected a Zstd frame, found bytes {head[:4].hex() or 'none'}")
    try:
        frame = zstandard.get_frame_parameters(head)
    except zstandard.ZstdError as error:
        raise _damaged(where, f"unreadable Zstd header ({error})") from error
    if frame.content_size != size:
        found = "none" if frame.content_size >= 1 << 63 else str(frame.content_size)
        raise _damaged(where, f"expected a content size of {size} bytes, found {found}")
    if frame.window_size > max(size, MAX_WINDOW):
        raise _damaged(where, f"window of {frame.window_size} bytes, at most {MAX_WINDOW} allowed")
    if not frame.has_checksum or frame.dict_id:
        raise _damaged(where, "expected a checksum and no dictionary")


def decompress(data: Data, *, size: int, where: str) -> bytes:
    """The content of one Zstd frame. Releases the interpreter's lock.

    Args:
        data: The frame, and nothing after it.
        size: Bytes of content; the frame must declare exactly this.
        where: What is being read, for the message.

    Raises:
        DamagedObject: Not one such frame. A wrong size is found before memory is taken.
    """
    _check_header(data, size=size, where=where)
    if not size and bytes(data) != compress(b""):  # the library does not look past this header
        raise _damaged(where, "expected an empty frame")
    try:
        content = _contexts.decompressor.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _damaged(where, f"damaged Zstd frame ({error})") from error
    if len(content) != size:
        raise _damaged(where, f"expected {size} bytes of content, found {len(content)}")
    return content
