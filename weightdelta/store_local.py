"""A directory as a store's backend: whole objects or none, durable before they are named."""
# ruff: noqa: D102 (``Backend`` says what each method does)

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from weightdelta.store_backend import Buffer, Live, refuse_dead

#: Folder of what is being written; no object name starts with a dot.
TMP: Final = ".tmp"


@dataclass(frozen=True, slots=True)
class LocalBackend:
    """A directory. Objects are written aside, synced, then linked or renamed into place."""

    root: Path
    fsync: bool = True
    _synced: set[Path] = field(default_factory=set)

    def read(self, name: str, *, start: int, end: int | None) -> bytes:
        with (self.root / name).open("rb") as f:
            size = os.fstat(f.fileno()).st_size
            f.seek(start)
            # Held against the file's size first: read(n) allocates n bytes before it reads.
            return f.read(max(0, min(size, size if end is None else end) - start))

    def put(self, name: str, parts: Iterable[Buffer], *, durable: bool, live: Live) -> None:
        with self._aside(parts, sync=durable and self.fsync) as temporary:
            folder = self._folder(name)
            # The caller may have reused the buffers since it stopped waiting.
            refuse_dead(live)
            os.replace(temporary, self.root / name)
            if durable:
                self._sync(folder)

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        with self._aside(parts, sync=self.fsync) as temporary:
            folder = self._folder(name)
            try:
                os.link(temporary, self.root / name)
                return True
            except FileExistsError:
                return False
            finally:
                # Also when it existed: an earlier attempt of ours may have failed right here.
                self._sync(folder)

    def size(self, name: str) -> int:
        path = self.root / name
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "a directory", name)
        return path.stat().st_size

    def names(self, folder: str) -> list[str]:
        found = []
        for at, folders, files in os.walk(self.root / folder):
            folders[:] = [f for f in folders if f != TMP]
            found += [(Path(at) / f).relative_to(self.root).as_posix() for f in files]
        return found

    def delete(self, name: str) -> None:
        (self.root / name).unlink()

    @contextlib.contextmanager
    def _aside(self, parts: Iterable[Buffer], *, sync: bool) -> Iterator[Path]:
        """A temporary file that holds ``parts``; gone afterwards."""
        folder = self.root / TMP
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / secrets.token_hex(16)
        try:
            with path.open("xb") as f:
                for part in parts:
                    f.write(part)
                f.flush()
                if sync:
                    os.fsync(f.fileno())
            yield path
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _folder(self, name: str) -> Path:
        """The object's folder, made if need be, its own entry durable up to the root's."""
        folder = (self.root / name).parent
        folder.mkdir(parents=True, exist_ok=True)
        if self.fsync and folder not in self._synced:
            up = folder
            while up != self.root:
                up = up.parent
                self._sync(up)
            with contextlib.suppress(PermissionError):  # nobody promised us the folder above
                self._sync(self.root.parent)
            self._synced.add(folder)
            while len(self._synced) > 256:
                self._synced.pop()
        return folder

    def _sync(self, folder: Path) -> None:
        if not self.fsync:
            return
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
