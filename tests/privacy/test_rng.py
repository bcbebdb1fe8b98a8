"""Random streams: distribution, independence, reproducibility, secrecy of the key."""

import copy
import pickle
import sys
import tracemalloc
from itertools import combinations

import pytest
import torch

from samplewise.privacy import rng
from samplewise.privacy.rng import BLOCK, Secret, stream

stats = pytest.importorskip("scipy.stats")
pytest.importorskip("cryptography")

N = 1_000_000
SECRET = Secret.from_seed(19)
both = pytest.mark.parametrize("secure", [False, True], ids=["philox", "chacha20"])


def noise(number=0, branch=0, purpose="noise", secret=SECRET, secure=False, n=N, dtype=torch.float64):
    return stream(secret, purpose, branch, number, secure).normal((n,), dtype)


def correlation(a, b):
    """Correlation in standard deviations of its distribution for independent values."""
    return abs(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1].item()) * len(a) ** 0.5


# ------------------------------------------------------------------------------- distribution


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_mean_and_standard_deviation(secure, dtype):
    values = noise(secure=secure, dtype=dtype)
    assert values.dtype == dtype and values.device.type == "cpu"
    assert abs(values.double().mean().item()) < 4.5 / N**0.5
    assert values.double().std().item() == pytest.approx(1, rel=0.003)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_values_are_normal(secure, dtype):
    values = noise(secure=secure, dtype=dtype)
    assert stats.kstest(values.double().numpy(), "norm").pvalue > 0.001


@both
def test_tails_are_normal(secure):
    values = noise(secure=secure).abs()
    for bound in (3.0, 4.0):
        expected = 2 * N * stats.norm.sf(bound)
        assert (values > bound).sum().item() == pytest.approx(expected, abs=4.5 * expected**0.5)


@both
def test_complex_values_have_normal_parts(secure):
    values = stream(SECRET, "noise", 0, 0, secure).normal((500, 1000), torch.complex64)
    assert values.shape == (500, 1000) and values.dtype == torch.complex64
    parts = torch.view_as_real(values).view(-1, 2)
    assert parts.std().item() == pytest.approx(1, rel=0.003)
    assert correlation(parts[:, 0], parts[:, 1]) < 4.5


@both
def test_uniform_numbers(secure):
    values = stream(SECRET, "sample", 0, 0, secure).uniform(N)
    assert values.dtype == torch.float64 and values.shape == (N,)
    assert values.min().item() >= 0 and values.max().item() < 1
    assert stats.kstest(values.numpy(), "uniform").pvalue > 0.001
    assert ((values * 2**53) == (values * 2**53).round()).all()  # 53 bits
    assert ((values * 2**53) % 2 == 1).double().mean().item() == pytest.approx(0.5, abs=4.5 * 0.5 / N**0.5)


@both
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (2, 0, 3), (BLOCK + 1,)], ids=str)
def test_any_shape(secure, shape):
    for dtype in (torch.float32, torch.bfloat16, torch.complex128):
        values = stream(SECRET, "noise", 0, 0, secure).normal(shape, dtype)
        assert values.shape == shape and values.isfinite().all()
    assert stream(SECRET, "sample", 0, 0, secure).uniform(0).shape == (0,)


@both
def test_integer_dtypes_are_refused(secure):
    with pytest.raises(TypeError, match=r"must have a floating-point or complex dtype; found torch.int64"):
        stream(SECRET, "noise", 0, 0, secure).normal((2,), torch.int64)


# ------------------------------------------------------------------------------- independence


@both
def test_streams_are_independent(secure):
    """Streams that differ in one argument, among them consecutive updates, have uncorrelated values and squares."""
    values = [
        noise(secure=secure),
        noise(number=1, secure=secure),
        noise(number=2, secure=secure),
        noise(branch=1, secure=secure),
        noise(purpose="sample", secure=secure),
        noise(secret=Secret.from_seed(20), secure=secure),
        noise(secure=not secure),
    ]
    for a, b in combinations(values, 2):
        assert correlation(a, b) < 4.5
        assert correlation(a**2, b**2) < 4.5


def test_arguments_are_not_confused():
    keys = [("noise", 1, 11), ("noise", 11, 1), ("noise1", 1, 1), ("noise", 1, 1), ("noise', 1", 1, 1)]
    firsts = {stream(SECRET, *key).uniform(1).item() for key in keys}
    assert len(firsts) == len(keys)


@both
def test_values_of_a_stream_are_independent(secure):
    values = noise(secure=secure)
    for lag in (1, 2, 4, 8, 1024, BLOCK // 2, BLOCK):
        assert correlation(values[:-lag], values[lag:]) < 4.5
        assert correlation(values[:-lag] ** 2, values[lag:] ** 2) < 4.5


@both
def test_successive_calls_continue_the_stream(secure):
    """The parameters of one update get different noise."""
    one = stream(SECRET, "noise", 0, 0, secure)
    first, second = one.normal((N,)), one.normal((N,))
    assert correlation(first, second) < 4.5
    uniform = stream(SECRET, "sample", 0, 0, secure)
    parts = torch.cat([uniform.uniform(n) for n in (1, 7, 1000, BLOCK, 3)])
    assert torch.equal(parts, stream(SECRET, "sample", 0, 0, secure).uniform(len(parts)))


def test_the_cipher_continues_in_another_segment(monkeypatch):
    whole = stream(SECRET, "sample", 0, 0, secure=True).uniform(1000)
    monkeypatch.setattr(rng, "SEGMENT_BYTES", 800)
    parts = stream(SECRET, "sample", 0, 0, secure=True).uniform(1000)
    assert torch.equal(parts[:100], whole[:100])
    assert len(set(parts.tolist())) == 1000


# ---------------------------------------------------------------------------- reproducibility


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_same_arguments_give_the_same_numbers(secure, dtype):
    other = Secret(SECRET.bytes)
    torch.manual_seed(0)
    first = noise(number=5, secure=secure, dtype=dtype, n=BLOCK + 3)
    torch.manual_seed(1)
    noise(number=4, secure=secure)
    assert torch.equal(noise(number=5, secure=secure, dtype=dtype, n=BLOCK + 3, secret=other), first)


@both
def test_the_global_random_state_is_not_used(secure):
    state = torch.get_rng_state()
    noise(secure=secure, n=10)
    stream(SECRET, "sample", 0, 0, secure).uniform(10)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("secure", "bits"), [(False, 7496827129032395), (True, 5149820075376736)])
def test_streams_do_not_change_between_versions(secure, bits):
    """A run that is resumed with a later version must draw the same samples."""
    value = stream(Secret.from_seed(0), "sample", 1, 2, secure).uniform(3)[2].item()
    assert int(value * 2**53) == bits


@both
def test_memory_is_bounded(secure):
    stream(SECRET, "noise", 0, 0, secure).normal((10,))  # imports
    tracemalloc.start()
    try:
        stream(SECRET, "noise", 0, 0, secure).normal((4_000_000,), torch.bfloat16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32e6


# ------------------------------------------------------------------------------------- secret


def test_new_secrets_differ():
    secrets = {Secret.new() for _ in range(10)}
    assert len(secrets) == 10
    assert len({secret.public_id for secret in secrets}) == 10
    assert all(len(secret.bytes) == 32 for secret in secrets)


def test_equality_follows_the_key():
    assert Secret.from_seed(3) == Secret(Secret.from_seed(3).bytes)
    assert Secret.from_seed(3) != Secret.from_seed(4)
    assert Secret.from_seed(3) != Secret.from_seed(3).bytes
    assert hash(Secret.from_seed(3)) == hash(Secret.from_seed(3))


def test_no_text_shows_the_key():
    secret = Secret.new()
    texts = [repr(secret), str(secret), f"{secret}", secret.public_id, repr(stream(secret, "noise", 0, 0))]
    texts.append(repr(stream(secret, "noise", 0, 0, secure=True)))
    for text in texts:
        assert secret.bytes.hex()[:8] not in text and repr(secret.bytes)[2:-1] not in text
    assert not hasattr(secret, "__dict__")


def test_a_secret_is_not_pickled():
    for holder in (SECRET, [SECRET], {"secret": SECRET}):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            with pytest.raises(TypeError, match=r"must stay in the process that made it; .* Create the sw.Privacy"):
                pickle.dumps(holder, protocol)
    for secure in (False, True):
        with pytest.raises(TypeError, match="because it holds a key"):
            pickle.dumps(stream(SECRET, "noise", 0, 0, secure))


def test_a_copy_of_a_secret_is_the_secret():
    assert copy.copy(SECRET) is SECRET
    assert copy.deepcopy([SECRET])[0] is SECRET


@pytest.mark.parametrize(("key", "found"), [(b"short", "5 bytes"), ("x" * 32, "str"), (bytes(33), "33 bytes")])
def test_other_keys_are_refused(key, found):
    with pytest.raises(ValueError, match=rf"a secret must have 32 bytes; found {found}. Use Secret.new\(\)"):
        Secret(key)


@both
def test_missing_packages_are_named(secure, monkeypatch):
    package = "cryptography" if secure else "numpy"
    for name in [name for name in sys.modules if name.partition(".")[0] == package and secure]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"needs {package}; found that it is not installed. Install it: pip install 'samplewise\[privacy\]'"
    with pytest.raises(ImportError, match=message):
        stream(SECRET, "noise", 0, 0, secure)
