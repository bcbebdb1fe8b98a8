"""Cases: recurrent layers, as fused kernels and as Python loops."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from samplewise.testing.case import Net, as_losses, noise, weight
from samplewise.testing.cases import sequence_output
from zoo.register import case


@case
def lstm_batch_second(B):
    return Net(lambda m, x: m.f(x.transpose(0, 1))[0].transpose(0, 1), f=nn.LSTM(6, 4)), noise(B, 7, 6)


@case
def lstm_two_layers_both_directions(B):
    return Net(sequence_output, f=nn.LSTM(6, 3, num_layers=2, bidirectional=True, batch_first=True)), noise(B, 5, 6)


@case(float32=False, autocast=False)
def lstm_with_projection(B):
    """oneDNN warns in float32 that it has no kernel for projections."""
    return Net(sequence_output, f=nn.LSTM(6, 5, proj_size=3, batch_first=True)), noise(B, 4, 6)


@case
def lstm_last_state_only(B):
    return Net(lambda m, x: m.head(m.f(x)[1][0][-1]), f=nn.LSTM(6, 4, batch_first=True), head=nn.Linear(4, 3)), noise(
        B, 7, 6
    )


@case
def lstm_used_twice(B):
    return Net(lambda m, x: m.f(m.f(x)[0])[0], f=nn.LSTM(4, 4, batch_first=True, bias=False)), noise(B, 5, 4)


@case
def lstm_with_learned_first_state(B):
    def forward(m, x):
        state = m.h.expand(-1, len(x), -1).contiguous(), m.c.expand(-1, len(x), -1).contiguous()
        return m.f(x, state)[0]

    return Net(forward, f=nn.LSTM(6, 4, batch_first=True), h=weight(1, 1, 4), c=weight(1, 1, 4)), noise(B, 5, 6)


@case(loss=as_losses, second_order=False)
def ctc_over_packed_sequences(B):
    """A bidirectional GRU on sequences of different lengths, in another order than their lengths."""

    def forward(m, x, lengths, letters, count):
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        h = pad_packed_sequence(m.f(packed)[0], total_length=9)[0]
        return F.ctc_loss(m.head(h).log_softmax(2), letters, lengths, count, reduction="none")

    lengths = 5 + torch.arange(B) * 3 % 5
    letters = 1 + torch.arange(3 * B).view(B, 3) % 4
    model = Net(forward, f=nn.GRU(6, 5, bidirectional=True), head=nn.Linear(10, 5))
    return model, noise(B, 9, 6), lengths, letters, 1 + torch.arange(B) % 2


@case(rows=False)
def lstm_on_packed_sequences(B):
    """Lengths differ: the kernel sorts the samples, and later time steps have fewer rows."""
    lengths = torch.arange(B) * 3 % 7 + 1

    def forward(m, x):
        packed = pack_padded_sequence(m.enter(x), lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(m.f(packed)[0], batch_first=True, total_length=7)[0]

    return Net(forward, enter=nn.Linear(6, 4), f=nn.LSTM(4, 3)), noise(B, 7, 6)


@case
def gru_two_layers_both_directions_batch_second(B):
    return Net(lambda m, x: m.f(x.transpose(0, 1))[0].transpose(0, 1), f=nn.GRU(6, 3, 2, bidirectional=True)), noise(
        B, 4, 6
    )


@case
def elman_rnn(B):
    return Net(sequence_output, f=nn.RNN(6, 4, batch_first=True, nonlinearity="relu")), noise(B, 5, 6)


@case
def gru_cell_in_a_loop_over_time_first_data(B):
    def forward(m, x):
        h, seen = x.new_zeros(len(x), 4), []
        for step in x.transpose(0, 1):
            h = m.cell(step, h)
            seen.append(h)
        return m.head(torch.stack(seen)).transpose(0, 1)

    return Net(forward, cell=nn.GRUCell(6, 4), head=nn.Linear(4, 3)), noise(B, 5, 6)


@case(shared=(7,))
def linear_recurrence_by_cumulative_sum(B):
    """Linear recurrence similar to a state-space model: decay per channel, sums over time."""

    def forward(m, x):
        decay = m.rate.sigmoid() ** torch.arange(7, dtype=x.dtype, device=x.device)[:, None]
        return m.out((m.enter(x) / decay).cumsum(1) * decay)

    return Net(forward, enter=nn.Linear(6, 4), rate=weight(4), out=nn.Linear(4, 3)), noise(B, 7, 6)


@case
def euler_steps_of_a_neural_ode(B):
    def forward(m, x):
        for _ in range(10):
            x = x + 0.1 * m.f(x)
        return x

    return Net(forward, f=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))), noise(B, 6)


@case
def fixed_point_iterations(B):
    def forward(m, x):
        z = torch.zeros_like(x)
        for _ in range(8):
            z = torch.tanh(0.5 * z @ m.w.t() + m.enter(x))
        return z

    return Net(forward, w=weight(6, 6), enter=nn.Linear(6, 6)), noise(B, 6)


@case
def transposed_weight_made_once_and_used_in_a_loop(B):
    def forward(m, x):
        turned = m.w.t()
        for _ in range(3):
            x = torch.sin(x @ turned + m.b)
        return x

    return Net(forward, w=weight(6, 6), b=weight(6)), noise(B, 6)


@case
def decoder_that_feeds_itself(B):
    """Greedy decoding: the chosen token depends on the sample."""

    def forward(m, x):
        h, word, scores = x, x.new_zeros(len(x), dtype=torch.long), []
        for _ in range(4):
            h = torch.tanh(m.step(h) + m.words(word))
            scores.append(m.head(h))
            word = scores[-1].argmax(-1)
        return torch.stack(scores, 1)

    return Net(forward, words=nn.Embedding(11, 6), step=nn.Linear(6, 6), head=nn.Linear(6, 11)), noise(B, 6)
