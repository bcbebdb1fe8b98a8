"""Makes checkpoints that look right and are not: files with the right checksums, directories as several ranks write
them, and pickles that leave a trace when they are loaded.
"""

import hashlib
import io
import json
import pickle
import sys
from contextlib import contextmanager

import numpy
import torch

from samplewise.loop.checkpoint.encoding import Encoder, to_json
from samplewise.loop.checkpoint.format import FORMAT, VERSION, Chunk, write_shard
from samplewise.loop.checkpoint.io import SHARED


class Bomb:
    """Unpickling it makes a file in the current directory."""

    def __reduce__(self):
        return (open, ("exploded", "w"))


def pickled():
    return pickle.dumps(Bomb())


def torch_saved():
    buffer = io.BytesIO()
    torch.save({"a": Bomb()}, buffer)
    return buffer.getvalue()


def object_array():
    buffer = io.BytesIO()
    numpy.save(buffer, numpy.array([Bomb()], dtype=object), allow_pickle=True)
    return buffer.getvalue()


BOMBS = {"pickle": pickled, "torch": torch_saved, "object array": object_array}

_loaded = []
_watching = []


def _audit(event, arguments):
    if _watching and event == "pickle.find_class":
        _loaded.append(arguments)


sys.addaudithook(_audit)


@contextmanager
def nothing_unpickled():
    """Python reports each class or function that a pickle names, before it is looked up."""
    _loaded.clear()
    _watching.append(True)
    try:
        yield
    finally:
        _watching.pop()
    assert _loaded == []


def write_state(path, text='{"dict":[]}', /, **changes):
    """state.json with the right checksum. `text`: the state as JSON. `changes`: values of its entries; ...: none."""
    about = {"format": FORMAT, "format_version": VERSION, "shards": [], "state": "STATE"} | changes
    about = {name: value for name, value in about.items() if value is not ...}
    digest = about.pop("sha256", None)
    text = json.dumps(about).replace('"STATE"', text)
    if digest is None:
        try:
            plain = to_json(json.loads(text))
        except (ValueError, RecursionError):  # no JSON, or NaN
            plain = text
        digest = hashlib.sha256(plain.encode()).hexdigest()
    tail = "" if changes.get("sha256") is ... else f',"sha256":{json.dumps(digest)}'
    (path / "state.json").write_text(f"{text[:-1]}{tail}}}")


def write_header(path, header, data=b"", state='{"dict":[]}', /, **changes):
    """A checkpoint with one shard that has any header. The checksums are right."""
    path.mkdir(parents=True)
    about = {"format": "pt"}
    text = header if isinstance(header, str) else json.dumps({"__metadata__": about, **header})
    text = text.replace('"ABOUT"', json.dumps(about)).encode()
    content = len(text).to_bytes(8, "little") + text + data
    (path / "rank-0.safetensors").write_bytes(content)
    write_state(path, state, **({"shards": [entry_of(path / "rank-0.safetensors")]} | changes))


def entry_of(path):
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    return {"file": path.name, "bytes": len(content), "sha256": digest, "offsets": {}}


def write_directory(path, state, /, ranks=2, change=None, text=None, **changes):
    """A checkpoint of several ranks, each of which has some rows of every tensor. `change` is given their chunks.

    text: another state, as JSON. changes: other entries of state.json.
    """
    path.mkdir(parents=True)
    encoder = Encoder()
    encoded = to_json(encoder.encode(state))
    chunks = [[] for _ in range(ranks)]
    for name, tensor in encoder.tensors.items():
        pieces = tensor.tensor_split(ranks) if tensor.dim() and encoder.paths[name][0] in SHARED else [tensor]
        start = 0
        for rank, piece in enumerate(pieces):
            offset = [start, *[0] * (tensor.dim() - 1)] if tensor.dim() else []
            if len(pieces) == 1 or len(piece):
                chunks[rank].append([name, offset, piece])
            start += len(piece) if tensor.dim() else 0
    if change is not None:
        change(chunks)
    shards = []
    for rank, own in enumerate(chunks):
        given = [Chunk(name, tensor, offset) for name, offset, tensor in own]
        shards.append(write_shard(path / f"rank-{rank}.safetensors", given))
    write_state(path, encoded if text is None else text, **({"shards": shards} | changes))
    return shards
