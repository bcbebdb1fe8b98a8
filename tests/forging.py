"""Makes checkpoints that look right and are not: files with the right checksum, directories as several ranks write
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

from samplewise.loop.checkpoint import directory, file
from samplewise.loop.checkpoint.encoding import encode


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


def write_header(path, header, data=b"", about=None):
    """A safetensors file with any header. `about`: what its metadata states; the checksum is added."""
    about = {"format": file.FORMAT, "version": str(file.VERSION), "state": '{"dict":[]}'} | (about or {})
    text = about["state"]
    about.setdefault("sha256", hashlib.sha256(text.encode() + data).hexdigest() if isinstance(text, str) else "")
    given = {name: value for name, value in about.items() if value is not None}
    text = header if isinstance(header, str) else json.dumps({"__metadata__": given, **header})
    text = text.replace('"ABOUT"', json.dumps(given)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_directory(path, state, ranks=2, change=None, **changes):
    """A checkpoint of several ranks, each of which has some rows of every tensor. `change` is given their chunks."""
    path.mkdir(parents=True)
    large, tensors = encode({name: state[name] for name in directory.LARGE if name in state})
    rest, small = encode({name: state[name] for name in state if name not in directory.LARGE})
    chunks = [[] for _ in range(ranks)]
    for name, tensor in enumerate(tensors):
        pieces = tensor.tensor_split(ranks) if tensor.dim() else [tensor]
        start = 0
        for rank, piece in enumerate(pieces):
            offset = [start, *[0] * (tensor.dim() - 1)] if tensor.dim() else []
            if len(pieces) == 1 or len(piece):
                chunks[rank].append([str(name), offset, piece])
            start += len(piece) if tensor.dim() else 0
    if change is not None:
        change(chunks)
    digests = [file.write(path / f"rank-{rank}.ckpt", {"chunks": own}) for rank, own in enumerate(chunks)]
    about = {"version": 2, "large": large, "owns": None, "rest": rest, "small": small, "shards": digests} | changes
    file.write(path / "state.ckpt", {name: value for name, value in about.items() if value is not ...})
