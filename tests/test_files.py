"""Files that are replaced as a whole, checksums, and bytes of tensors of any layout."""

import gc
import hashlib
import stat

import pytest
import safetensors.torch
import torch

from samplewise.core.files import (
    TENSOR_DTYPES,
    atomic_write,
    have_same_bytes,
    read_json,
    read_tensors,
    sha256,
    tensor_bytes,
    write_json,
    write_tensors,
)


def test_an_error_leaves_the_old_file_and_no_temporary_one(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError), atomic_write(path) as file:
        file.writelines([b"half", None])
    assert read_json(path, ValueError, "") == {"a": 1} and list(tmp_path.iterdir()) == [path]


def test_a_new_file_has_the_permissions_asked_for(tmp_path):
    with atomic_write(tmp_path / "key", mode=0o600) as file:
        file.write(b"x")
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000])
def test_a_file_that_is_not_json(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(LookupError, match=r"a.json must be readable JSON; found \w+Error: .*\. Restore it\."):
        read_json(tmp_path / "a.json", LookupError, "Restore it.")


def test_a_missing_file_is_no_broken_one(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "a.json", LookupError, "Restore it.")


def test_checksum_of_texts_bytes_and_tensors():
    expected = hashlib.sha256(b"name\0\1" + b"\1\0\3\0\2\0\4\0").hexdigest()
    assert sha256(["name", b"\0\1", torch.tensor([[1, 2], [3, 4]], dtype=torch.int16).T]) == expected


def test_bytes_are_in_row_major_order():
    values = torch.tensor([[1, 2], [3, 4]], dtype=torch.int16)
    assert bytes(tensor_bytes(values)) == b"\1\0\2\0\3\0\4\0"
    assert bytes(tensor_bytes(values.T)) == b"\1\0\3\0\2\0\4\0"
    assert bytes(tensor_bytes(values[:, ::2])) == b"\1\0\3\0"


def test_empty_and_scalar_tensors():
    assert bytes(tensor_bytes(torch.empty(0, 3))) == b""
    assert bytes(tensor_bytes(torch.tensor(True))) == b"\1"


def test_conjugates_are_resolved():
    values = torch.tensor([1 + 2j])
    assert bytes(tensor_bytes(values.conj())) == bytes(tensor_bytes(torch.tensor([1 - 2j])))


def test_contiguous_memory_is_shown_read_only_without_a_copy():
    values = torch.zeros(4, dtype=torch.uint8, requires_grad=False)
    view = tensor_bytes(values)
    values[1] = 7
    assert view[1] == 7 and view.readonly


def test_the_view_keeps_the_memory_alive():
    view = tensor_bytes(torch.arange(100_000, dtype=torch.int32))
    gc.collect()
    other = [torch.full((100_000,), -1, dtype=torch.int32) for _ in range(4)]
    assert bytes(view[400:404]) == (100).to_bytes(4, "little") and len(other) == 4


def test_comparison_of_bytes():
    values = torch.tensor([[1.0, float("nan")], [0.0, 2.0]])
    assert have_same_bytes(values, values.clone())
    assert have_same_bytes(values.T, values.T.contiguous())
    assert not have_same_bytes(values, values.T)
    assert not have_same_bytes(values, values.flatten())
    assert have_same_bytes(torch.empty(0), torch.empty(0))
    assert have_same_bytes(torch.tensor([1j]).conj(), torch.complex(torch.zeros(1), -torch.ones(1)))


def test_files_of_tensors_are_read_by_safetensors(tmp_path):
    """Every dtype; tensors with other strides, views of one memory, a number, and no elements."""
    values = torch.arange(12).view(3, 4)
    dtypes = [torch.complex64, torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool]
    dtypes += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
    assert {f"torch.{name}" for name in TENSOR_DTYPES} == set(map(str, dtypes))
    tensors = {str(dtype): values[:, :3].to(dtype) for dtype in dtypes}
    tensors |= {"transposed": values.T, "row": values[1], "number": torch.tensor(1.5), "empty": torch.ones(0, 3)}
    tensors["parameter"] = torch.nn.Parameter(torch.ones(3).double())
    write_tensors(tmp_path / "file", tensors, {"a": ["é", 1]})
    loaded = safetensors.torch.load_file(tmp_path / "file")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor.detach())
    assert read_tensors(tmp_path / "file")[1] == {"a": ["é", 1]}


def test_a_dtype_that_cannot_be_written_changes_no_file(tmp_path):
    path = tmp_path / "file"
    write_tensors(path, {"a": torch.ones(2)}, 1)
    with pytest.raises(ValueError, match=r"must have one of the dtypes .*; found complex128 for 'b'. Convert it."):
        write_tensors(path, {"a": torch.zeros(2), "b": torch.ones(2, dtype=torch.complex128)}, 2)
    assert read_tensors(path)[1] == 1 and [entry.name for entry in tmp_path.iterdir()] == ["file"]
