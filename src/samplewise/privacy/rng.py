"""Random streams for sampling and noise: pure functions of (secret, purpose, branch, number).

A stream depends on nothing else, so a resumed run draws the same samples and the same noise for an update, whatever was
drawn before. Two kinds of streams exist.

    secure=False   Philox 4x64 of NumPy. Fast and statistically sound. Philox is not a cipher: an adversary who knows
                   many values of a stream might be able to compute others.
    secure=True    ChaCha20 of the package cryptography, Box-Muller in float64, four normal draws summed and halved.

secure=True protects from an adversary who predicts values of a stream from other values of it. The sum of four draws
makes it much harder to find the uniform numbers behind a noisy value by enumeration of floating-point numbers (Mironov
2012; Holohan and Braghin 2021); this is a mitigation, not a proof. It does not make the noise discrete: a sum of
floating-point numbers is not exactly Gaussian, and its set of representable values can depend on the data. It does not
protect from timing measurements, nor from an adversary who reads the memory of the process or the file of the secret.
In both cases the keys of all streams are hashes of the secret: a stream reveals nothing about the streams of other
updates unless its generator is broken.

Values are reproducible bit for bit on one machine with one version of NumPy. Other versions and processors may round
differently.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn, final

import torch
from torch import Tensor

Key = bytes

KEY_BYTES = 32
BLOCK = 1 << 16  # values generated at once; bounds the memory of intermediate results to a few MB
SEGMENT_BYTES = 1 << 30  # of ChaCha20 under one nonce; its 32-bit block counter would allow 2^38


@final
class Secret:
    """Key of all random streams of a run: 32 bytes.

    `repr` shows only `public_id`. A secret cannot be pickled, so that it is not copied to workers or into checkpoints
    unintentionally; `bytes` returns the key for a file that only the owner can read.
    """

    __slots__ = ("_key",)

    def __init__(self, key: Key):
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            kind = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise ValueError(f"a secret must have {KEY_BYTES} bytes; found {kind}. Use Secret.new().")
        self._key = key

    @classmethod
    def new(cls) -> Secret:
        """Secret from the entropy of the operating system."""
        return cls(os.urandom(KEY_BYTES))

    @classmethod
    def from_seed(cls, seed: int) -> Secret:
        """Secret computed from a number: reproducible, not private."""
        text = f"samplewise seed {operator.index(seed)}"
        return cls(hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest())

    @property
    def bytes(self) -> Key:
        """The key itself. Must not be published."""
        return self._key

    @property
    def public_id(self) -> str:
        """Hash of the key, 32 hexadecimal digits, which may be published: it tells secrets apart."""
        return self.derive("public id", 16).hex()

    def derive(self, label: str, size: int) -> Key:
        """Keyed hash of a label, `size` bytes."""
        return hashlib.blake2b(label.encode(), key=self._key, digest_size=size, person=b"samplewise").digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._key, other._key)

    def __hash__(self) -> int:
        return hash(self.public_id)

    def __repr__(self) -> str:
        return f"Secret({self.public_id[:8]}…)"

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: Any) -> Secret:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a Secret must stay in the process that made it; found that it is being pickled, as with a sw.Privacy that "
            "is sent to another process. Create the sw.Privacy in the process that trains."
        )


class Stream(ABC):
    """Sequence of random numbers. Successive calls continue the sequence."""

    @abstractmethod
    def uniform(self, n: int) -> Tensor:
        """Uniform numbers in [0, 1) with 53 random bits: float64, shape (n,)."""

    def normal(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal values on the CPU.

        Types of lower precision are rounded from float32, with secure=True from float64. Real and imaginary part of
        complex values are standard normal each.
        """
        out = torch.empty(tuple(shape), dtype=dtype)
        if not (dtype.is_floating_point or dtype.is_complex):
            raise TypeError(
                f"normal values must have a floating-point or complex dtype; found {dtype}. Use torch.float32."
            )
        self._fill_normal((torch.view_as_real(out) if dtype.is_complex else out).view(-1))
        return out

    @abstractmethod
    def _fill_normal(self, out: Tensor) -> None:
        """Write standard normal values into a contiguous real tensor of one dimension."""

    def __repr__(self) -> str:
        return type(self).__name__

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} must stay in the process that made it, because it holds a key; found that it is "
            "being pickled or copied. Make it again with stream(...)."
        )


def stream(secret: Secret, purpose: str, branch: int, number: int, secure: bool = False) -> Stream:
    """Stream of random numbers that depends on the arguments only.

    purpose: for example "sample" or "noise"; streams of different purposes are independent
    branch: number of the continuation of a run: 0, larger after a resume that does not replay
    number: index of the update
    secure: use ChaCha20 in place of Philox; needs the package cryptography
    """
    label = repr(("stream", str(purpose), operator.index(branch), operator.index(number)))
    if secure:
        return SecureStream(secret.derive(f"chacha20 {label}", KEY_BYTES))
    return PhiloxStream(secret.derive(f"philox {label}", 16))


@final
class PhiloxStream(Stream):
    """Stream of NumPy's Philox generator; the key has 16 bytes."""

    def __init__(self, key: Key):
        np = load_extra("numpy")
        self._generator: Any = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))

    def uniform(self, n: int) -> Tensor:
        return torch.from_numpy(self._generator.random(n))

    def _fill_normal(self, out: Tensor) -> None:
        if out.dtype in (torch.float32, torch.float64):
            array = out.numpy()
            self._generator.standard_normal(dtype=array.dtype, out=array)
            return
        np = load_extra("numpy")
        for block in out.split(BLOCK):
            block.copy_(torch.from_numpy(self._generator.standard_normal(len(block), dtype=np.float32)))


@final
class SecureStream(Stream):
    """Stream of the ChaCha20 cipher; the key has 32 bytes and is used for one stream only."""

    def __init__(self, key: Key):
        self._key = key
        self._segment = 0
        self._left = SEGMENT_BYTES  # bytes of the current segment that are not used yet
        self._cipher = self._begin_segment(0)

    def _begin_segment(self, segment: int) -> Any:
        """ChaCha20 with the number of the segment as nonce; the block counter starts at 0."""
        ciphers = load_extra("cryptography.hazmat.primitives.ciphers")
        nonce = bytes(4) + segment.to_bytes(12, "little")
        return ciphers.Cipher(ciphers.algorithms.ChaCha20(self._key, nonce), mode=None).encryptor()

    def _keystream(self, size: int) -> bytearray:
        """The next `size` bytes of the keystream."""
        result = bytearray()
        while len(result) < size:
            if not self._left:
                self._segment += 1
                self._left = SEGMENT_BYTES
                self._cipher = self._begin_segment(self._segment)
            count = min(size - len(result), self._left)
            result += self._cipher.update(bytes(count))
            self._left -= count
        return result

    def _uniform(self, n: int) -> Any:
        """NumPy array of n uniform numbers in [0, 1) with 53 random bits."""
        np = load_extra("numpy")
        bits = np.frombuffer(self._keystream(8 * n), dtype="<u8")
        return (bits >> np.uint64(11)) * 2.0**-53

    def uniform(self, n: int) -> Tensor:
        out = torch.empty(n, dtype=torch.float64)
        for block in out.split(BLOCK):
            block.copy_(torch.from_numpy(self._uniform(len(block))))
        return out

    def _fill_normal(self, out: Tensor) -> None:
        for block in out.split(BLOCK):
            block.copy_(torch.from_numpy(self._normal(len(block))))

    def _normal(self, n: int) -> Any:
        """NumPy array of n standard normal values, each half the sum of four Box-Muller draws.

        The four draws of a value come from four pairs of uniform numbers. The cosines of the pairs give the first half
        of the values, the sines the second half: cosine and sine of one pair are never added to each other, because
        their sum is one draw with another angle.
        """
        np = load_extra("numpy")
        half = (n + 1) // 2
        radius = np.sqrt(-2.0 * np.log1p(-self._uniform(4 * half)))
        angle = (2.0 * math.pi) * self._uniform(4 * half)
        draws = np.stack([radius * np.cos(angle), radius * np.sin(angle)]).reshape(2, 4, half)
        return (draws.sum(axis=1) / 2.0).reshape(-1)[:n]


def load_extra(module: str) -> Any:
    """Import a module that the extra `privacy` installs."""
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ImportError(
            f"sw.Privacy needs {package}; found that it is not installed. Install it: pip install "
            "'samplewise[privacy]'."
        ) from None
