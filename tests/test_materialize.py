"""Any version as a checkpoint: equal bytes, whole or absent, and nothing outside its folder."""

import json
import shutil
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import SmallRun, Weights, all_bits, edit, some_weights

from weightdelta.base import INDEX
from weightdelta.codecs.names import DEFAULT, IDS
from weightdelta.config import Config
from weightdelta.errors import (
    DamagedObject,
    InputError,
    LayoutMismatch,
    NotYet,
    StateMismatch,
    StoreUnavailable,
)
from weightdelta.log import Log
from weightdelta.materialize import Materialized, materialize
from weightdelta.publish import Receipt
from weightdelta.record import data_name
from weightdelta.testing.faults import FaultStore, Plan


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    """Three versions, the last with another plan, other ranks and XOR values."""
    folder = tmp_path / "base"
    folder.mkdir()
    found = SmallRun(folder)
    found.step(0)
    found.step(1, share=0.9)
    found.open(config=Config.of({"values": "xor"}), ranks=3, max_bytes=32)
    found.step(2)
    yield found
    found.close()


def _make(
    run: SmallRun, version: int, out: Path, *, base: Path | None = None, **options: Any
) -> Materialized:
    log = Log(run.store)
    log.refresh()
    return materialize(
        log,
        version=version,
        base=base or run.checkpoint.parent,
        out=out,
        config=Config(),
        **options,
    )


def _bits(folder: Path) -> dict[str, bytes]:
    return all_bits({k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()})


def test_every_version_from_every_version(run: SmallRun, tmp_path: Path) -> None:
    """Forward and back, over a change of plan and of the form of values."""
    for version in range(4):
        made = _make(run, version, tmp_path / str(version))
        assert (made.version, made.start, made.hops) == (version, 0, version)
        assert made.digest == run.writer.log.digest(version)
        assert _bits(tmp_path / str(version)) == run.versions[version]
    for start in range(1, 4):
        for version in range(4):
            out = tmp_path / f"{start}-{version}"
            made = _make(run, version, out, base=tmp_path / str(start))
            assert (made.start, made.hops) == (start, abs(version - start))
            assert _bits(out) == run.versions[version]


@pytest.mark.parametrize("codec", [c for c in IDS if c != DEFAULT])
def test_every_codec(codec: str, tmp_path: Path) -> None:
    run = SmallRun(tmp_path, config=Config.of({"codec": codec, "values": "xor"}))
    run.step(0)
    run.step(1, share=0.6)
    run.close()
    _make(run, 2, tmp_path / "out", base=run.checkpoint)
    assert _bits(tmp_path / "out") == run.versions[2]
    _make(run, 0, tmp_path / "back", base=tmp_path / "out")
    assert _bits(tmp_path / "back") == run.versions[0]


# -- a checkpoint as trainers save them --------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[SmallRun, list[Path]]:
    """A tiny Llama trained over three versions, and each one's own ``save_pretrained``."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=True, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16().eval()
    weights = {k: v.clone() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    folder = tmp_path_factory.mktemp("llama")
    run = SmallRun(folder, weights=weights, max_bytes=2048)
    for seed in range(3):
        run.step(seed)
    folders = []
    for version in range(4):
        model.load_state_dict(run.model(version), strict=False)
        model.save_pretrained(folder / str(version), max_shard_size="4KB")
        folders.append(folder / str(version))
    run.close()
    return run, folders


def test_files_are_the_trainers_own(saved: tuple[SmallRun, list[Path]], tmp_path: Path) -> None:
    """Not only tensors: every file, shards and their headers and index included."""
    run, folders = saved
    assert len(list(folders[0].glob("*.safetensors"))) > 2, "the test is about shards"
    for version, own in enumerate(folders):
        out = tmp_path / str(version)
        made = _make(run, version, out, base=folders[0])
        assert sorted(p.name for p in out.iterdir()) == sorted(made.files)
        for file in own.iterdir():
            assert (out / file.name).read_bytes() == file.read_bytes(), file.name


def test_transformers_loads_it(saved: tuple[SmallRun, list[Path]], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run, folders = saved
    _make(run, 3, tmp_path / "out", base=folders[0])
    made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    own = transformers.AutoModelForCausalLM.from_pretrained(folders[3], dtype="auto")
    assert made.dtype == torch.bfloat16
    assert all_bits(made.state_dict()) == all_bits(own.state_dict())
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(made(ids).logits, own(ids).logits)


def test_what_belongs_to_a_checkpoint_comes_along(run: SmallRun, tmp_path: Path) -> None:
    base = run.checkpoint.parent
    for name in ("config.json", "tokenizer.model", "chat_template.jinja", "modeling_x.py"):
        (base / name).write_text(name)
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.GGUF"):
        (base / name).write_text("weights of version 0")
    (base / ".gitattributes").write_text("")
    (base / "onnx").mkdir()
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "rag.jinja").write_text("rag")
    made = _make(run, 1, tmp_path / "out")
    assert made.left_out == ("model.GGUF", "pytorch_model.bin", "pytorch_model.bin.index.json")
    found = {
        p.relative_to(tmp_path / "out").as_posix(): p
        for p in (tmp_path / "out").rglob("*")
        if p.is_file()
    }
    assert sorted(found) == sorted(made.files) == [
        "additional_chat_templates/rag.jinja", "chat_template.jinja", "config.json",
        "model.safetensors", "modeling_x.py", "tokenizer.model",
    ]  # fmt: skip
    assert found["tokenizer.model"].read_text() == "tokenizer.model"


def test_one_file_is_a_base_too(run: SmallRun, tmp_path: Path) -> None:
    made = _make(run, 2, tmp_path / "new" / "out", base=run.checkpoint)
    assert made.files == ("model.safetensors",)
    assert _bits(tmp_path / "new" / "out") == run.versions[2]


def test_tensors_that_the_run_leaves_out_and_unaligned_ones(run: SmallRun, tmp_path: Path) -> None:
    """A writer that does not align its header, and a tensor that is not trained."""
    folder = tmp_path / "odd"
    folder.mkdir()
    weights = some_weights() | {"frozen": torch.arange(5)}
    save_file(weights, str(folder / "model.safetensors"))
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    head = data[8 : 8 + size].rstrip(b" ") + b" " * 3
    head += b" " * ((8 + len(head)) % 2 == 0)  # every tensor at an odd address
    (folder / "model.safetensors").write_bytes(
        len(head).to_bytes(8, "little") + head + data[8 + size :]
    )
    _make(run, 3, tmp_path / "out", base=folder)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found.pop("frozen"), torch.arange(5))
    assert all_bits(found) == run.versions[3]


# -- whole or absent ---------------------------------------------------------------------------


def _nothing_left(folder: Path, *known: str) -> bool:
    return {p.name for p in folder.iterdir()} == set(known)


def test_a_damaged_frame_leaves_nothing(run: SmallRun, tmp_path: Path) -> None:
    name = data_name(run.writer.log.versions[2].write_id, 1)
    data = bytearray(run.store.read(name))
    data[-1] ^= 1
    run.store.write(name, bytes(data))
    with pytest.raises(DamagedObject, match=name):
        _make(run, 3, tmp_path / "out")
    assert _nothing_left(tmp_path, "base")
    _make(run, 1, tmp_path / "out")


def test_a_delta_that_is_not_what_the_log_says(run: SmallRun, tmp_path: Path) -> None:
    """The frames are whole, their own digests right, and the version's digest is another."""

    def wrong(receipt: Receipt) -> Receipt:
        return replace(receipt, tensor_digest=receipt.tensor_digest + np.uint64(1))

    run.tamper = wrong
    run.step(9)
    with pytest.raises(StateMismatch, match=r"expected digest .* of version 4"):
        _make(run, 4, tmp_path / "out")
    assert _nothing_left(tmp_path, "base")


def test_a_frame_whose_digest_change_is_wrong(run: SmallRun, tmp_path: Path) -> None:
    def wrong(receipt: Receipt) -> Receipt:
        change = np.where(receipt.changed > 0, np.uint64(1), np.uint64(0))
        return replace(receipt, digest_change=receipt.digest_change + change)

    run.tamper = wrong
    run.step(9)
    with pytest.raises(StateMismatch, match=r"frame \d+: expected digest change"):
        _make(run, 4, tmp_path / "out")
    assert _nothing_left(tmp_path, "base")


def test_another_base_is_refused_before_anything_is_written(run: SmallRun, tmp_path: Path) -> None:
    other = some_weights()
    edit(other["b"], 2)
    save_file(other, str(tmp_path / "other.safetensors"))
    with pytest.raises(StateMismatch, match=r"1 of 5 tensors differ .* first 'b'"):
        _make(run, 1, tmp_path / "out", base=tmp_path / "other.safetensors")
    save_file({"a": torch.zeros(2)}, str(tmp_path / "foreign.safetensors"))
    with pytest.raises(LayoutMismatch, match=r"expected tensor 'a', BF16 \(12, 10\)"):
        _make(run, 1, tmp_path / "out", base=tmp_path / "foreign.safetensors")
    with pytest.raises(InputError, match="expected a folder"):
        _make(run, 1, tmp_path / "out", base=tmp_path / "nowhere")
    assert not (tmp_path / "out").exists()


def test_versions_that_do_not_exist(run: SmallRun, tmp_path: Path) -> None:
    for version in (4, -1):
        with pytest.raises(NotYet, match=f"version {version}"):
            _make(run, version, tmp_path / "out")


def test_what_exists_is_never_replaced(run: SmallRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    _make(run, 1, out)
    before = (out / "model.safetensors").read_bytes()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for taken in (out, run.checkpoint.parent, run.checkpoint, tmp_path / "link"):
        with pytest.raises(InputError, match="does not exist yet"):
            _make(run, 2, taken)
    assert (out / "model.safetensors").read_bytes() == before


def test_a_place_that_cannot_be_written(run: SmallRun, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreUnavailable, match="cannot be written: Not a directory"):
        _make(run, 1, tmp_path / "file" / "out")


@pytest.mark.fault
def test_a_store_that_fails_half_way_is_named_not_the_folder(run: SmallRun, tmp_path: Path) -> None:
    """Whichever read fails, once; when none does any more, the checkpoint is there."""
    said: list[str] = []
    for k in range(1, 1000):
        store = FaultStore(run.store, Plan("before", at=k, ops=frozenset({"read"})))
        log = Log(store)
        try:
            log.refresh()
            materialize(
                log, version=3, base=run.checkpoint.parent, out=tmp_path / "out", config=Config()
            )
        except StoreUnavailable as e:
            said.append(str(e))
        if not store.fired:
            break
        assert _nothing_left(tmp_path, "base")
    assert len(said) == k - 1 > 10
    assert all("could not read" in text for text in said)
    assert _bits(tmp_path / "out") == run.versions[3]


def test_an_interruption_leaves_nothing(run: SmallRun, tmp_path: Path) -> None:
    for stage in ("checking base", "copying base", "delta 2 of 3", "checking result"):

        def stop(what: str, done: int, total: int, *, stage: str = stage) -> None:
            assert 0 <= done <= total
            if what == stage:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            _make(run, 3, tmp_path / "out", progress=stop)
        assert _nothing_left(tmp_path, "base"), stage


# -- names -------------------------------------------------------------------------------------


def test_tensor_names_never_become_paths(tmp_path: Path) -> None:
    names = ("../../../escape", "/etc/escape", "a/../../b", "..", "C:\\escape", "[/red]")
    weights: Weights = {name: torch.arange(4.0) + i for i, name in enumerate(names)}
    folder = tmp_path / "x" / "y" / "base"
    folder.mkdir(parents=True)
    run = SmallRun(folder, weights=weights)
    run.step(1, share=0.5)
    run.close()
    _make(run, 1, tmp_path / "x" / "y" / "out")
    assert _bits(tmp_path / "x" / "y" / "out") == run.versions[1]
    files = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert files == {"x/y/base/model.safetensors", "x/y/out/model.safetensors"}


@pytest.mark.parametrize("name", ["../model.safetensors", "{outside}/model.safetensors", ".."])
def test_a_base_whose_index_leads_out_is_refused(name: str, run: SmallRun, tmp_path: Path) -> None:
    """A copy of such an index would lead whoever loads the result out of its folder."""
    base = run.checkpoint.parent
    name = name.format(outside=tmp_path)
    (base / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys("abems", name)}))
    shutil.copy(run.checkpoint, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="expected names of files beside it"):
        _make(run, 1, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- memory ------------------------------------------------------------------------------------


def test_memory_follows_frames_not_the_model(tmp_path: Path) -> None:
    weights: Weights = {"w": torch.zeros(8 << 20, dtype=torch.bfloat16)}
    run = SmallRun(tmp_path, weights=weights, max_bytes=64 * 1024, ranks=1)
    run.live["w"][::50] = 1.0
    run.publish()
    run.close()
    run.live = run.base = {}
    _make(run, 1, tmp_path / "warm")  # compiles kernels
    tracemalloc.start()
    try:
        _make(run, 1, tmp_path / "out")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20, f"{peak} bytes for a model of {16 << 20}"
    assert _bits(tmp_path / "out") == run.versions[1]
