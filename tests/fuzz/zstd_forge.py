"""Zstd frames written by hand (RFC 8878), so that headers can lie."""

from fuzz.mutate import Rng, edge
from weightdelta.codecs import zstd

MAGIC = b"\x28\xb5\x2f\xfd"
SKIPPABLE = b"\x50\x2a\x4d\x18"


def header(
    *,
    size: int | None,
    size_bytes: int,
    single: bool,
    window: int = 0,
    checksum: bool = True,
    dictionary: int = 0,
    dictionary_bytes: int = 0,
    reserved: int = 0,
) -> bytes:
    """A frame header; ``size_bytes`` is 0, 1, 2, 4 or 8 and ``dictionary_bytes`` 0, 1, 2 or 4."""
    flag = {0: 0, 1: 0, 2: 1, 4: 2, 8: 3}[size_bytes] << 6
    flag |= single << 5 | reserved << 3 | checksum << 2 | {0: 0, 1: 1, 2: 2, 4: 3}[dictionary_bytes]
    stored = ((size or 0) - (256 if size_bytes == 2 else 0)) % (1 << 8 * max(size_bytes, 1))
    return (
        MAGIC
        + bytes([flag])
        + (b"" if single else bytes([window]))
        + (dictionary % (1 << 8 * dictionary_bytes)).to_bytes(dictionary_bytes, "little")
        + stored.to_bytes(max(size_bytes, 1), "little")[: size_bytes or int(single)]
    )


def block(content: bytes, *, kind: int, last: bool, size: int | None = None) -> bytes:
    """A block of a kind: 0 raw, 1 one byte repeated, 2 compressed, 3 reserved."""
    count = len(content) if size is None else size
    return ((count << 3 | kind << 1 | last) % (1 << 24)).to_bytes(3, "little") + content


def forge(rng: Rng, size: int) -> tuple[int, bytes]:
    """The size that a reader expects, and a frame that may not be what it says."""
    expected = rng.choice((size, 0, 1, 4096, edge(rng, 18)))
    says = rng.choice((expected, expected, expected, expected + 1, edge(rng), None))
    single = rng.random() < 0.5
    frame = header(
        size=says,
        size_bytes=rng.choice((8, 8, 4, 2, 1 if single else 0))
        if says is not None
        else int(single),
        single=single,
        window=rng.choice((0, 64, 88, 255, rng.randrange(256))),
        checksum=rng.random() < 0.8,
        dictionary=edge(rng, 32),
        dictionary_bytes=rng.choice((0, 0, 0, 1, 2, 4)),
        reserved=rng.choice((0, 0, 0, 1, 2)),
    )
    return expected, rng.choice((_repeats, _raw, _compressed, _several))(rng, frame, expected)


def _repeats(rng: Rng, frame: bytes, size: int) -> bytes:
    """A bomb: each block of four bytes stands for up to 128 KiB."""
    full, rest = divmod(size, 1 << 17)
    count = full + rng.choice((0, 0, 1, 40))
    blocks = [block(b"\0", kind=1, last=False, size=1 << 17) for _ in range(count)]
    blocks.append(block(b"\0", kind=1, last=True, size=rng.choice((rest, edge(rng, 21)))))
    return frame + b"".join(blocks) + rng.choice((b"", bytes(4), _checksum(bytes(size))))


def _raw(rng: Rng, frame: bytes, size: int) -> bytes:
    content = rng.randbytes(min(size, 4096))
    kind = rng.choice((0, 0, 2, 3))
    return frame + block(content, kind=kind, last=rng.random() < 0.9) + _checksum(content)


def _compressed(rng: Rng, frame: bytes, size: int) -> bytes:
    """Blocks of a true frame behind the forged header."""
    true = zstd.compress(bytes(size) if rng.random() < 0.5 else b"ab" * (size // 2))
    return frame + true[rng.choice((6, 7, 9, 13)) :]


def _several(rng: Rng, frame: bytes, size: int) -> bytes:
    """More than one frame, or a skippable one before or behind."""
    true = zstd.compress(bytes(size))
    skip = SKIPPABLE + edge(rng, 32).to_bytes(4, "little") + rng.randbytes(rng.randrange(8))
    return rng.choice((true + true, true + skip, skip + true, true + frame, true + b"\0", skip))


def _checksum(content: bytes) -> bytes:
    return zstd.compress(content)[-4:]
