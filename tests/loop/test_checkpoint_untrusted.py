"""Checkpoints from an untrusted source: nothing in them runs, and one that is whole but wrong is a CheckpointError."""

import ast
import json
import os
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from forging import BOMBS, Bomb, entry_of, nothing_unpickled, pickled, write_directory, write_header, write_state
from safetensors.torch import save_file
from small import loader, make, parameters

import samplewise as sw
from samplewise.errors import CheckpointError, CheckpointWarning
from samplewise.loop.callbacks import EarlyStopping, ModelCheckpoint
from samplewise.loop.checkpoint import io
from samplewise.loop.checkpoint.directory import Checkpoints
from samplewise.loop.checkpoint.encoding import DTYPES
from samplewise.loop.checkpoint.state import check_trainer_state

SOURCE = Path(sw.__file__).parent
NEWEST = "update-000000099.ckpt"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run with one checkpoint, in which tests put a newer one. The current directory shows what a pickle did."""
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "run").fit(loader(), epochs=1)
    return tmp_path / "run"


def newest(run):
    return run / "checkpoints" / NEWEST


def state_of(run):
    return io.read(run / "checkpoints" / "update-000000003.ckpt")


def resumed(run):
    """The parameters after another epoch, and what was said about checkpoints that were passed over."""
    trainer = make(run)
    with warnings.catch_warnings(record=True) as caught, nothing_unpickled():
        warnings.simplefilter("always")
        trainer.fit(loader(), epochs=2, resume=True)
    assert not list(Path().rglob("exploded"))
    return parameters(trainer), [str(warning.message) for warning in caught]


def expected(tmp_path):
    trainer = make(tmp_path / "whole")
    trainer.fit(loader(), epochs=2)
    return parameters(trainer)


# ----------------------------------------------------------------------------------------------- nothing is unpickled


def test_only_messages_between_ranks_are_pickled():
    """Nothing in the library loads a pickle from a file, except with weights_only=True, which runs no code of it."""
    users = set()
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        restricted = {c.func for c in calls if "weights_only=True" in map(ast.unparse, c.keywords)}
        for node in set(ast.walk(tree)) - restricted:
            if isinstance(node, ast.Import) and {"dill", "joblib", "shelve"} & {a.name for a in node.names}:
                users.add(path.relative_to(SOURCE).as_posix())
            if isinstance(node, ast.Attribute) and re.match(r"pickle\.(?!dumps|Pickler)", ast.unparse(node)):
                users.add(path.relative_to(SOURCE).as_posix())
            if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "dill", "joblib", "shelve"):
                users.add(path.relative_to(SOURCE).as_posix())
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "numpy.load", "np.load"):
                users.add(path.relative_to(SOURCE).as_posix())
            if isinstance(node, ast.Name) and node.id in ("FileSystemReader", "FileSystemWriter"):
                users.add(path.relative_to(SOURCE).as_posix())
    assert users == {"parallel/collectives.py"}


def old_format(run):
    """As several ranks once wrote it, with a pickle of torch's."""
    newest(run).mkdir()
    for name in (".metadata", "__0_0.distcp", "rest.ckpt"):
        (newest(run) / name).write_bytes(pickled())


def old_file(run):
    """As one process once wrote it."""
    about = {"format": "samplewise checkpoint", "version": "1", "state": '{"dict":[]}'}
    text = json.dumps({"__metadata__": about}, separators=(",", ":")).encode()
    newest(run).write_bytes(len(text).to_bytes(8, "little") + text)


@pytest.mark.parametrize("write", [old_format, old_file])
def test_an_old_format_is_refused(run, tmp_path, write):
    write(run)
    found, messages = resumed(run)
    assert messages == [
        f"{newest(run)} must have format version 6; found 1, which this version of samplewise does not read: use the "
        "version that wrote it, or start a new run directory. Trying the previous checkpoint."
    ]
    assert torch.equal(found, expected(tmp_path))


def test_a_directory_of_several_ranks_is_resumed_without_a_pickle(run, tmp_path):
    """Though one of torch's is there."""
    write_directory(newest(run), state_of(run))
    for name in (".metadata", "__0_0.distcp", "rest.ckpt", "state.ckpt", "rank-2.safetensors"):
        (newest(run) / name).write_bytes(pickled())
    found, messages = resumed(run)
    assert messages == [] and torch.equal(found, expected(tmp_path))


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("name", ["state.json", "rank-0.safetensors", "rank-1.safetensors"])
def test_a_pickle_in_place_of_a_file_of_a_directory(run, tmp_path, name, bomb):
    write_directory(newest(run), state_of(run))
    (newest(run) / name).write_bytes(BOMBS[bomb]())
    found, messages = resumed(run)
    assert torch.equal(found, expected(tmp_path)) and len(messages) == 1
    assert f"{newest(run) / name} must be " in messages[0] and messages[0].endswith("Trying the previous checkpoint.")


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_pickle_in_place_of_a_file(run, tmp_path, bomb):
    newest(run).write_bytes(BOMBS[bomb]())
    found, messages = resumed(run)
    assert torch.equal(found, expected(tmp_path))
    assert [re.sub("(?s)found .*? It", "found It", text) for text in messages] == [
        f"{newest(run)} must be a checkpoint file written by samplewise; found It is not a checkpoint: pass another "
        "path. Trying the previous checkpoint."
    ]


@pytest.mark.parametrize("kind", ["directory", "file", "shard"])
def test_a_link_to_something_forged(run, tmp_path, kind):
    old_format(run)
    elsewhere = tmp_path / "elsewhere"
    newest(run).rename(elsewhere)
    if kind == "directory":
        newest(run).symlink_to(elsewhere)
    elif kind == "file":
        newest(run).symlink_to(elsewhere / ".metadata")
    else:
        write_directory(newest(run), state_of(run))
        (newest(run) / "rank-0.safetensors").unlink()
        (newest(run) / "rank-0.safetensors").symlink_to(elsewhere / ".metadata")
    found, messages = resumed(run)
    assert len(messages) == 1 and torch.equal(found, expected(tmp_path))
    assert (elsewhere / ".metadata").read_bytes() == pickled()


def test_removing_a_linked_checkpoint_leaves_what_it_links_to(run, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "notes.txt").write_text("mine")
    (run / "checkpoints" / "update-000000001.ckpt").symlink_to(tmp_path / "elsewhere")
    Checkpoints(run / "checkpoints", keep=1).remove_older_than(99)
    assert (tmp_path / "elsewhere" / "notes.txt").read_text() == "mine"
    assert not (run / "checkpoints" / "update-000000001.ckpt").is_symlink()


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_pickle_in_place_of_a_model(run, bomb):
    path = run / "best-loss-000000003.ckpt"
    path.write_bytes(BOMBS[bomb]())
    with nothing_unpickled(), pytest.raises(CheckpointError, match=r"must be a checkpoint file written by samplewise"):
        io.read(path)
    assert not Path("exploded").exists()


def test_bytes_in_a_state_stay_bytes(tmp_path, monkeypatch):
    """A loader or a callback may keep a pickle of its own: it is not ours to load."""
    monkeypatch.chdir(tmp_path)
    state = {"trainer": {"position": {"state": pickled()}}, "callbacks": {"Mine": {"kept": [pickled()]}}}
    io.write(tmp_path / "a.ckpt", state)
    with nothing_unpickled():
        assert io.read(tmp_path / "a.ckpt") == state
    assert not Path("exploded").exists()


def test_the_malicious_file_would_run_code(tmp_path, monkeypatch):
    import pickle

    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError), nothing_unpickled():
        pickle.loads(pickle.dumps(Bomb())).close()
    assert Path("exploded").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("name", ["state.json", "rank-1.safetensors", NEWEST])
def test_a_pipe_in_place_of_a_file_does_not_block(run, name):
    if name == NEWEST:
        path = newest(run)
    else:
        write_directory(newest(run), state_of(run))
        path = newest(run) / name
        path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=f"^{path} must be readable; found: it is not a regular file"):
        io.read(newest(run))


# ------------------------------------------------------------------------------- one file, whole but wrong: the state

TWO = torch.tensor([1.0, 2.0])
TENSOR = '{"tensor":["0","float32",[2]]}'


def forge(path, state, tensors=None):
    """A checkpoint with the right checksums that `write` would not make."""
    path.mkdir()
    shard = path / "rank-0.safetensors"
    save_file({"0": TWO} if tensors is None else tensors, shard, {"format": "pt"})
    write_state(path, state, shards=[entry_of(shard)])


def in_dict(value):
    return f'{{"dict":[["a",{value}]]}}'


def nested(depth, value):
    return "[" * depth + value + "]" * depth


WRONG_STATES = {
    "other content": ("{}", "an object with 0 keys in place of one"),
    "a list": (f"[{TENSOR}]", "list as state in place of a dict"),
    "a number": ("1", "1 as state in place of a dict"),
    "a tensor": (TENSOR, "a state of type samplewise.loop.checkpoint.encoding.TensorInfo"),
    "quint8": (in_dict('{"tensor":["0","quint8",[2]]}'), "a tensor of dtype 'quint8'"),
    "qint32": (in_dict('{"tensor":["0","qint32",[2]]}'), "a tensor of dtype 'qint32'"),
    "bits8": (in_dict('{"tensor":["0","bits8",[8]]}'), "a tensor of dtype 'bits8'"),
    "no dtype": (in_dict('{"tensor":["0","load",[2]]}'), "a tensor of dtype 'load'"),
    "a dtype that is no text": (in_dict('{"tensor":["0",null,[2]]}'), "NoneType in place of str"),
    "a dotted dtype": (in_dict('{"tensor":["0","serialization.load",[2]]}'), "a tensor of dtype 'serialization.load'"),
    "an order of other dimensions": (in_dict('{"tensor":["0","float32",[2],[1]]}'), "the order [1] of 1 dimensions"),
    "an order of too many dimensions": (
        in_dict('{"tensor":["0","float32",[2],[0,0]]}'),
        "the order [0, 0] of 1 dimensions",
    ),
    "an order that is no list": (in_dict('{"tensor":["0","float32",[2],0]}'), "a shape or offset 0"),
    "another dtype": (
        in_dict('{"tensor":["0","int32",[2]]}'),
        "a tensor stored as torch.float32 [2] in place of torch.int32",
    ),
    "a packed dtype": (
        in_dict('{"tensor":["0","complex64",[1]]}'),
        "a tensor stored as torch.float32 [2] in place of torch.complex64",
    ),
    "a shape that does not match": (
        in_dict('{"tensor":["0","float32",[3]]}'),
        "2 stored numbers of tensor '0' in place of 3",
    ),
    "another shape of as many": (
        in_dict('{"tensor":["0","float32",[1,2]]}'),
        "a chunk of shape [2] that does not fit into tensor '0' of torch.float32 and shape [1, 2]",
    ),
    "a negative size": (in_dict('{"tensor":["0","float32",[-2]]}'), "a shape or offset [-2]"),
    "a size to be inferred": (in_dict('{"tensor":["0","float32",[2,-1]]}'), "a shape or offset [2, -1]"),
    "a size that is a bool": (in_dict('{"tensor":["0","float32",[true,2]]}'), "a shape or offset [True, 2]"),
    "a size that is a float": (in_dict('{"tensor":["0","float32",[2.0]]}'), "a shape or offset [2.0]"),
    "a shape that is a number": (in_dict('{"tensor":["0","float32",2]}'), "a shape or offset 2"),
    "a huge size": (
        in_dict('{"tensor":["0","float32",[1000000000000000000]]}'),
        "in place of 1,000,000,000,000,000,000",
    ),
    "a size beyond 64 bits": (
        in_dict('{"tensor":["0","float32",[99999999999999999999]]}'),
        "in place of 99,999,999,999,999,999,999",
    ),
    "huge and empty": (in_dict('{"tensor":["0","float32",[0,99999999999999999999]]}'), "that does not fit into tensor"),
    "a huge packed size": (
        in_dict('{"tensor":["0","complex128",[1000000000000000000]]}'),
        "a tensor stored as torch.float32 [2] in place of torch.complex128",
    ),
    "a tensor twice": (
        f'{{"dict":[["a",{TENSOR}],["b",{TENSOR}]]}}',
        "tensor '0' that is used twice",
    ),
    "a tensor 20,000 times": (
        in_dict("[" + ",".join([TENSOR] * 20_000) + "]"),
        "tensor '0' that is used twice",
    ),
    "no such tensor": (in_dict('{"tensor":["1","float32",[2]]}'), "tensor '0', which the state does not use"),
    "another spelling": (in_dict('{"tensor":["٠","float32",[2]]}'), "tensor '0', which the state does not use"),
    "a name that is a number": (in_dict('{"tensor":[0,"float32",[2]]}'), "int in place of str"),
    "a tensor without shape": (in_dict('{"tensor":["0","float32"]}'), "a tensor without name, dtype and shape"),
    "a tensor that is a dict": (in_dict('{"tensor":{"a":1}}'), "a tensor without name, dtype and shape"),
    "a tensor that is not used": ('{"dict":[]}', "tensor '0', which the state does not use"),
    "a key twice": ('{"dict":[["a",1],["a",2]]}', "the duplicate key 'a'"),
    "a key of JSON twice": ('{"dict":[],"dict":[]}', "JSON with a duplicate key"),
    "a key that is a list": ('{"dict":[[[1],2]]}', "a key of type list"),
    "a key that is a float": ('{"dict":[[1.5,2]]}', "a key of type float"),
    "a key that is None": ('{"dict":[[null,2]]}', "a key of type NoneType"),
    "an item of three": ('{"dict":[["a",1,2]]}', "an entry of a dict that is not a pair"),
    "an item that is a text": ('{"dict":["ab"]}', "an entry of a dict that is not a pair"),
    "a dict that is a number": ('{"dict":1}', "int in place of list"),
    "a tuple that is a text": (in_dict('{"tuple":"ab"}'), "str in place of list"),
    "two kinds": (in_dict('{"a":1,"b":2}'), "an object with 2 keys in place of one"),
    "an unknown kind": (in_dict('{"call":"print"}'), "a value of unknown type 'call'"),
    "NaN": (in_dict("NaN"), "the number NaN in JSON"),
    "infinity": (in_dict("-Infinity"), "the number -Infinity in JSON"),
    "a float that overflows": (in_dict("1e999"), "the number 1e999 in JSON"),
    "a float as text": (in_dict('{"float":"1.5"}'), "the float '1.5'"),
    "a float that is a float": (in_dict('{"float":1.5}'), "float in place of str"),
    "bytes that are none": (in_dict('{"bytes":"?"}'), "bytes that cannot be decoded"),
    "bytes beyond ASCII": (in_dict('{"bytes":"ü"}'), "bytes that cannot be decoded"),
    "an int that is none": (in_dict('{"int":"xyz"}'), "int that cannot be decoded"),
    "an int of 5,000 digits": (in_dict("9" * 5000), "invalid JSON (Exceeds the limit"),
    "120 levels": (in_dict(nested(120, "1")), "a state of more than 100 levels"),
    "100,000 levels": ("[" * 100_000, "JSON that is nested too deeply"),
    "levels of dicts": ('{"dict":[["a",' * 110 + "1" + "]]}" * 110, "more than 100 levels|nested too deeply"),
    "cut": ('{"dict":[["a",', "invalid JSON"),
    "empty": ("", "invalid JSON"),
}


@pytest.mark.parametrize("name", WRONG_STATES)
def test_a_state_that_write_does_not_make(tmp_path, name):
    path = tmp_path / "a.ckpt"
    state, found = WRONG_STATES[name]
    forge(path, state)
    with pytest.raises(CheckpointError) as error:
        io.read(path)
    assert re.match(rf"{path}(/state\.json)? must contain exactly what was written to it; found ", str(error.value))
    assert str(error.value).endswith(". It is corrupt: use an earlier checkpoint.")
    assert any(part in str(error.value) for part in found.split("|")), str(error.value)


def test_the_forged_file_is_wrong_in_nothing_else(tmp_path):
    forge(tmp_path / "a.ckpt", in_dict(TENSOR))
    assert torch.equal(io.read(tmp_path / "a.ckpt")["a"], TWO)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_that_is_listed(tmp_path, name):
    bytes_of = torch.arange(4 * DTYPES[name].itemsize, dtype=torch.uint8) % 2
    state = {"a": bytes_of.view(DTYPES[name]).reshape(2, 2), "empty": torch.empty(0, 3, dtype=DTYPES[name])}
    io.write(tmp_path / "a.ckpt", state)
    back = io.read(tmp_path / "a.ckpt")
    assert torch.equal(back["a"].view(torch.uint8), state["a"].view(torch.uint8))
    assert back["empty"].dtype == DTYPES[name] and back["empty"].shape == (0, 3)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8, torch.qint32, torch.bits8, torch.float4_e2m1fn_x2])
def test_a_dtype_that_is_not_listed_is_not_written(tmp_path, dtype):
    if dtype in (torch.bits8, torch.float4_e2m1fn_x2):
        tensor = torch.zeros(2, dtype=torch.uint8).view(dtype)
    else:
        tensor = torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, dtype)
    with pytest.raises(
        TypeError, match=f"^a must be a plain, dense tensor with data; found .* and dtype {dtype} on cpu"
    ):
        io.write(tmp_path / "a.ckpt", {"a": tensor})
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------ one file, whole but wrong: the header

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
PAIR = '{"dict":[["a",{"tensor":["0","float32",[2]]}],["b",{"tensor":["1","float32",[2]]}]]}'


def entry(**changes):
    return {"0": {**ENTRY, **changes}}


WRONG_HEADERS = {
    "a negative offset": entry(data_offsets=[-8, 0]),
    "offsets in reverse": entry(data_offsets=[8, 0]),
    "a huge offset": entry(data_offsets=[0, 2**62]),
    "an offset beyond 64 bits": entry(data_offsets=[0, 2**70]),
    "an offset that is a float": entry(data_offsets=[0.0, 8.0]),
    "an offset that is NaN": entry(data_offsets=[0, float("nan")]),
    "one offset": entry(data_offsets=[8]),
    "no offsets": {"0": {"dtype": "F32", "shape": [2]}},
    "a shape that does not match": entry(shape=[3]),
    "a negative shape": entry(shape=[-2]),
    "a shape that overflows": entry(shape=[2**40, 2**40]),
    "a dtype that does not match": entry(dtype="F16"),
    "an unknown dtype": entry(dtype="Q8"),
    "a tensor that is a list": {"0": [1, 2]},
    "a tensor of another name": {"x": ENTRY},
    "two names": {**entry(), "zero": {**ENTRY, "data_offsets": [8, 8], "shape": [0]}},
    "no tensor": {},
    "overlapping tensors": {**entry(), "1": {**ENTRY, "data_offsets": [4, 12]}},
    "the same bytes twice": {**entry(), "1": ENTRY},
    "a gap": {**entry(), "1": {**ENTRY, "data_offsets": [12, 20]}},
    "a name twice": f'{{"__metadata__":"ABOUT","0":{json.dumps(ENTRY)},"0":{json.dumps(ENTRY)}}}',
    "a field twice": '{"__metadata__":"ABOUT","0":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "metadata twice": f'{{"__metadata__":"ABOUT","__metadata__":"ABOUT","0":{json.dumps(ENTRY)}}}',
    "metadata that is a list": '{"__metadata__":["ABOUT"]}',
    "no metadata": json.dumps(entry()),
    "no JSON": '{"__metadata__":"ABOUT",',
    "deep": '{"__metadata__":"ABOUT","0":' + "[" * 50_000,
    "no UTF-8": '{"__metadata__":"ABOUT","\ud800":1}'.replace("\ud800", "\\ud800"),
}
WRONG_ABOUTS = {
    "no version": {"format_version": ...},
    "a version that is a list": {"format_version": [1]},
    "a version of the past": {"format_version": 0},
    "a version that is no number": {"format_version": "one"},
    "a version of many digits": {"format_version": int("9" * 4000)},
    "no checksum": {"sha256": ...},
    "a checksum that is a list": {"sha256": []},
    "a checksum of another text": {"sha256": "0" * 64},
    "no state": {"state": ...},
    "a state that is no dict": {"state": 5},
    "another format": {"format": "pt"},
    "a format that is a dict": {"format": {}},
    "a shard that is not described": {"shards": [{}]},
}


@pytest.mark.parametrize("name", WRONG_HEADERS)
def test_a_header_that_write_does_not_make(tmp_path, name):
    path = tmp_path / "a.ckpt"
    data = bytes(8) if len(WRONG_HEADERS[name]) < 2 else bytes(20)
    write_header(path, WRONG_HEADERS[name], data, PAIR if "1" in WRONG_HEADERS[name] else in_dict(TENSOR))
    with pytest.raises(CheckpointError, match=REFUSED):
        io.read(path)


REFUSED = (
    r"^(?s:.*) must (contain exactly what was written to it; found .*\. It is corrupt: use an earlier checkpoint\."
    r"|be \d+ bytes long; found \d+\. It is truncated: .*\."
    r"|be a checkpoint file written by samplewise; found .*\. It is not a checkpoint: pass another path\."
    r"|have format version 6; found .*, which this version of samplewise does not read: .*\.)$"
)


@pytest.mark.parametrize("name", WRONG_ABOUTS)
def test_metadata_that_write_does_not_make(tmp_path, name):
    path = tmp_path / "a.ckpt"
    write_header(path, entry(), bytes(8), in_dict(TENSOR), **WRONG_ABOUTS[name])
    with pytest.raises(CheckpointError, match=REFUSED):
        io.read(path)


def test_the_forged_header_is_wrong_in_nothing_else(tmp_path):
    write_header(tmp_path / "a.ckpt", entry(), bytes(8), in_dict(TENSOR))
    assert torch.equal(io.read(tmp_path / "a.ckpt")["a"], torch.zeros(2))


@pytest.mark.parametrize("version", [7, 1000000])
def test_a_newer_version_is_refused(tmp_path, version):
    write_header(tmp_path / "a.ckpt", {}, format_version=version)
    with pytest.raises(CheckpointError) as error:
        io.read(tmp_path / "a.ckpt")
    assert str(error.value) == (
        f"{tmp_path / 'a.ckpt'} must have format version 6; found {version}, which this version of samplewise does not "
        "read: it was written by a newer one; upgrade with pip install --upgrade samplewise."
    )


# ------------------------------------------------------------------------------------------------ a directory of ranks


def model_state():
    return {"model": {"weight": torch.arange(12.0).reshape(4, 3), "bias": torch.arange(4)}, "update": 3}


def test_chunks_come_back_whole(tmp_path):
    for ranks in (1, 2, 3, 5):
        write_directory(tmp_path / f"{ranks}", model_state(), ranks)
        back = io.read(tmp_path / f"{ranks}")
        assert list(back) == ["model", "update"] and back["update"] == 3
        assert all(torch.equal(back["model"][name], t) for name, t in model_state()["model"].items())


def overlap(chunks):
    chunks[1][0][1] = [1, 0]


def out_of_bounds(chunks):
    chunks[1][0][1] = [3, 0]


def fewer_dimensions(chunks):
    chunks[1][0][1] = [2]


def negative_offset(chunks):
    chunks[0][0][1] = [-1, 0]


def offset_of_text(chunks):
    chunks[0][0][1] = ["0", 0]


def offset_of_nan(chunks):
    chunks[0][0][1] = [float("nan"), 0]


def missing_chunk(chunks):
    del chunks[1][0]


def missing_tensor(chunks):
    for own in chunks:
        del own[1]


def chunk_twice(chunks):
    chunks[1][0] = list(chunks[0][0])


def chunk_of_other_rows(chunks):
    chunks[1][0][2] = torch.zeros(1, 3)


def chunk_of_other_dtype(chunks):
    chunks[1][0][2] = chunks[1][0][2].double()


def chunk_of_no_tensor(chunks):
    chunks[0].append(["more", [0], torch.zeros(2)])


def chunk_of_other_name(chunks):
    chunks[0][0][0] = "0"


WRONG_CHUNKS = {
    overlap: "chunks of tensor 'model.weight' that overlap",
    out_of_bounds: "a chunk of shape [2, 3] that does not fit into tensor 'model.weight' of torch.float32 and shape "
    "[4, 3]",
    fewer_dimensions: "a chunk of shape [2, 3] that does not fit into tensor 'model.weight' of torch.float32 and shape "
    "[4, 3]",
    negative_offset: "a shape or offset [-1, 0]",
    offset_of_text: "a shape or offset ['0', 0]",
    offset_of_nan: "the number NaN in JSON",
    missing_chunk: "6 stored numbers of tensor 'model.weight' in place of 12",
    missing_tensor: "0 stored numbers of tensor 'model.bias' in place of 4",
    chunk_twice: "a duplicate chunk of tensor 'model.weight'",
    chunk_of_other_rows: "9 stored numbers of tensor 'model.weight' in place of 12",
    chunk_of_other_dtype: "a tensor stored as torch.float64 [2, 3] in place of torch.float32",
    chunk_of_no_tensor: "tensor 'more', which the state does not use",
    chunk_of_other_name: "tensor '0', which the state does not use",
}


@pytest.mark.parametrize("change", WRONG_CHUNKS, ids=lambda change: change.__name__)
def test_chunks_that_are_not_those_of_the_tensor(tmp_path, change):
    write_directory(tmp_path / "a.ckpt", model_state(), change=change)
    with pytest.raises(CheckpointError) as error:
        io.read(tmp_path / "a.ckpt")
    assert re.sub(r"a\.ckpt/[\w.-]+ ", "a.ckpt ", str(error.value)) == (
        f"{tmp_path / 'a.ckpt'} must contain exactly what was written to it; found {WRONG_CHUNKS[change]}. It is "
        "corrupt: use an earlier checkpoint."
    )


def shards_with(**changes):
    """The shards of `model_state()` on two ranks, the first with other values; ...: without one."""

    def change(shards):
        changed = {name: value for name, value in (shards[0] | changes).items() if value is not ...}
        return [changed, *shards[1:]]

    return change


def tensor_of(name, dtype, shape):
    return json.dumps({"tensor": [name, dtype, shape]})


WEIGHT = tensor_of("model.weight", "float32", [4, 3])
BIAS = tensor_of("model.bias", "int64", [4])
HUGE = f'{{"dict":[["model",{tensor_of("model.weight", "float32", [10**12, 3])}],["bias",{BIAS}]]}}'
TWICE = f'{{"dict":[["a",{WEIGHT}],["b",{WEIGHT}]]}}'
WRONG_CONTENT = {
    "no shards": ({"shards": ...}, "no shards"),
    "shards that are a number": ({"shards": 2}, "2 as shards in place of a list"),
    "a shard that is a number": (
        {"shards": [1]},
        "1 as shards.0 in place of a dict",
    ),
    "no list of shards": ({"shards": []}, "0 stored numbers of tensor 'model.weight' in place of 12"),
    "no state": ({"state": ...}, "no state"),
    "a state that is no JSON": ({"text": "{"}, "invalid JSON"),
    "a huge shape": ({"text": HUGE}, "12 stored numbers of tensor 'model.weight' in place of 3,000,000,000,000"),
    "a tensor twice": ({"text": TWICE}, "tensor 'model.weight' that is used twice"),
    "a tensor that is not stored": (
        {"text": f'{{"dict":[["w",{WEIGHT}],["b",{BIAS}],["c",{tensor_of("c", "float32", [2])}]]}}'},
        "0 stored numbers of tensor 'c' in place of 2",
    ),
    "a tensor that is not used": ({"text": in_dict(WEIGHT)}, "tensor 'model.bias', which the state does not use"),
    "a path as file": (
        shards_with(file="../b.ckpt/rank-0.safetensors"),
        "the file name '../b.ckpt/rank-0.",
    ),
    "an absolute path as file": (shards_with(file="/etc/passwd"), "the file name '/etc/passwd' in place of"),
    "the file of another rank": (shards_with(file="rank-1.safetensors"), "the file name 'rank-1.safetensors' in place"),
    "a file that is a number": (shards_with(file=0), "0 as shards.0.file in place of a text"),
    "no file": (shards_with(file=...), "no shards.0.file"),
    "fewer bytes": (shards_with(bytes=8), "bytes in place of 8"),
    "bytes that are negative": (shards_with(bytes=-1), "-1 as shards.0.bytes in place of a whole number, 0 or more"),
    "bytes that are a text": (shards_with(bytes="8"), "'8' as shards.0.bytes in place of a whole number, 0 or more"),
    "another checksum": (shards_with(sha256="0" * 64), "another checksum"),
    "a checksum that is a list": (shards_with(sha256=[]), "list as shards.0.sha256 in place of a text"),
    "no checksum": (shards_with(sha256=...), "no shards.0.sha256"),
    "no offsets": (shards_with(offsets=...), "no shards.0.offsets"),
    "offsets that are a list": (shards_with(offsets=[]), "list as shards.0.offsets in place of a dict"),
    "an offset that is a number": (shards_with(offsets={"model.weight": 0}), "a shape or offset 0"),
    "an offset of no tensor": (shards_with(offsets={"more": [0]}), "an offset of 'more', which is not stored"),
    "a huge offset": (shards_with(offsets={"model.weight": [10**30, 0]}), "that does not fit into tensor"),
}


@pytest.mark.parametrize("name", WRONG_CONTENT)
def test_a_directory_whose_state_is_of_another_kind(tmp_path, name):
    changes, found = WRONG_CONTENT[name]
    shards = write_directory(tmp_path / "b.ckpt", model_state())
    changes = {"shards": changes(shards)} if callable(changes) else changes
    write_directory(tmp_path / "a.ckpt", model_state(), **changes)
    with pytest.raises(CheckpointError) as error:
        io.read(tmp_path / "a.ckpt")
    assert str(error.value).endswith(". It is corrupt: use an earlier checkpoint.")
    assert any(part in str(error.value) for part in found.split("|")), str(error.value)


@pytest.mark.parametrize("version", [1, 2, 5, -1, None, "6", [6]])
def test_another_version_of_a_directory_is_refused(tmp_path, version):
    write_directory(tmp_path / "a.ckpt", model_state(), format_version=version)
    with pytest.raises(CheckpointError) as error:
        io.read(tmp_path / "a.ckpt")
    assert str(error.value) == (
        f"{tmp_path / 'a.ckpt'} must have format version 6; found {'none' if version is None else repr(version)}, "
        "which this version of samplewise does not read: use the version that wrote it, or start a new run directory."
    )


def test_a_version_that_is_nan_is_no_json(tmp_path):
    write_directory(tmp_path / "a.ckpt", model_state(), format_version=float("nan"))
    with pytest.raises(CheckpointError, match=r"found the number NaN in JSON\. It is corrupt"):
        io.read(tmp_path / "a.ckpt")


def test_a_state_that_is_too_long_is_not_read(tmp_path):
    write_directory(tmp_path / "a.ckpt", model_state())
    os.truncate(tmp_path / "a.ckpt" / "state.json", 10**9)  # no blocks are allocated
    with pytest.raises(CheckpointError, match=r"state.json must be a checkpoint file .*; found a file that is too"):
        io.read(tmp_path / "a.ckpt")


def test_a_file_of_another_checkpoint_is_refused(tmp_path):
    """Both are whole; together they are no state that ever was."""
    other = model_state()
    other["model"]["weight"] = -other["model"]["weight"]
    write_directory(tmp_path / "a.ckpt", model_state())
    write_directory(tmp_path / "b.ckpt", other)
    name = "rank-1.safetensors"
    (tmp_path / "a.ckpt" / name).write_bytes((tmp_path / "b.ckpt" / name).read_bytes())
    with pytest.raises(
        CheckpointError, match=r"rank-1.safetensors must contain exactly what was .*; found another checksum\. It is"
    ):
        io.read(tmp_path / "a.ckpt")


def test_an_empty_directory(tmp_path):
    (tmp_path / "a.ckpt").mkdir()
    with pytest.raises(CheckpointError, match=r"state.json must be readable; found: .*No such file"):
        io.read(tmp_path / "a.ckpt")


# ---------------------------------------------------------------------------------------------- the state of a trainer


def places(state, place=()):
    """The keys of a state, at every level, that the trainer needs."""
    for key, value in state.items():
        yield (*place, key)
        if isinstance(value, dict) and key in (
            "trainer",
            "classes",
            "step",
            "counters",
            "precision",
            "window",
            "position",
        ):
            yield from places(value, (*place, key))


OPTIONAL = {
    ("step", "microbatch"),
    ("step", "memory"),
    ("step", "layouts"),
    ("step", "transforms"),
    ("step", "sizes"),
    ("trainer", "data"),
    ("trainer", "position", "state"),
    ("meters", "lr"),
    ("step", "precision"),
}


def changed(state, place, value=...):
    """A copy with another value at a place, or without it."""
    key, *rest = place
    if isinstance(state, list):
        return [changed(item, rest, value) if k == key else item for k, item in enumerate(state)]
    if rest:
        return {**state, key: changed(state[key], rest, value)}
    return {name: old for name, old in state.items() if name != key} if value is ... else {**state, key: value}


def test_every_key_that_is_missing_is_named(run):
    state = state_of(run)
    seen = 0
    for place in places(state):
        if place in OPTIONAL:
            continue
        with pytest.raises(CheckpointError) as error:
            check_trainer_state(run, changed(state, place))
        assert str(error.value) == (
            f"{run} must contain the state of a trainer; found no {'.'.join(place)}. It was written for another "
            "purpose: use an earlier checkpoint."
        )
        seen += 1
    assert seen > 25
    check_trainer_state(run, state)


COUNTS = [
    ("trainer", "epoch"),
    ("trainer", "log_bytes"),
    ("trainer", "samples_used"),
    ("trainer", "position", "batches"),
    ("trainer", "position", "batch_offset"),
    ("step", "counters", "updates"),
    ("step", "counters", "samples"),
    ("step", "counters", "epochs"),
    ("step", "precision", "since_change"),
    ("meters", "lines", "samples"),
]


@pytest.mark.parametrize("value", [float("nan"), -1, 1.5, True, "3", [3]], ids=str)
@pytest.mark.parametrize("place", COUNTS, ids=".".join)
def test_counters_that_are_no_counts(run_state, place, value):
    with pytest.raises(
        CheckpointError, match=rf"found .* as {re.escape('.'.join(place))} in place of a whole number, 0 or"
    ):
        check_trainer_state(Path("a.ckpt"), changed(run_state, place, value))


@pytest.fixture(scope="module")
def run_state(tmp_path_factory):
    run = tmp_path_factory.mktemp("state")
    make(run).fit(loader(), epochs=1)
    return state_of(run)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), None, "1"], ids=str)
def test_a_loss_scale_that_is_none(run_state, value):
    with pytest.raises(CheckpointError, match=r"as step.precision.scale in place of a finite number above 0"):
        check_trainer_state(Path("a.ckpt"), changed(run_state, ("step", "precision", "scale"), value))


WRONG_RANKS = {
    "no state of a rank": [],
    "no per_rank.0.random": [{}, {"random": 1}],
    "list as per_rank.0 in place of a dict, or None": [[]],
    "2 as per_rank.0.random in place of a dict": [{"random": 2}],
    "3 as per_rank.0.window in place of a dict": 3,
}


@pytest.mark.parametrize("found", WRONG_RANKS)
def test_states_of_ranks_that_are_none(run_state, found):
    value = WRONG_RANKS[found]
    if value == 3:
        value = [{**run_state["per_rank"][0], "window": 3}]
    with pytest.raises(CheckpointError) as error:
        check_trainer_state(Path("a.ckpt"), changed(run_state, ("per_rank",), value))
    assert f"must contain the state of a trainer; found {found}." in str(error.value)


OTHER_CONTENT = {
    "a model": {"model": {"0.weight": TWO}, "update": 3},
    "nothing": {},
    "numbers": {"a": 1},
    "lists for dicts": {"trainer": [], "classes": [], "model": []},
}


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("name", OTHER_CONTENT)
@pytest.mark.parametrize("write", [io.write, write_directory])
def test_a_checkpoint_of_other_content_is_passed_over(run, tmp_path, name, write):
    write(newest(run), OTHER_CONTENT[name])
    found, messages = resumed(run)
    assert len(messages) == 1 and messages[0].startswith(f"{newest(run)} must contain the state of a trainer; found ")
    assert torch.equal(found, expected(tmp_path))


def test_nothing_but_other_content(run):
    for path in (run / "checkpoints").iterdir():
        shutil.rmtree(path)
    io.write(newest(run), {"a": 1})
    log = (run / "log.jsonl").read_bytes()
    message = "^resuming needs a readable checkpoint; found none among 1 in "
    with pytest.warns(CheckpointWarning, match="found no trainer"), pytest.raises(CheckpointError, match=message):
        make(run).fit(loader(), epochs=2, resume=True)
    assert (run / "log.jsonl").read_bytes() == log


UNFIT = {
    "a model of other shapes": (("model", "0.weight"), torch.zeros(3, 3), "model"),
    "a model with other names": (("model",), {"weight": TWO}, "model"),
    "an optimizer without groups": (("optimizer", "param_groups"), ..., "optimizer"),
    "an optimizer whose groups are numbers": (("optimizer", "param_groups"), [1], "optimizer"),
    "an optimizer state that is a list": (("optimizer", "state"), [1], "optimizer"),
    "a random state of other size": (
        ("per_rank", 0, "random", "torch"),
        torch.zeros(3, dtype=torch.uint8),
        "random state",
    ),
    "a random state of Python that is none": (("per_rank", 0, "random", "python"), (3, "x", None), "random state"),
    "a position with another field": (("trainer", "position", "more"), 1, "loader"),
    "data that is a number": (("trainer", "data"), 5, "loader"),
    "data of a rank that is a text": (("trainer", "data"), ["text"], "loader"),
    "data that is a dict": (("trainer", "data"), {"batch size": 3}, "loader"),
    "compiled code that is none": (("step", "compiling"), {}, "step"),
    "window sums of no parameter": (("step", "window", "gradient_sums"), {"none": TWO}, "step"),
    "a counter that there is not": (("step", "counters", "more"), 1, "step"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_state_that_does_not_fit_is_named(run, name):
    place, value, what = UNFIT[name]
    io.write(newest(run), changed(state_of(run), place, value))
    log = (run / "log.jsonl").read_bytes()
    message = (
        rf"^a checkpoint must fit the {what} of the run that it is loaded into; found (\w+: |'[\w.]+' with ).*\. Use "
        rf"the {what} that the run was saved with, or start a new run directory\.$"
    )
    with pytest.raises(CheckpointError, match=message):
        make(run).fit(loader(), epochs=2, resume=True)
    assert (run / "log.jsonl").read_bytes() == log and newest(run).exists()


# ----------------------------------------------------------------------------------------------------------- callbacks


@pytest.mark.parametrize("name", ["../precious.ckpt", "/best-a.ckpt", "precious.txt", "best-/../x.ckpt", "", 5, None])
def test_a_checkpoint_cannot_name_files_to_be_removed(tmp_path, name):
    callback = ModelCheckpoint(best=1)
    with pytest.raises(ValueError, match=r"as names.0 in place of the name of a checkpoint best-\*\.ckpt$"):
        callback.load_state_dict({"values": [1.0], "names": [name]})
    assert callback.best_models == []


def test_a_resumed_run_does_not_remove_a_file_that_a_checkpoint_names(tmp_path):
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    run = tmp_path / "run"
    make(run, [ModelCheckpoint(best=1)]).fit(loader(), validate=loader(), epochs=1)
    forged = {"values": [1e9], "names": [os.path.relpath(precious, run)]}
    io.write(newest(run), changed(state_of(run), ("callbacks", "ModelCheckpoint"), forged))
    message = (
        r"^a checkpoint must fit the callbacks of the run .* in place of the name of a checkpoint best-\*\.ckpt\. Use"
    )
    with pytest.raises(CheckpointError, match=message):
        make(run, [ModelCheckpoint(best=1)]).fit(loader(), validate=loader(), epochs=2, resume=True)
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("state", [{"best": "x", "waited": 0}, {"best": 1.0, "waited": -1}, {"best": 1.0}])
def test_early_stopping_with_a_state_that_is_not_its_own(state):
    with pytest.raises(ValueError, match=r"^(no waited|.* in place of a)"):
        EarlyStopping().load_state_dict(state)
