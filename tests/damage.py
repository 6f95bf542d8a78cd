"""Real small runs, every kind of damage to their objects, and what a fresh sampler makes of it."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from small_runs import SmallRun, all_bits, some_weights

from weightdelta.codecs.names import IDS, Codec
from weightdelta.config import Config
from weightdelta.errors import WeightDeltaError
from weightdelta.receiver import Receiver
from weightdelta.store import Store

SETTINGS = Config.of({"threads": 1, "store": {"threads": 1, "fsync": False}})


def kind_of(name: str) -> str:
    """What an object is: log, head, layout, plan, table, index or data."""
    if name.startswith("data/"):
        return "index" if name.endswith("/index") else "data"
    return name.split("/")[0]


@dataclass(frozen=True)
class Damage:
    """What objects hold instead; None for one that is gone."""

    how: str
    changes: Mapping[str, bytes | None]

    @classmethod
    def to(cls, name: str, how: str, data: bytes | None) -> "Damage":
        """Damage to one object."""
        return cls(f"{name}: {how}", {name: data})

    @property
    def name(self) -> str:
        """The first object."""
        return next(iter(self.changes))

    @property
    def data(self) -> bytes | None:
        """What it holds."""
        return self.changes[self.name]

    def __str__(self) -> str:
        return self.how


class Repository:
    """A run on local disk, and every object's bytes.

    Args:
        folder: Where to put it; a new folder.
        seed: For weights and steps.
        codecs: The codec of each version but the last, which has that of the one before; ranks
            and frames change with it.
    """

    def __init__(self, folder: Path, seed: int, codecs: Sequence[Codec] = ("sparse+zstd",)) -> None:
        self.root = folder / "store"
        self.root.mkdir(parents=True)
        self.store = Store(self.root, timeout_s=None, fsync=False)
        self.run = SmallRun(folder, store=self.store, weights=some_weights(seed), max_bytes=64)
        for step, codec in enumerate(codecs):
            if step or codec != "sparse+zstd":
                values = "diff" if codec == "sparse+zstd" else "xor"
                config = Config.of({"codec": codec, "values": values})
                self.run.open(config=config, ranks=1 + step % 3, max_bytes=64 << step)
            self.run.step(seed + step)
        self.run.writer.tag("eval")
        self.run.step(seed + len(codecs) + 1)
        self.run.close()
        self.objects = {name: (self.root / name).read_bytes() for name in self.store.names("")}
        self.kinds: dict[str, list[str]] = {}
        for name in sorted(self.objects):
            self.kinds.setdefault(kind_of(name), []).append(name)

    def put(self, name: str, data: bytes | None) -> None:
        """Replace one object."""
        if data is None:
            (self.root / name).unlink()
        else:
            (self.root / name).write_bytes(data)

    def suffer(self, damage: Damage) -> tuple[str, int]:
        """What becomes of a fresh sampler under a damage; all is whole again afterwards."""
        for name, data in damage.changes.items():
            self.put(name, data)
        try:
            return follow(self)
        finally:
            for name in damage.changes:
                self.put(name, self.objects[name])


ALL_CODECS: tuple[Codec, ...] = tuple(IDS)


# --- every damage of a kind -------------------------------------------------------------------


def flips(name: str, data: bytes) -> Iterator[Damage]:
    """One bit of every byte."""
    for at, byte in enumerate(data):
        flipped = data[:at] + bytes([byte ^ 1 << at % 8]) + data[at + 1 :]
        yield Damage.to(name, f"byte {at} of {len(data)} flipped", flipped)


def lengths(name: str, data: bytes) -> Iterator[Damage]:
    """Gone, cut to every length, extended."""
    yield Damage.to(name, "missing", None)
    for size in range(len(data)):
        yield Damage.to(name, f"cut to {size} of {len(data)}", data[:size])
    for extra in (b"\0", b"\n", data):
        yield Damage.to(name, f"extended by {len(extra)}", data + extra)


def swaps(name: str, data: bytes, others: Mapping[str, bytes], whose: str) -> Iterator[Damage]:
    """The bytes of every other object of its kind."""
    for other, content in others.items():
        if kind_of(other) == kind_of(name) and content != data:
            yield Damage.to(name, f"has the bytes of {whose} {other}", content)


# --- damage at random -------------------------------------------------------------------------


def draw(rng: random.Random, one: Repository, other: Repository) -> Damage:
    """Some damage to ``one``, perhaps with objects of ``other``."""
    while True:
        name = rng.choice(one.kinds[rng.choice(sorted(one.kinds))])
        made = rng.choice(_HARMS)(rng, name, one, other)
        if any(data != one.objects[name] for name, data in made.changes.items()):
            return made


def _flip(rng: random.Random, name: str, one: Repository, _: Repository) -> Damage:
    data = bytearray(one.objects[name])
    places = [rng.randrange(8 * len(data)) for _ in range(rng.choice((1, 1, 1, 2, 5)))]
    for bit in places:
        data[bit // 8] ^= 1 << bit % 8
    return Damage.to(name, f"bits {places} flipped", bytes(data))


def _overwrite(rng: random.Random, name: str, one: Repository, _: Repository) -> Damage:
    data = one.objects[name]
    low = rng.randrange(len(data))
    size = rng.choice((1, 4, 16, 512))
    fill = rng.choice((bytes(size), b"\xff" * size, rng.randbytes(size)))
    return Damage.to(name, f"{size} bytes at {low} overwritten",
                     (data[:low] + fill + data[low + size :])[: len(data)])  # fmt: skip


def _cut(rng: random.Random, name: str, one: Repository, _: Repository) -> Damage:
    data = one.objects[name]
    size = rng.randrange(len(data))
    return Damage.to(name, f"cut to {size} of {len(data)}", data[:size])


def _grow(rng: random.Random, name: str, one: Repository, _: Repository) -> Damage:
    data = one.objects[name]
    extra = rng.choice((b"\0", b"\n", data, rng.randbytes(rng.randrange(1, 64))))
    return Damage.to(name, f"extended by {len(extra)}", data + extra)


def _shift(rng: random.Random, name: str, one: Repository, _: Repository) -> Damage:
    data = one.objects[name]
    at = rng.randrange(len(data))
    shifted = data[:at] + rng.choice((b"\0", b"", data[at : at + 2] * 2)) + data[at + 1 :]
    return Damage.to(name, f"shifted at {at}", shifted)


def _missing(_r: random.Random, name: str, _one: Repository, _: Repository) -> Damage:
    return Damage.to(name, "missing", None)


def _stale(rng: random.Random, name: str, one: Repository, _: Repository) -> Damage:
    source = rng.choice(one.kinds[kind_of(name)])
    return Damage.to(name, f"has the bytes of its {source}", one.objects[source])


def _foreign(rng: random.Random, name: str, _: Repository, other: Repository) -> Damage:
    source = rng.choice(other.kinds[kind_of(name)])
    return Damage.to(name, f"has the bytes of a foreign {source}", other.objects[source])


def _exchange(rng: random.Random, name: str, one: Repository, _: Repository) -> Damage:
    second = rng.choice(one.kinds[kind_of(name)])
    changes = {name: one.objects[second], second: one.objects[name]}
    return Damage(f"{name}: exchanged with {second}", changes)


def _two(rng: random.Random, name: str, one: Repository, other: Repository) -> Damage:
    second = rng.choice(sorted(one.objects))
    first, then = (rng.choice(_SINGLE)(rng, n, one, other) for n in (name, second))
    return Damage(f"{first}; {then}", {**first.changes, **then.changes})


_SINGLE = (_flip, _overwrite, _cut, _grow, _shift, _missing, _stale, _foreign)
_HARMS = (_flip, _flip, _flip, *_SINGLE, _exchange, _two)


# --- what must hold ---------------------------------------------------------------------------


def follow(repository: Repository) -> tuple[str, int]:
    """What becomes of a fresh sampler: how it ended, and at which version.

    Raises:
        AssertionError: A weight was changed to anything but a committed version's.
    """
    run = repository.run
    model = run.model()
    try:
        receiver = Receiver(repository.store, model, config=SETTINGS)
    except WeightDeltaError as e:
        assert all_bits(model) == run.versions[0]
        return e.kind, 0
    try:
        receiver.prepare().wait()
    except WeightDeltaError as e:
        assert all_bits(model) == run.versions[0]
        assert (receiver.state, receiver.version) == ("CLEAN", 0)
        return e.kind, 0
    else:
        receiver.apply()
        assert all_bits(model) == run.versions[receiver.version]
        return "", receiver.version
    finally:
        receiver.close()


def judge(damage: Damage, repository: Repository, *, error: str, version: int) -> None:
    """Check that what a receiver reads was found damaged; only a lost log tail may go unseen.

    Raises:
        AssertionError: It was not.
    """
    if error:
        return
    entries = repository.kinds["log"]
    gone = sorted(n for n, data in damage.changes.items() if data is None and n in entries)
    tail = bool(gone) and gone == entries[-len(gone) :]
    assert tail or version == repository.run.newest, f"{damage} left a receiver at {version}"
    for name, data in damage.changes.items():
        old = repository.objects[name]
        extended = kind_of(name) == "data" and data is not None and data.startswith(old)
        unread = extended or not _needed(name, repository, version)
        assert unread or data == old or (tail and name in gone), f"{damage} was not noticed"


def _needed(name: str, repository: Repository, version: int) -> bool:
    """Whether a receiver that holds the whole base reads an object on its way to a version."""
    versions = repository.run.writer.log.versions.values()
    on_the_way = [entry for entry in versions if entry.version <= version]
    kind = kind_of(name)
    if kind in ("data", "index"):
        return name.split("/")[1] in {entry.write_id for entry in on_the_way}
    if kind == "plan":
        return name.split("/")[1] in {entry.plan for entry in on_the_way}
    return kind not in ("head", "table")
