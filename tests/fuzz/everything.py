"""All targets, and the inputs that once broke one of them."""

from functools import cache
from pathlib import Path

from blake3 import blake3

from fuzz.binary import binary_targets
from fuzz.runs import run_targets
from fuzz.target import Target
from fuzz.texts import text_targets

FINDS = Path(__file__).parent / "finds"


@cache
def targets() -> dict[str, Target]:
    """Every target by name."""
    return {t.name: t for t in (*text_targets(), *binary_targets(), *run_targets())}


def find_name(target: str, data: bytes) -> str:
    """Name of the file that keeps an input: its target and its BLAKE3."""
    return f"{target.replace(' ', '_')}.{blake3(data).hexdigest()[:16]}"


def keep(target: str, data: bytes, *, folder: Path = FINDS) -> Path:
    """Keep an input that broke a target."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / find_name(target, data)
    path.write_bytes(data)
    return path


def kept(folder: Path = FINDS) -> list[Path]:
    """All inputs that were kept."""
    return sorted(path for path in folder.glob("*.*") if path.suffix != ".txt")


def target_of(path: Path) -> Target:
    """The target that a kept input broke."""
    return targets()[path.name.rpartition(".")[0].replace("_", " ")]
