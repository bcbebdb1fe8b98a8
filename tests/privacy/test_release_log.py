"""Releases: their digests, and their log: replay, divergence, branches, files."""

import hashlib
import json
import os

import pytest
import torch
from private_runs import data, make, mask, net, plan, train
from torch.utils.data import TensorDataset

from samplewise.core.files import tensor_bytes
from samplewise.errors import PrivacyError
from samplewise.privacy import release_log
from samplewise.privacy.release_log import (
    LOG_FILE,
    Release,
    ReleaseChecksum,
    ReleaseLog,
    load_secret,
    remove_secret,
    save_secret,
)
from samplewise.privacy.rng import Secret


def opened(directory, settings=None):
    log = ReleaseLog()
    log.open(directory, settings or {"clip": 1.0})
    return log


def release(update, digest="a", branch=0, key="k"):
    return Release(update, branch, key, f"{digest}{update}")


def test_releases_are_counted_once(tmp_path):
    log = opened(tmp_path)
    for update in range(3):
        assert not log.is_replay(release(update))
        log.add(release(update))
        assert log.is_replay(release(update))
    log.close()
    again = opened(tmp_path)
    assert again.count == 3 and again.is_replay(release(2)) and not again.is_replay(release(3))
    assert not again.is_replay(release(2, branch=1)) and not again.is_replay(release(2, key="other"))
    again.add(release(2, branch=1))
    assert again.count == 4
    again.close()


def test_another_sum_with_the_same_noise_is_refused(tmp_path):
    log = opened(tmp_path)
    log.add(release(0))
    with pytest.raises(PrivacyError, match="update 0 must be repeated exactly, because its noise was used before"):
        log.is_replay(release(0, digest="b"))
    assert log.diverged == {("k", 0)} and log.count == 1
    log.close()
    again = opened(tmp_path)
    assert again.diverged == {("k", 0)} and again.count == 1
    again.close()


def test_releases_are_on_disk_when_add_returns(tmp_path):
    log = opened(tmp_path)
    log.add(release(0))
    first, second = (tmp_path / LOG_FILE).read_text().splitlines()  # read by another file object, without a close
    assert json.loads(first)["settings"] == {"clip": 1.0}
    assert json.loads(second) == {"update": 0, "branch": 0, "key": "k", "digest": "a0"}
    log.close()


@pytest.mark.parametrize("cut", range(1, 12, 5))
def test_a_line_that_is_cut_off_is_removed(tmp_path, cut):
    log = opened(tmp_path)
    log.add(release(0))
    log.add(release(1))
    log.close()
    path = tmp_path / LOG_FILE
    path.write_bytes(path.read_bytes()[:-cut])
    again = opened(tmp_path)
    assert again.count == 1
    again.add(release(1))
    again.close()
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("version", [None, 1, 3, "2"])
def test_a_log_of_another_version_is_refused(tmp_path, version):
    first = {"settings": {"clip": 1.0}} | ({} if version is None else {"format_version": version})
    content = f'{json.dumps(first)}\n{LINES[1]}\n{{"update": 1'
    (tmp_path / LOG_FILE).write_text(content)
    shown = "none" if version is None else repr(version)
    with pytest.raises(PrivacyError, match=rf"privacy\.jsonl must have format version 2; found {shown}, which this"):
        opened(tmp_path)
    assert (tmp_path / LOG_FILE).read_text() == content


def test_settings_are_compared(tmp_path):
    opened(tmp_path, {"clip": 1.0, "updates": 3}).close()
    with pytest.raises(PrivacyError, match=r"found clip=2.0 after 1.0. Use these, or start a new run directory"):
        opened(tmp_path, {"clip": 2.0, "updates": 3})


def test_settings_of_another_format_are_refused(tmp_path):
    pytest.importorskip("dp_accounting")
    settings = {"clip": 0.5, "unit": "user", "mode": "flat", "by": None, "samples": None}
    opened(tmp_path, {**plan()._settings, **settings}).close()
    with pytest.raises(PrivacyError, match=r"found clip='clip\(0.5\)' after 0.5. Use these, or start a new run"):
        opened(tmp_path, plan()._settings)


def test_settings_of_a_plan_survive_json():
    pytest.importorskip("dp_accounting")
    settings = plan(by="parameter", clip=1 / 3, sample_rate=0.1 + 0.2)._settings
    assert json.loads(json.dumps(settings)) == settings


def test_assumed_releases():
    log = ReleaseLog()
    log.assume(5)
    log.assume(3)
    assert log.count == 5
    log.add(release(5))
    assert log.count == 6


def test_key_files(tmp_path):
    assert load_secret(tmp_path) is None
    secret = Secret.new()
    save_secret(tmp_path / "run", secret)
    assert load_secret(tmp_path / "run") == secret
    assert (tmp_path / "run" / "privacy.key").stat().st_mode & 0o777 == 0o600
    remove_secret(tmp_path / "run")
    remove_secret(tmp_path / "run")  # no error if there is none
    assert load_secret(tmp_path / "run") is None


# --- damaged files ----------------------------------------------------------------------------------------------------

LINES = ['{"format_version": 2, "settings": {"clip": 1.0}}', '{"update": 0, "branch": 0, "key": "k", "digest": "a0"}']
ODD = {
    "an empty line": (2, ""),
    "no object": (2, "[1, 2]"),
    "a number": (2, "3"),
    "null": (2, "null"),
    "deep": (2, "[" * 100_000),
    "no digest": (2, '{"update": 0, "branch": 0, "key": "k"}'),
    "an update that is a text": (2, '{"update": "0", "branch": 0, "key": "k", "digest": "a0"}'),
    "an update that is a bool": (2, '{"update": true, "branch": 0, "key": "k", "digest": "a0"}'),
    "a negative update": (2, '{"update": -1, "branch": 0, "key": "k", "digest": "a0"}'),
    "a branch that is a list": (2, '{"update": 0, "branch": [], "key": "k", "digest": "a0"}'),
    "a key that is null": (2, '{"update": 0, "branch": 0, "key": null, "digest": "a0"}'),
    "a note without a key": (2, '{"diverged": 0, "branch": 0}'),
    "not UTF-8": (2, b'{"update": 0, "branch": 0, "key": "\xff", "digest": "a0"}'),
    "no settings": (1, LINES[1]),
    "settings that are a list": (1, '{"settings": []}'),
    "other settings": (1, "{}"),
    "zeros": (1, "\0" * 40),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_lines_are_refused(tmp_path, name):
    number, line = ODD[name]
    lines = [text.encode() for text in LINES]
    lines[number - 1] = line if isinstance(line, bytes) else line.encode()
    path = tmp_path / LOG_FILE
    content = b"\n".join(lines) + b'\n{"update": 1'  # and a last line that is cut off
    path.write_bytes(content)
    with pytest.raises(
        PrivacyError, match=rf"(?s)must have one JSON object per line, .*in line {number}, .*Restore it"
    ):
        opened(tmp_path)
    assert path.read_bytes() == content


def test_two_sums_with_the_same_noise_in_a_log(tmp_path):
    path = tmp_path / LOG_FILE
    path.write_text("\n".join([*LINES, LINES[1], ""]))
    again = opened(tmp_path)
    assert again.count == 1  # written twice, released once
    again.close()
    path.write_text("\n".join([*LINES, LINES[1].replace("a0", "b0"), ""]))
    with pytest.raises(PrivacyError, match="must have one release for each draw of noise; found two sums for update 0"):
        opened(tmp_path)


def test_a_log_that_is_a_directory(tmp_path):
    (tmp_path / LOG_FILE).mkdir()
    with pytest.raises(PrivacyError, match=r"privacy\.jsonl must be a file that can be read; found: .*Restore it"):
        opened(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\n", b"short", b"x" * 31, b"x" * 33, b"x" * 64])
def test_a_damaged_key(tmp_path, content):
    (tmp_path / "privacy.key").write_bytes(content)
    message = (
        rf"must be the key of the run, 32 bytes; found: .*found {len(content)} bytes.* or remove it: draws and noise"
    )
    with pytest.raises(PrivacyError, match=message):
        load_secret(tmp_path)


def test_a_key_that_is_a_directory(tmp_path):
    (tmp_path / "privacy.key").mkdir()
    with pytest.raises(PrivacyError, match=r"must be the key of the run, 32 bytes; found: .*[Dd]irectory"):
        load_secret(tmp_path)


@pytest.mark.parametrize("point", ["fsync", "replace"])
def test_a_crash_while_the_key_is_written(tmp_path, monkeypatch, point):
    """The earlier key stays, or there is none; what is left of the new one can be read by its owner only."""
    before = Secret.new()
    for existing in (None, before):
        if existing is not None:
            save_secret(tmp_path, existing)
        with monkeypatch.context() as patched:
            patched.setattr(os, point, lambda *arguments: (_ for _ in ()).throw(OSError("the machine stops here")))
            with pytest.raises(OSError, match="stops here"):
                save_secret(tmp_path, Secret.new())
        assert load_secret(tmp_path) == existing
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())
    after = Secret.new()
    save_secret(tmp_path, after)
    assert load_secret(tmp_path) == after and [path.name for path in tmp_path.iterdir()] == ["privacy.key"]


def test_no_part_of_a_key_stays(tmp_path):
    (tmp_path / ".privacy.key.partial").write_bytes(b"x" * 32)
    remove_secret(tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- digests ----------------------------------------------------------------------------------------------------------

SECRET = Secret.from_seed(0)


def by_hand(tensors, lanes=2, chunk=release_log.CHUNK):
    """Digest in integers of Python."""

    def draw(rows, columns):
        content = hashlib.shake_256(SECRET.derive(f"checksum weights {rows} {columns}", 32)).digest(8 * rows * columns)
        numbers = [int.from_bytes(content[i : i + 8], "little") for i in range(0, len(content), 8)]
        return [numbers[i * columns : (i + 1) * columns] for i in range(rows)]

    words = []
    for tensor in tensors:
        content = bytes(tensor_bytes(tensor))
        content += bytes(-len(content) % 4)
        words += [int.from_bytes(content[i : i + 4], "little", signed=True) for i in range(0, len(content), 4)]
    chunks = [words[i : i + chunk] for i in range(0, len(words), chunk)]
    outer = draw(len(chunks), lanes)
    sums = [0] * lanes
    for j, numbers in enumerate(chunks):
        for lane, (first, *weights) in enumerate(draw(lanes, chunk + 1)):
            inner = first + sum(a * w for a, w in zip(weights, numbers, strict=False))
            sums[lane] += outer[j][lane] * signed(inner % 2**64 >> 32, 32)
    checksums = [[signed(total % 2**64, 64) for total in sums]] if words else []
    return SECRET.derive(f"release {[t.nbytes for t in tensors]} {checksums}", 16).hex()


def signed(number, bits):
    return number - (number >> bits - 1 << bits)


def tensors(*sizes, dtype=torch.float32):
    return [torch.randn(size, generator=torch.Generator().manual_seed(len(sizes)), dtype=dtype) for size in sizes]


CASES = {
    "small ones": lambda: tensors(3, (2, 5), 1, 0, 7),
    "one chunk": lambda: tensors(release_log.CHUNK),
    "several chunks": lambda: tensors(release_log.CHUNK - 1, 2, (3, release_log.CHUNK), 5),
    "several pieces": lambda: tensors(3, release_log.PIECE, release_log.PIECE - 3, 1),
    "float64": lambda: tensors(5, 4097, dtype=torch.float64),
    "16 bits": lambda: tensors(5, 6, 1, dtype=torch.bfloat16),
    "16 bits, not aligned": lambda: [tensors(8, dtype=torch.float16)[0][1:7]],
    "8 bits": lambda: [torch.arange(n, dtype=torch.uint8) for n in (1, 2, 3, 4, 5)],
    "complex": lambda: tensors(3, (2, 2), dtype=torch.complex64),
    "conjugated": lambda: [
        tensors(4, dtype=torch.complex128)[0].conj(),
        tensors(4, dtype=torch.complex64)[0].conj().imag,
    ],
    "transposed": lambda: [tensors((3, 4))[0].t(), tensors((2, 3, 4, 5))[0].to(memory_format=torch.channels_last)],
    "strides": lambda: [
        tensors(9, dtype=torch.float64)[0][::2],
        torch.ones(9, dtype=torch.float64).as_strided((1,), (7,)),
    ],
    "not finite": lambda: [torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])],
    "nothing": list,
    "no elements": lambda: [torch.zeros(0), torch.zeros(2, 0)],
}


@pytest.mark.parametrize("name", CASES)
def test_digests_by_hand(name):
    values = CASES[name]()
    checksum = ReleaseChecksum(SECRET)
    assert checksum.digest(values) == by_hand(values)
    assert checksum.digest(values) == by_hand(values)  # with buffers and weights of the first call


def test_digests_depend_on_every_bit():
    values = tensors(3, 5, dtype=torch.float64)
    checksum = ReleaseChecksum(SECRET)
    digests = {checksum.digest(values)}
    for tensor in values:
        bits = tensor.view(torch.int64)
        for index in range(len(bits)):
            for bit in range(64):
                flip = (1 << bit) - (1 << 64) * (bit == 63)
                bits[index] ^= flip
                digests.add(checksum.digest(values))
                bits[index] ^= flip
    assert len(digests) == 1 + 8 * 64


@pytest.mark.parametrize("place", [0, 1, release_log.CHUNK - 1, release_log.CHUNK, release_log.PIECE - 1, -1])
def test_digests_depend_on_every_place(place):
    """The smallest change of one number, also in the last chunk, which is padded; the sign bit of two numbers."""
    (values,) = tensors(release_log.PIECE + release_log.CHUNK + 3)
    checksum = ReleaseChecksum(SECRET)
    before = checksum.digest([values])
    bits = values.view(torch.int32)
    bits[place] ^= 1
    assert checksum.digest([values]) != before
    bits[place] ^= 1
    bits[place] ^= -(1 << 31)
    bits[7] ^= -(1 << 31)
    assert checksum.digest([values]) != before
    bits[place] ^= -(1 << 31)
    bits[7] ^= -(1 << 31)
    assert checksum.digest([values]) == before


def test_digests_depend_on_sizes_order_and_secret():
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.0])
    lists = ([a, b], [b, a], [a], [a, b, b], [torch.cat([a, b])], [a[:1], torch.zeros(2)], [b, b, a], [])
    assert len({ReleaseChecksum(SECRET).digest(values) for values in lists}) == len(lists)
    assert ReleaseChecksum(Secret.from_seed(0)).digest([a]) == ReleaseChecksum(SECRET).digest([a])
    assert ReleaseChecksum(Secret.from_seed(1)).digest([a]) != ReleaseChecksum(SECRET).digest([a])


def test_lanes_and_chunks_have_different_weights():
    checksum = ReleaseChecksum(SECRET)
    checksum.digest(tensors(3 * release_log.CHUNK))
    numbers = [number for weights in checksum._weights.values() for number in weights.flatten().tolist()]
    assert len(numbers) == 2 * (release_log.CHUNK + 1) + 2 * 3 and len(set(numbers)) == len(numbers)


CHANGES = {
    "nothing": lambda model, x: None,
    "one bit of a sample": lambda model, x: x.view(torch.int64)[mask(plan(), 2)[0], 0].bitwise_xor_(1),
    "one sample": lambda model, x: x[mask(plan(), 2)[0]].mul_(1.5),
    "one bit of a parameter": lambda model, x: model[2].bias.data.view(torch.int64)[0].bitwise_xor_(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_replay_is_free_only_if_it_is_identical(tmp_path, change):
    """The same updates again, by another step with the key and the log of the first. Draw 2 has the sample."""
    pytest.importorskip("dp_accounting")
    _, loader, step = make(plan())
    step.privacy.open(tmp_path)
    train(step, loader, 2)
    state = step.state_dict()
    parameters = [p.detach().clone() for p in step.model.parameters()]
    train(step, loader, 2)
    step.privacy.close()

    x, y = data()
    model = net()
    with torch.no_grad():
        for p, value in zip(model.parameters(), parameters, strict=True):
            p.copy_(value)
    CHANGES[change](model, x)
    _, loader, step = make(plan(), model=model, dataset=TensorDataset(x, y))
    step.privacy.open(tmp_path)
    step.load_state_dict(state)
    if change == "nothing":
        train(step, loader, 2)
    else:
        with pytest.raises(PrivacyError, match="update 2 must be repeated exactly, because its noise was used before"):
            train(step, loader, 2)
        train(step, loader, 2)  # with new draws and new noise
    assert step.privacy.spent().updates == (4 if change == "nothing" else 6)
    step.privacy.close()
