"""The architecture as a table: a module imports only what stands before it.

Rows are layers, lowest first; within a row, too, a module may import only names to its left. A
package's own name (``kernels``) is its ``__init__``. Imports inside functions count: laziness
saves time, it does not change the direction.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYERS: tuple[str, ...] = (
    # L0: words and values
    "errors redact codecs codecs.names config layout digest stats threads",
    # L1: bytes <-> changed elements
    "kernels.planes kernels.reference_blocks kernels.reference kernels.code_cache "
    "kernels.compiled "
    "kernels.cpu_blocks kernels.cpu_walk kernels.cpu_sparse kernels.cpu_bytes "
    "kernels.cpu_staged kernels.cpu_ops kernels.cpu_planes "
    "kernels.cpu_batch kernels.cpu_block_planes kernels.cpu_pieces kernels hashing "
    "kernels.device kernels.torch_ops kernels.triton_digest kernels.triton_units "
    "kernels.triton_direct kernels.triton_scan kernels.triton_encode kernels.triton_places "
    "kernels.triton_stage kernels.triton_scatter kernels.triton_ops "
    "kernels.triton_tokens kernels.triton_blocks kernels.torch_masks kernels.triton_masks "
    "codecs.zstd codecs.zstd_native codecs.slots codecs.sparse codecs.stock "
    "codecs.blocks codecs.batch codecs.registry codecs.transcode codecs.engine_memory "
    "codecs.decoding codecs.nvcomp codecs.device_blocks",
    # L2: who owns what, and the records that say so
    "tensors device_memory lent_memory state sharding sharding.explicit sharding.dtensor ownership "
    "cover frame chunk_table index record",
    # L3: named bytes
    "store_backend store_feed store_errors store_local store_fsspec store_obstore store log base "
    "delta baseline",
    # L4: one side of a publication
    "steps fence live windows mirror capture_device capture replicas encode job skew publish "
    "versions fetch sharing placement recognition decode_batch decode pages apply pieces "
    "block_memory block_groups apply_blocks site fold device_lists device_staged stage_blocks "
    "stage_device staging preparation",
    # L5: what users hold
    "session publisher engines engines.transformers receiver",
    # L6: what people run
    "verify report batches materialize diff export report_detail progress top testing "
    "testing.faults testing.conformance cli",
)

#: Above L3 the two sides never meet: either can be deployed alone.
TRAINER = (
    "steps fence live windows mirror capture_device capture replicas encode job skew publish "
    "session publisher"
)
SAMPLER = (
    "versions fetch sharing placement recognition decode_batch decode pages apply pieces "
    "block_memory block_groups apply_blocks site fold device_lists device_staged stage_blocks "
    "stage_device staging preparation engines engines.transformers receiver"
)

#: The Ray actors stand on top of the library, in their own order.
ACTORS = (
    "ray_actors ray_actors.calls ray_actors.publisher ray_actors.trainer ray_actors.coordinator "
    "ray_actors.attach"
)

#: The only modules (or packages, with a dot) that may import a library.
DOORS: dict[str, tuple[str, ...]] = {
    "adlfs": (),
    "cramjam": ("codecs.stock",),
    "cuda": ("codecs.engine_memory",),
    "fsspec": ("store_fsspec",),
    "gcsfs": (),
    "llvmlite": ("kernels.",),
    "numba": ("kernels.",),
    "nvidia": ("codecs.nvcomp",),
    "obstore": ("store_obstore",),
    "pyarrow": ("export",),
    "ray": ("ray_actors.",),
    "rich": ("cli", "progress", "report", "report_detail", "top"),
    "s3fs": (),
    "transformers": ("engines.transformers",),
    "triton": ("kernels.",),
    "typer": ("cli",),
    "yaml": ("config",),
    "zstandard": ("codecs.zstd",),
}

#: Below L4, only these may import torch: readers of a store need none.
TORCH_DOORS = (
    "tensors device_memory lent_memory state sharding.dtensor kernels.device kernels.torch_ops "
    "kernels.triton_digest kernels.triton_units kernels.triton_direct kernels.triton_scan "
    "kernels.triton_encode kernels.triton_places kernels.triton_stage kernels.triton_scatter "
    "kernels.triton_ops "
    "kernels.triton_blocks kernels.torch_masks kernels.triton_masks codecs.decoding "
    "codecs.nvcomp codecs.device_blocks"
)

#: The facade, ``weightdelta`` itself, stands above everything and resolves names lazily.
ORDER = {name: i for i, name in enumerate(" ".join((*LAYERS, ACTORS, "weightdelta")).split())}


def _name(path: Path) -> str:
    """A file's name in the table: dotted, without ``weightdelta.`` in front."""
    parts = [p for p in path.relative_to(ROOT).with_suffix("").parts if p != "__init__"]
    return ".".join(parts).removeprefix("weightdelta.")


MODULES = {_name(p): p for top in ("weightdelta", "ray_actors") for p in (ROOT / top).rglob("*.py")}


def _imports(name: str) -> Iterator[str]:
    """What a module imports, as names in the table where it is ours.

    ``from a import b`` counts as a.b where that is a module of ours, else as a: running a
    package's ``__init__`` on the way is no dependency on what that offers.
    """
    path = MODULES[name]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("weightdelta.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}".removeprefix("weightdelta.")
                yield full if full in MODULES else str(node.module).removeprefix("weightdelta.")


def _internal(name: str) -> set[str]:
    return set(_imports(name)) & set(MODULES)


def _users(library: str) -> set[str]:
    return {n for n in MODULES if library in {i.split(".")[0] for i in _imports(n)}}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_down(name: str) -> None:
    assert name in ORDER, f"{name} is not in the table; give it a place"
    above = {n for n in _internal(name) if ORDER.get(n, sys.maxsize) >= ORDER[name]}
    assert not above, f"{name} imports {sorted(above)}, which stand after it"


@pytest.mark.parametrize(("side", "other"), [(TRAINER, SAMPLER), (SAMPLER, TRAINER)])
def test_sides_share_only_the_lower_layers(side: str, other: str) -> None:
    for name in set(side.split()) & set(MODULES):
        assert not _internal(name) & set(other.split()), name


@pytest.mark.parametrize("library", sorted(DOORS))
def test_each_library_has_one_door(library: str) -> None:
    doors = DOORS[library]
    packages = tuple(d for d in doors if d.endswith("."))
    stray = {n for n in _users(library) if n not in doors and not f"{n}.".startswith(packages)}
    assert not stray, f"{library} is imported by {sorted(stray)}; its door is {doors}"


def test_lower_layers_need_no_torch() -> None:
    lower = set(" ".join(LAYERS[:4]).split()) - set(TORCH_DOORS.split())
    assert not _users("torch") & lower


def test_library_never_reaches_for_its_actors() -> None:
    """Only the facade hands out the Ray entry points, and only when asked."""
    assert not {n for n in _users("ray_actors") - {"weightdelta"} if not n.startswith("ray_actors")}


def test_table_names_no_ghosts() -> None:
    assert not set(ORDER) - set(MODULES)
