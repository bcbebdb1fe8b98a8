"""The networks of small_nets.py in JAX: weights (out, in) with the same names as in torch, and plain jax.grad.

One thread: XLA reads its flags at import, so this module must import it first.
"""

import os
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
os.environ["NPROC"] = "1"

import jax
import jax.numpy as jnp
import numpy
from jax import lax
from torch import Tensor, nn

Arrays = dict[str, Any]
Forward = Callable[[Arrays, Any], Any]


# --- models of one sample without a batch dimension, which is the fastest way in JAX ----------------------------------


def affine(p: Arrays, name: str, x: Any) -> Any:
    weight, bias = p[f"{name}.weight"], p[f"{name}.bias"]
    return weight @ x + bias if x.ndim == 1 else x @ weight.T + bias


def linear(p: Arrays, x: Any) -> Any:
    return p["weight"] @ x + p["bias"]


def mlp(p: Arrays, x: Any) -> Any:
    return affine(p, "4", jax.nn.relu(affine(p, "2", jax.nn.relu(affine(p, "0", x)))))


def cnn(p: Arrays, x: Any) -> Any:
    x = x[None]
    for name in ("0", "2"):
        x = lax.conv_general_dilated(x, p[f"{name}.weight"], (2, 2), ((1, 1), (1, 1)))  # NCHW and OIHW, as in torch
        x = jax.nn.relu(x + p[f"{name}.bias"][:, None, None])
    return affine(p, "7", jax.nn.relu(affine(p, "5", x.reshape(-1))))


def cnn_by_hand(p: Arrays, x: Any) -> Any:
    """CNN of `cnn` with convolutions written as products of the weight with nine shifted copies of the image."""
    for name in ("0", "2"):
        weight, size, padded = p[f"{name}.weight"], x.shape[1], jnp.pad(x, ((0, 0), (1, 1), (1, 1)))
        shifted = jnp.stack([padded[:, i : i + size : 2, j : j + size : 2] for i in range(3) for j in range(3)], 1)
        x = weight.reshape(len(weight), -1) @ shifted.reshape(9 * len(x), -1)
        x = jax.nn.relu(x.reshape(len(weight), size // 2, size // 2) + p[f"{name}.bias"][:, None, None])
    return affine(p, "7", jax.nn.relu(affine(p, "5", x.reshape(-1))))


def transformer(p: Arrays, x: Any) -> Any:
    for layer in ("layers.0", "layers.1"):
        x = x + attention(p, f"{layer}.self_attn", normalized(p, f"{layer}.norm1", x))
        hidden = jax.nn.relu(affine(p, f"{layer}.linear1", normalized(p, f"{layer}.norm2", x)))
        x = x + affine(p, f"{layer}.linear2", hidden)
    return affine(p, "head", x.mean(0))


def normalized(p: Arrays, name: str, x: Any) -> Any:
    centered = x - x.mean(-1, keepdims=True)
    scaled = centered * lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
    return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]


def attention(p: Arrays, name: str, x: Any, heads: int = 4) -> Any:
    length, width = x.shape
    packed = x @ p[f"{name}.in_proj_weight"].T + p[f"{name}.in_proj_bias"]
    q, k, v = (t.reshape(length, heads, -1).swapaxes(0, 1) for t in jnp.split(packed, 3, -1))
    weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) / (width // heads) ** 0.5)
    return affine(p, f"{name}.out_proj", (weights @ v).swapaxes(0, 1).reshape(length, width))


# --- losses and optimizers --------------------------------------------------------------------------------------------


def squared(outputs: Any, targets: Any) -> Any:
    return ((outputs - targets) ** 2).mean()


def cross_entropy(outputs: Any, targets: Any) -> Any:
    return -jax.nn.log_softmax(outputs)[targets]


class SGD:
    def __init__(self, lr: float, momentum: float = 0.0):
        self.lr, self.momentum = lr, momentum

    def begin(self, p: Arrays) -> Any:
        return jax.tree.map(jnp.zeros_like, p) if self.momentum else ()

    def apply(self, p: Arrays, state: Any, g: Arrays) -> tuple[Arrays, Any]:
        if self.momentum:
            g = state = jax.tree.map(lambda kept, now: self.momentum * kept + now, state, g)
        return jax.tree.map(lambda old, now: old - self.lr * now, p, g), state


class Adam:
    def __init__(self, lr: float):
        self.lr = lr

    def begin(self, p: Arrays) -> Any:
        return jnp.zeros(()), jax.tree.map(jnp.zeros_like, p), jax.tree.map(jnp.zeros_like, p)

    def apply(self, p: Arrays, state: Any, g: Arrays) -> tuple[Arrays, Any]:
        steps, mean, square = state
        steps = steps + 1
        mean = jax.tree.map(lambda kept, now: 0.9 * kept + 0.1 * now, mean, g)
        square = jax.tree.map(lambda kept, now: 0.999 * kept + 0.001 * now * now, square, g)
        size, root = self.lr / (1 - 0.9**steps), jnp.sqrt(1 - 0.999**steps)
        new = jax.tree.map(lambda old, m, s: old - size * m / (jnp.sqrt(s) / root + 1e-8), p, mean, square)
        return new, (steps, mean, square)


# --- loops ------------------------------------------------------------------------------------------------------------

FORWARDS: dict[str, Forward] = {
    "linear": linear,
    "mlp": mlp,
    "cnn": cnn,
    "cnn by hand": cnn_by_hand,
    "transformer": transformer,
}


class Loops:
    """Two loops over samples: `steps` calls a compiled update per sample, `scan` is compiled as a whole."""

    def __init__(self, kind: str, model: nn.Module, x: Tensor, y: Tensor, optimizer: SGD | Adam):
        forward, loss = FORWARDS[kind], cross_entropy if y.dim() == 1 else squared
        self.x, self.y = array(x), array(y)
        self.samples = [*zip(self.x, self.y, strict=True)]

        def update(carry: Any, sample: Any) -> tuple[Any, Any]:
            p, state = carry
            value, g = jax.value_and_grad(lambda p: loss(forward(p, sample[0]), sample[1]))(p)
            return optimizer.apply(p, state, g), value

        self._update = jax.jit(update, donate_argnums=0)
        self._scan = jax.jit(lambda carry, samples: lax.scan(update, carry, samples), donate_argnums=0)
        self.carries = {}
        for name in ("steps", "scan"):
            p = arrays(model)
            self.carries[name] = p, optimizer.begin(p)

    def steps(self) -> None:
        carry = self.carries["steps"]
        for sample in self.samples:
            carry, _ = self._update(carry, sample)
        self.carries["steps"] = jax.block_until_ready(carry)

    def scan(self) -> None:
        carry, _ = self._scan(self.carries["scan"], (self.x, self.y))
        self.carries["scan"] = jax.block_until_ready(carry)

    def parameters(self, loop: str) -> dict[str, Any]:
        return {name: numpy.array(value) for name, value in self.carries[loop][0].items()}


class Clipped:
    """Updates with clipped per-sample gradients of one batch by jit(vmap(grad)) and SGD without momentum."""

    def __init__(self, kind: str, model: nn.Module, x: Tensor, y: Tensor, lr: float, clip: float):
        self.x, self.y = array(x), array(y)
        self.p = arrays(model)

        def loss(p: Arrays, x: Any, y: Any) -> Any:
            return cross_entropy(FORWARDS[kind](p, x), y)

        def update(p: Arrays, x: Any, y: Any) -> Arrays:
            rows = jax.vmap(jax.grad(loss), (None, 0, 0))(p, x, y)
            norms = jnp.sqrt(sum((row.reshape(len(x), -1) ** 2).sum(1) for row in rows.values()))
            weights = jnp.minimum(1, clip / norms) / len(x)
            return {name: old - lr * jnp.tensordot(weights, rows[name], 1) for name, old in p.items()}

        self._update = jax.jit(update, donate_argnums=0)

    def updates(self, count: int) -> None:
        for _ in range(count):
            self.p = self._update(self.p, self.x, self.y)
        jax.block_until_ready(self.p)

    def parameters(self) -> dict[str, Any]:
        return {name: numpy.array(value) for name, value in self.p.items()}


def arrays(model: nn.Module) -> Arrays:
    """Copies of all parameters, by name."""
    return {name: array(parameter.detach()) for name, parameter in model.named_parameters()}


def array(tensor: Tensor) -> Any:
    """Copy of a torch tensor; donated memory must not belong to torch."""
    return jnp.array(tensor.numpy().copy())
