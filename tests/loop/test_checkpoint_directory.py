"""Checkpoints on disk: what goes in comes out, and a checkpoint is whole, refused, or not there."""

import builtins
import errno
import hashlib
import json
import math
import os
import pickle
import re
import shutil
import stat
import subprocess
import sys
import time
import warnings
from collections import Counter, OrderedDict, namedtuple

import forks
import pytest
import torch
from forging import write_header
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from samplewise import CheckpointError, CheckpointWarning
from samplewise.loop.checkpoint import format as checkpoint_format
from samplewise.loop.checkpoint.directory import Checkpoints, newest_checkpoint
from samplewise.loop.checkpoint.io import read, write


def same(a, b) -> bool:
    """Equal in type, order and every bit; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return a == b


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.ckpt"


def round_trip(path, state):
    write(path, state)
    return read(path)


# --------------------------------------------------------------------------------- round trips

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
DTYPES += [torch.complex128, torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint32]


def tensor_of(shape, dtype):
    return torch.randn(shape, dtype=torch.float64).mul(3).to(dtype)


tensors = st.builds(tensor_of, st.sampled_from([(), (0,), (2, 0), (1,), (3,), (2, 3)]), st.sampled_from(DTYPES))
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | tensors
anything = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def reused(tmp_path_factory):
    return tmp_path_factory.mktemp("store") / "a.ckpt"


@pytest.mark.filterwarnings("ignore:Casting complex")
@given(state=st.dictionaries(st.text() | st.integers(), anything, max_size=5))
def test_any_nested_state_comes_back(reused, state):
    assert same(round_trip(reused, state), state)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_beside_every_other(path, dtype):
    shapes = [(), (0,), (3,), (3, 5)]
    state = {"this": [tensor_of(s, dtype) for s in shapes], "others": [tensor_of((3,), d) for d in DTYPES]}
    assert same(round_trip(path, state), state)


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1, 2**63, -(2**200), 10**5000, "\ud800", "\0", '"', b"\xff\0"],
    ids=range(13),
)
def test_difficult_values(path, value):
    assert same(round_trip(path, {"a": value}), {"a": value})


def test_dense_tensors_keep_the_order_of_their_memory(path):
    image = torch.randn(2, 3, 4, 5)
    state = {
        "channels last": image.to(memory_format=torch.channels_last),
        "one channel": image[:, :1].to(memory_format=torch.channels_last),
        "transposed": image.transpose(0, 3),
        "volume": torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        "packed": torch.randn(3, 4, dtype=torch.complex64).T,
        "empty": torch.zeros(2, 0, 3).transpose(0, 2),
    }
    back = round_trip(path, state)
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor)
        assert back[name].stride() == tensor.stride() or tensor.is_contiguous()


def test_keys_keep_type_and_order(path):
    state = {1: "int", "1": "text", "a.b": 0, "a": {"b": 1}, -3: (), "": [], "tensor": {"tensor": [0]}, 2**70: {}}
    assert same(round_trip(path, state), state)


def test_views_shared_memory_and_conjugates(path):
    base = torch.arange(12.0).reshape(3, 4)
    state = {"whole": base, "transposed": base.T, "strided": base[:, ::2], "expanded": base[:1].expand(5, 4)}
    state |= {"again": base, "conjugate": torch.randn(3, dtype=torch.complex64).conj(), "imag": torch.randn(2) * 1j}
    state["negative"] = state["conjugate"].imag
    back = round_trip(path, state)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())
    assert all(back[name].is_contiguous() for name in state if name != "transposed")
    back["again"].zero_()
    assert torch.equal(back["whole"], base)


def test_what_is_read_does_not_hang_on_the_file(path):
    back = round_trip(path, {"a": torch.ones(5), "b": torch.ones(5)})
    assert back["a"].untyped_storage().nbytes() == 20
    shard = path / "rank-0.safetensors"
    shard.write_bytes(b"\0" * shard.stat().st_size)
    assert torch.equal(back["a"], torch.ones(5))


def test_parameters_come_back_as_tensors_and_numpy_floats_as_floats(path):
    numpy = pytest.importorskip("numpy")
    back = round_trip(path, {"p": nn.Parameter(torch.ones(2)), "f": numpy.float64(0.1)})
    assert same(back, {"p": torch.ones(2), "f": 0.1})


def test_device(path):
    write(path, {"a": [torch.ones(2)], "b": 1})
    assert read(path, device="meta")["a"][0].is_meta
    assert read(path, device=torch.device("cpu"))["a"][0].device.type == "cpu"


def trained(steps):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    advance(model, optimizer, schedule, steps)
    return model, optimizer, schedule


def advance(model, optimizer, schedule, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
        schedule.step()


def test_model_optimizer_schedule_and_random_state_go_on_as_if_nothing_had_happened(path):
    before, after = trained(3), trained(0)
    state = {"parts": [part.state_dict() for part in before], "random": torch.get_rng_state()}
    back = round_trip(path, state)
    assert same(back, state)
    assert type(back["parts"][0]) is OrderedDict and type(back["parts"][2]["milestones"]) is Counter
    for part, its_state in zip(after, back["parts"], strict=True):
        part.load_state_dict(its_state)
    advance(*before, 3)
    torch.set_rng_state(back["random"])
    advance(*after, 3)
    assert same([part.state_dict() for part in before], [part.state_dict() for part in after])


def test_the_shard_is_an_ordinary_safetensors_file_with_the_paths_of_tensors_as_names(path):
    write(path, {"a": torch.ones(2, dtype=torch.int8), "b": {"c": torch.ones(3), 0: [torch.zeros(1)]}})
    tensors = load_file(path / "rank-0.safetensors")
    expected = {"a": torch.ones(2, dtype=torch.int8), "b.0.0": torch.zeros(1), "b.c": torch.ones(3)}
    assert same(dict(sorted(tensors.items())), expected)


def test_the_tensors_of_a_model_have_their_own_names_in_a_file_of_their_own(path):
    tied = torch.arange(6.0).reshape(2, 3)
    model = {"fc.weight": tied, "head.weight": tied, "model.scale": tied[0], "__metadata__": tied[1], "a": {"b": tied}}
    state = {"model": model, "model.scale": torch.ones(1), "optimizer": {"momentum": torch.zeros(2)}, "update": 3}
    assert same(round_trip(path, state), state)
    stored = load_file(path / "model.safetensors")
    assert same({name: stored[name] for name in ("fc.weight", "head.weight")}, {"fc.weight": tied, "head.weight": tied})
    assert set(stored) == {"fc.weight", "head.weight", "model.scale", "__metadata__'", "a.b"}
    assert set(load_file(path / "rank-0.safetensors")) == {"model.scale", "optimizer.momentum"}
    assert [entry["file"] for entry in json.loads((path / "state.json").read_text())["shards"]] == [
        "model.safetensors",
        "rank-0.safetensors",
    ]


@pytest.mark.parametrize("name", ["model.safetensors", "rank-0.safetensors"])
@pytest.mark.parametrize("harm", ["changed", "cut", "gone", "swapped"])
def test_a_damaged_file_of_a_checkpoint_with_a_model(path, name, harm):
    write(path, {"model": {"weight": torch.ones(3)}, "other": torch.zeros(3)})
    content = (path / name).read_bytes()
    if harm == "gone":
        (path / name).unlink()
    elif harm == "swapped":
        other = {"model.safetensors": "rank-0.safetensors"}.get(name, "model.safetensors")
        (path / name).write_bytes((path / other).read_bytes())
    else:
        (path / name).write_bytes(content[:-1] + (b"\1" if harm == "changed" else b""))
    with pytest.raises(CheckpointError, match=f"{name} must "):
        read(path)


def test_the_state_is_json_with_version_size_and_checksum(path):
    write(path, {"a": torch.ones(2), "b": 1})
    assert sorted(file.name for file in path.iterdir()) == ["rank-0.safetensors", "state.json"]
    state = json.loads((path / "state.json").read_text())
    content = (path / "rank-0.safetensors").read_bytes()
    assert state["format"] == "samplewise checkpoint" and state["format_version"] == 6
    digest = hashlib.sha256(content).hexdigest()
    shard = {"file": "rank-0.safetensors", "bytes": len(content), "sha256": digest, "offsets": {}}
    assert state["shards"] == [shard]
    assert state["state"] == {"dict": [["a", {"tensor": ["a", "float32", [2]]}], ["b", 1]]}


def test_tensors_whose_paths_are_the_same_as_text(path):
    one, two, three = (torch.full((2,), k) for k in (1, 2, 3))
    state = {"a.b": one, "a": {"b": two}, "1": one, 1: two, "a.b'": three}
    state |= {"__metadata__": one, "\ud800": two, "": three}
    assert same(round_trip(path, state), state)


# -------------------------------------------------------------------------- what cannot be written

Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([], "state must be a dict; found list."),
        (
            {"optimizer": {"state": {0: {"foo": {1}}}}},
            "optimizer.state.0.foo must be a tensor, number, text, bytes, None, or a dict, list or tuple of these; "
            "found set. Convert it, or leave it out of the state.",
        ),
        ({"a": [0, (1, print)]}, "a.1.1 must be a tensor, number, .*; found builtin_function_or_method."),
        ({"a": Point(1, 2)}, "a must be a tensor, number, .*; found test_checkpoint_directory.Point."),
        ({"a": 1j}, "a must be a tensor, number, .*; found complex."),
        ({"a": torch.float32}, "a must be a tensor, number, .*; found torch.dtype."),
        ({"a": {True: 1}}, "keys of a must be text or int; found True, bool."),
        ({(1, 2): 1}, r"keys of state must be text or int; found \(1, 2\), tuple."),
        (
            {"a": torch.ones(2, device="meta")},
            "a must be a plain, dense tensor with data; found torch.Tensor of layout torch.strided and dtype "
            "torch.float32 on meta. Convert it, or leave it out of the state.",
        ),
        ({"a": torch.eye(2).to_sparse()}, "a must be a plain, dense tensor .* of layout torch.sparse_coo"),
    ],
    ids=range(10),
)
def test_what_does_not_fit_is_named_with_its_place(path, state, message):
    with pytest.raises(TypeError, match="^" + message):
        write(path, state)
    assert list(path.parent.iterdir()) == []


def test_a_state_that_contains_itself(path):
    state = {"a": []}
    state["a"].append(state)
    with pytest.raises(TypeError, match=r"^state must be at most 100 levels deep; found more at a\.0\.a\.0\.a\.\.\.$"):
        write(path, state)


def test_the_deepest_state_can_be_read_again(path):
    state = {}
    for _ in range(99):
        state = {"a": state}
    assert round_trip(path, state) == state


def test_more_text_than_a_header_may_hold(path, monkeypatch):
    monkeypatch.setattr(checkpoint_format, "MAX_JSON_BYTES", 1000)
    with pytest.raises(
        CheckpointError, match=r"must take at most 1000 bytes as JSON; found \d+\. Convert long lists to"
    ):
        write(path, {"a": "x" * 1000})
    assert list(path.parent.iterdir()) == []


class FullDisk:
    """A file that takes `room` bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        data = bytes(data)
        self.file.write(data[: self.room])
        if len(data) > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(data)


def full_at_write(monkeypatch, room):
    opened = builtins.open
    monkeypatch.setattr(checkpoint_format, "open", lambda *args: FullDisk(opened(*args), room), raising=False)


def full_at_sync(monkeypatch, _):
    def fsync(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize(("fill", "room"), [(full_at_write, 0), (full_at_write, 100), (full_at_sync, None)])
def test_a_full_disk_leaves_the_earlier_file_and_nothing_else(path, fill, room):
    write(path, {"a": 1})
    message = (
        f"^a checkpoint could not be written to {path}: .*No space left on device.* Free disk space or fix the "
        "permissions, then save again. An existing checkpoint at this path is unchanged.$"
    )
    with pytest.MonkeyPatch.context() as patch:
        fill(patch, room)
        with pytest.raises(CheckpointError, match=message):
            write(path, {"a": torch.ones(1000)})
    assert read(path) == {"a": 1} and list(path.parent.iterdir()) == [path]


def test_no_such_directory(tmp_path):
    with pytest.raises(CheckpointError, match=r"could not be written to .*No such file or directory"):
        write(tmp_path / "none" / "a.ckpt", {})


def test_an_interrupt_leaves_nothing_behind(path, monkeypatch):
    def fsync(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(KeyboardInterrupt):
        write(path, {})
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_a_directory_that_cannot_be_synced(path, monkeypatch, code):
    synced, fsync = [], os.fsync

    def only_files(descriptor):
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        if len(synced) == 4:
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    if code == errno.EINVAL:  # a disk that knows no such thing
        write(path, {"a": 1})
    else:
        with pytest.raises(CheckpointError, match="Input/output error"):
            write(path, {"a": 1})
    # The shard, state.json and their directory; after the rename the directory that contains it.
    assert synced == [False, False, True, True] and read(path) == {"a": 1}


# ----------------------------------------------------------------------------- what cannot be read

SMALL = {"weights": torch.arange(6.0).reshape(2, 3), "flags": torch.tensor([True, False]), "update": 7, 3: ("x", None)}


FILES = ("state.json", "rank-0.safetensors")


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("mask", [0x01, 0x04, 0x20, 0xFF])
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_anywhere_is_refused_or_harmless(path, name, mask):
    write(path, SMALL)
    whole = (path / name).read_bytes()
    for at in range(len(whole)):
        (path / name).write_bytes(whole[:at] + bytes([whole[at] ^ mask]) + whole[at + 1 :])
        with pytest.raises(CheckpointError):
            read(path)


def test_a_flipped_byte_in_a_tensor(path):
    write(path, SMALL)
    shard = path / "rank-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    message = (
        "rank-0.safetensors must contain exactly what was written to it; found another checksum. "
        "It is corrupt: use an earlier checkpoint.$"
    )
    with pytest.raises(CheckpointError, match=message):
        read(path)


def test_a_shard_truncated_at_every_length(path):
    write(path, SMALL)
    shard = path / "rank-0.safetensors"
    whole = shard.read_bytes()
    for length in range(len(whole)):
        shard.write_bytes(whole[:length])
        with pytest.raises(
            CheckpointError,
            match=rf"rank-0.safetensors must be {len(whole)} bytes long; found {length}\. It is truncated: copy it "
            r"again, or use an earlier checkpoint\.$",
        ):
            read(path)


def test_a_state_truncated_at_every_length(path):
    write(path, SMALL)
    whole = (path / "state.json").read_bytes()
    for length in range(len(whole)):
        (path / "state.json").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"state.json must contain .*found invalid JSON.*It is corrupt"):
            read(path)


@pytest.mark.parametrize("name", FILES)
def test_bytes_too_many(path, name):
    write(path, SMALL)
    (path / name).write_bytes((path / name).read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match=r"found (invalid JSON \(Extra|\d+ bytes in place of).*It is corrupt"):
        read(path)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing(path, name):
    write(path, SMALL)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name} must be readable; found: .*No such file"):
        read(path)


class Bomb:
    def __reduce__(self):
        return (open, ("exploded", "w"))


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_bytes(pickle.dumps(Bomb())),
        lambda path: torch.save({"a": Bomb()}, path),
        lambda path: path.write_text(json.dumps({"a": 1, "b": [1, 2, 3]})),
        lambda path: path.write_bytes(os.urandom(7) + b"\1" + os.urandom(5000)),
        lambda path: save_file({"a": torch.ones(2)}, path),
        lambda path: save_file({"a": torch.ones(2)}, path, {"format": "pt"}),
    ],
    ids=["pickle", "torch", "json", "noise", "safetensors", "safetensors of another format"],
)
@pytest.mark.parametrize("name", ["", "state.json"])
def test_foreign_files_are_refused_and_nothing_in_them_runs(path, make, name, monkeypatch):
    monkeypatch.chdir(path.parent)
    if name:
        path.mkdir()
    make(path / name)
    message = "must be a checkpoint file written by samplewise; found .*. It is not a checkpoint: pass another path.$"
    with pytest.raises(CheckpointError, match="(?s)" + message):
        read(path)
    assert list(path.parent.iterdir()) == [path]


def forge(path, state="{}", **changes):
    """A checkpoint with the right checksums that `write` would not make."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    write_header(path, {"0": entry}, bytes(8), state, **changes)


def test_a_newer_format(path):
    forge(path, format_version=7)
    with pytest.raises(CheckpointError) as error:
        read(path)
    assert str(error.value) == (
        f"{path} must have format version 6; found 7, which this version of samplewise does not read: it was written "
        "by a newer one; upgrade with pip install --upgrade samplewise."
    )


@pytest.mark.parametrize("version", [0, 1, 5, -1, "x", "", "6", 6.0, True, None, [6]])
def test_a_format_that_is_not_read(path, version):
    forge(path, format_version=version)
    with pytest.raises(CheckpointError) as error:
        read(path)
    assert str(error.value) == (
        f"{path} must have format version 6; found {'none' if version is None else repr(version)}, which this version "
        "of samplewise does not read: use the version that wrote it, or start a new run directory."
    )


def test_the_one_file_of_the_first_version(path):
    about = {"format": "samplewise checkpoint", "version": "1", "state": '{"dict":[]}', "sha256": "0" * 64}
    text = json.dumps({"__metadata__": about}, separators=(",", ":")).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match=r"a.ckpt must have format version 6; found 1, which this version of"):
        read(path)


def test_the_directory_of_the_second_version(path):
    path.mkdir()
    (path / "state.ckpt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"a.ckpt must have format version 6; found 2, which this version of"):
        read(path)


@pytest.mark.parametrize(
    "state",
    [
        "",
        "{}",
        "[" * 100_000,
        '{"call":"print"}',
        '{"dict":[[[1],2]]}',
        '{"dict":1}',
        '{"tensor":["0","load",[2]]}',
        '{"tensor":["0","float32",[3]]}',
        '{"tensor":["1","float32",[2]]}',
        '{"bytes":"?"}',
        '{"a":1,"b":2}',
        "[1]",
    ],
    ids=range(12),
)
def test_forged_states(path, state):
    forge(path, state)
    with pytest.raises(CheckpointError, match="It is corrupt"):
        read(path)


@pytest.mark.parametrize("name", ["none.ckpt", "."])
def test_what_is_no_file(tmp_path, name):
    message = r"must be readable; found: .*\. Check its path and permissions\.$"
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path / name)


# -------------------------------------------------------------------------------------- directories


def names(checkpoints):
    return sorted(path.name for path in checkpoints.directory.iterdir())


def updates(checkpoints):
    return [int(re.findall(r"\d+", name)[0]) for name in names(checkpoints)]


def test_an_empty_directory_is_made_and_has_no_latest(tmp_path):
    checkpoints = Checkpoints(tmp_path / "a" / "b")
    assert checkpoints.latest() is None and names(checkpoints) == []


def test_the_latest_is_the_one_of_the_highest_update(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=9)
    paths = [checkpoints.save({"update": u}, u) for u in (0, 123, 1_000_000_000, 7)]
    assert paths[1] == tmp_path / "update-000000123.ckpt"
    assert checkpoints.latest() == ({"update": 1_000_000_000}, paths[2])


def test_keep(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for update in range(5):
        checkpoints.save({}, update)
    assert updates(checkpoints) == [3, 4]
    Checkpoints(tmp_path, keep=1).save({}, 5)
    assert updates(checkpoints) == [5]


def test_going_back_keeps_what_was_just_saved_and_what_came_later(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for update in (10, 20, 5, 6, 7):
        checkpoints.save({}, update)
    assert updates(checkpoints) == [6, 7, 10, 20]


def test_other_files_are_left_alone(tmp_path):
    others = ["notes.txt", "update-000000001.ckpt.bak", "update-1.ckpt", "update-000000abc.ckpt", ".hidden"]
    for name in others:
        (tmp_path / name).touch()
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.latest() is None
    checkpoints.save({}, 5)
    assert names(checkpoints) == sorted([*others, "update-000000005.ckpt"])


@pytest.mark.parametrize("call", [Checkpoints.latest, lambda checkpoints: checkpoints.save({}, 3)])
def test_leftovers_are_ignored_and_removed(tmp_path, call):
    (tmp_path / ".update-000000009.ckpt.0badcafe.partial").write_bytes(b"half")
    (tmp_path / ".update-000000009.ckpt.partial").mkdir()
    (tmp_path / ".update-000000009.ckpt.partial" / "rank-0.safetensors").write_bytes(b"half")
    checkpoints = Checkpoints(tmp_path)
    call(checkpoints)
    assert names(checkpoints) in ([], ["update-000000003.ckpt"])


def test_a_corrupt_newest_is_told_of_and_passed_over(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    good, cut, noise = (checkpoints.save({"update": u}, u) for u in (1, 2, 3))
    shard = cut / "rank-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    (noise / "state.json").write_bytes(b"\xff" * 100)
    with pytest.warns(CheckpointWarning) as told:
        assert checkpoints.latest() == ({"update": 1}, good)
    reasons = [re.search("truncated|not a checkpoint", str(w.message))[0] for w in told]
    assert reasons == ["not a checkpoint", "truncated"]
    assert all(str(w.message).endswith(" Trying the previous checkpoint.") for w in told)
    assert all(w.filename == __file__ for w in told)
    shutil.rmtree(good)
    with pytest.warns(CheckpointWarning):
        assert checkpoints.latest() is None


def test_an_old_one_that_cannot_be_removed_is_told_of(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save({}, 1)

    def rmtree(path):
        raise PermissionError("not yours")

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    message = "update-000000001.ckpt is no longer needed but cannot be removed: .* Remove it by hand.$"
    with pytest.warns(CheckpointWarning, match=message):
        assert checkpoints.save({}, 2).exists()


def test_a_directory_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    message = "must be a directory that can be written to; found: .*. Use another directory, or fix its permissions.$"
    for below in ("file", "file/runs"):
        with pytest.raises(CheckpointError, match=message):
            Checkpoints(tmp_path / below)


def test_numbers_that_make_no_sense(tmp_path):
    with pytest.raises(ValueError, match=r"keep must be at least 1, the newest checkpoint; found 0."):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(ValueError, match=r"update must be a number of updates, 0 or more; found -1."):
        Checkpoints(tmp_path).save({}, -1)


def test_without_safetensors(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    message = r"^checkpoints need safetensors: pip install 'samplewise\[train\]'$"
    with pytest.raises(ImportError, match=message):
        write(tmp_path / "a", {})
    with pytest.raises(ImportError, match=message):
        read(tmp_path / "a")


def test_one_process_needs_no_planner_of_torch(tmp_path):
    """Its import would take longer than saving a small model."""
    code = f"""
import sys, torch
from pathlib import Path
from samplewise.loop.checkpoint import io
path = Path({str(tmp_path)!r}) / "a.ckpt"
io.write(path, {{"model": {{"weight": torch.ones(3)}}}}, rank_state={{"random": torch.get_rng_state()}})
io.read(path)
print("torch.distributed.checkpoint" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


# ----------------------------------------------------------------------------- killed, and replaced

CALLS = ("mkdir", "fsync", "rename", "rmdir", "unlink")


class Killed(BaseException):
    """Takes the place of a kill: nothing is cleaned up after it."""


def killed_at(monkeypatch, number):
    """Let the `number`-th change of the disk be the last. Returns the names of all changes."""
    calls = []

    def counted(name, original):
        def call(*given, **more):
            calls.append(name)
            if len(calls) > number:
                raise Killed
            return original(*given, **more)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
    return calls


@pytest.mark.parametrize("again", [False, True], ids=["another update", "the same update"])
def test_after_every_single_step_the_old_or_the_new_checkpoint_is_there(tmp_path, again):
    new = {"a": torch.ones(3), "update": 2}
    number, seen = 0, []
    while True:
        directory = tmp_path / f"{number}"
        old_path = Checkpoints(directory, keep=1).save({"a": torch.zeros(3), "update": 1}, 1)
        with pytest.MonkeyPatch.context() as patch:
            calls = killed_at(patch, number)
            try:
                Checkpoints(directory, keep=1).save(new, 1 if again else 2)
                done = True
            except Killed:
                done = False
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if again:
                seen.append(read(old_path)["update"])
            found, _ = newest_unchanged(directory)
            assert found["update"] in (1, 2) and torch.equal(found["a"], torch.full((3,), found["update"] - 1.0))
            assert done is False or found["update"] == 2
            assert Checkpoints(directory, keep=1).latest()[0]["update"] == found["update"]
            Checkpoints(directory, keep=1).save({"update": 3}, 3)
        assert [path.name for path in directory.iterdir()] == ["update-000000003.ckpt"]
        if done:
            break
        number += 1
    assert number > 8 and {"mkdir", "fsync", "rename"} <= set(calls)
    assert not again or (set(seen) == {1, 2} and seen == sorted(seen))


def newest_unchanged(directory):
    """The newest checkpoint, without changing anything."""
    before = sorted(path.name for path in directory.iterdir())
    found = newest_checkpoint(directory, read)
    assert sorted(path.name for path in directory.iterdir()) == before
    return found


SAVES_FOR_EVER = """
import sys, torch
from pathlib import Path
from samplewise.loop.checkpoint.directory import Checkpoints
checkpoints = Checkpoints(Path(sys.argv[1]))
found = checkpoints.latest()
update = found[0]["update"] if found else 0
while True:
    update += 1
    checkpoints.save({"update": update, "weights": torch.full((200_000,), update)}, update)
    print(update, flush=True)
"""


@pytest.mark.parametrize("attempts", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_any_moment_nothing_reported_is_lost(attempts, tmp_path):
    for attempt in range(attempts):
        process = forks.Popen(
            [sys.executable, "-W", "error", "-c", SAVES_FOR_EVER, tmp_path], stdout=subprocess.PIPE, text=True
        )
        first = process.stdout.readline()
        assert first, "it must save at least once"
        time.sleep(0.037 * attempt / attempts)
        process.kill()
        reported = int((first + process.communicate()[0]).split("\n")[-2])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            state, path = Checkpoints(tmp_path).latest()
        assert state["update"] >= reported and path.name == f"update-{state['update']:09d}.ckpt"
        assert torch.equal(state["weights"], torch.full((200_000,), state["update"]))
        assert len(names(Checkpoints(tmp_path))) <= 3  # one more if killed between writing and removing
