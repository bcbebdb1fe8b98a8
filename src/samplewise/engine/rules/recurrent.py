"""Rules for the fused CPU LSTM layer (MkldnnRnnLayer). Its kernel does not save the gates; they are recomputed.

The kernel saves the hidden states, so one matrix product gives all gates of all steps. Only the cell state and the
gradient's backpropagation through time are computed step by step. The gradients of the weights are then those of an
ordinary matrix product with the gradient of the gates.

Legend: t step, n sequence, h hidden unit; the gates are in the order input, forget, candidate, output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from samplewise.engine.grads.base import PerSampleGrad
from samplewise.engine.grads.factored import FactoredGrad, Term
from samplewise.engine.graph.graph import scalar
from samplewise.engine.ownership.owner_map import RegularGather, RowGather, sequences_of
from samplewise.engine.rules.rule_input import HALF_PRECISION, Use, accumulable, sum_of_tokens

LSTM = 2
READS = ("input", "weight0", "weight1", "weight2", "weight3", "hx_", "cx_", "result0")


def input_weights(use: Use) -> PerSampleGrad | None:
    return _weights(use, lambda: _in_order(use, use.tensor("input")))


def hidden_weights(use: Use) -> PerSampleGrad | None:
    return _weights(use, lambda: _earlier(_in_order(use, use.tensor("result0")), use.tensor("hx_")))


def _weights(use: Use, activation: Callable[[], Tensor]) -> PerSampleGrad | None:
    rows = _sequences(use)
    if rows is None:
        return None
    return FactoredGrad([Term(_gate_gradient(use, rows), _tokens(rows, activation()))], use.shape)


def biases(use: Use) -> PerSampleGrad | None:
    rows = _sequences(use)
    return None if rows is None else sum_of_tokens(_gate_gradient(use, rows))


def _tokens(rows: RowGather, x: Tensor) -> Tensor:
    """Sample-major tokens, (t, n, i) -> (b, sequences of b times t, i)."""
    return rows.gather(x.transpose(0, 1)).flatten(1, 2)


def _sequences(use: Use) -> RowGather | None:
    """Assignment of the n sequences to samples; None if not an LSTM, packed, in grad mode, or if outputs disagree."""
    plain = scalar(use.node, "mode") == LSTM and not scalar(use.node, "batch_sizes")
    if not plain or torch.is_grad_enabled():
        return None
    rows = []
    for slot, gradient in use.gradients.items():  # of the outputs (t, n, h), the last states and the last cells
        shape = tuple(gradient.shape)
        owner_map = use.owner_maps[slot]
        rows.append(sequences_of(owner_map, shape) if slot == 0 else owner_map.rows(shape, len(shape) - 1))
    alike = all(isinstance(r, RegularGather) and r == rows[0] for r in rows)
    return rows[0] if alike or len(rows) == 1 else None


def _in_order(use: Use, x: Tensor) -> Tensor:
    """Steps in the order of computation: the reverse direction of a bidirectional LSTM starts at the last step."""
    return x.flip(0) if scalar(use.node, "reverse") else x


def _earlier(states: Tensor, first: Tensor) -> Tensor:
    """State before each step: `first`, then all states except the last."""
    return torch.cat([first.reshape(1, *states.shape[1:]), states[:-1]])


def operands(use: Use) -> dict[int, Tensor] | None:
    """Gradients of the input and of the first states. The kernel is left out, which would compute them again together
    with the gradients of the weights.
    """
    if _sequences(use) is None or use.saved["input"].dtype in HALF_PRECISION:
        return None
    gates, dh, dc = _through_time(use)
    x = _in_order(use, (gates @ use.saved["weight0"]).transpose(0, 1))
    by_operand = {0: x, 5: dh.view(use.saved["hx_"].shape), 6: dc.view(use.saved["cx_"].shape)}
    return {at: gradient for at, gradient in by_operand.items() if use.node.next_functions[at][0] is not None}


def _gate_gradient(use: Use, rows: RowGather) -> Tensor:
    """Gradient of the gates before their activations, by sample and token."""
    return rows.gather(_through_time(use).gates).flatten(1, 2)


class Through(NamedTuple):
    """Gradients of the gates before their activations (n, t, 4h), and of the first states (n, h)."""

    gates: Tensor
    dh: Tensor
    dc: Tensor


def _through_time(use: Use) -> Through:
    """Backpropagation through time, computed once for all operands."""
    if "through time" in use.saved:
        through: Through = use.saved["through time"]
        return through
    x, w_in, w_hidden, b_in, b_hidden, h0, c0, states = (use.tensor(name) for name in READS)
    gradients = {slot: accumulable(gradient) for slot, gradient in use.gradients.items()}
    x = _in_order(use, x)
    states = _in_order(use, states)
    steps, sequences, hidden = states.shape
    bias = b_in + b_hidden if scalar(use.node, "has_biases") else w_in.new_zeros(4 * hidden)
    entering = torch.cat([x, _earlier(states, h0)], 2).flatten(0, 1)
    gates = torch.addmm(bias, entering, torch.cat([w_in, w_hidden], 1).T).view(steps, sequences, 4, hidden)
    c = gates[:, :, 2].tanh()
    i, f, _, o = gates.sigmoid_().unbind(2)
    cells = _cells(i * c, f, c0.reshape(sequences, hidden))
    bounded = cells[1:].tanh()
    # Derivatives for all steps: of the cell with respect to three gates, and of the output with respect to the fourth
    # gate and the cell. (The kernels compute grad * s * (1 - s) and grad * (1 - t * t) without temporaries.)
    result = torch.empty(sequences, steps, 4, hidden, dtype=x.dtype, device=x.device)
    to_gates = result.transpose(0, 1).unbind(2)
    sigmoid_slope = torch.ops.aten.sigmoid_backward.grad_input
    tanh_slope = torch.ops.aten.tanh_backward.grad_input
    sigmoid_slope(c, i, grad_input=to_gates[0])
    sigmoid_slope(cells[:-1], f, grad_input=to_gates[1])
    tanh_slope(i, c, grad_input=to_gates[2])
    sigmoid_slope(bounded, o, grad_input=to_gates[3])
    output_to_cell = torch.ops.aten.tanh_backward(o, bounded)
    dh = gradients[1].reshape(sequences, hidden) if 1 in gradients else torch.zeros_like(states[0])
    dc = gradients[2].reshape(sequences, hidden) if 2 in gradients else torch.zeros_like(states[0])
    arriving = _in_order(use, gradients[0]) if 0 in gradients else torch.zeros_like(states)
    flat = result.flatten(2)
    by_step = (  # views of all steps at once: an index in each step takes as long as the arithmetic
        *(x.unbind(0) for x in (arriving, output_to_cell, f)),
        *(x.unbind(1) for x in (result[:, :, :3], result[:, :, 3], flat)),
    )
    for from_above, slope, forget, to_cell, to_output, all_gates in reversed(list(zip(*by_step, strict=True))):
        dh = from_above + dh
        dc = torch.addcmul(dc, dh, slope)
        to_cell.mul_(dc[:, None])
        to_output.mul_(dh)
        dc = dc * forget
        dh = all_gates.mm(w_hidden)
    use.saved["through time"] = Through(flat, dh, dc)
    return use.saved["through time"]


def _cells(gain: Tensor, forget: Tensor, first: Tensor) -> Tensor:
    """Cell state before each step and after the last, (t + 1, n, h)."""
    cells = [first]
    for gained, forget_gate in zip(gain, forget, strict=True):
        cells.append(torch.addcmul(gained, forget_gate, cells[-1]))
    return torch.stack(cells)
