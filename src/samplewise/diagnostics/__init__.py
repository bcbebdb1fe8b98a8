"""Diagnostics from per-sample gradients: batch size, Fisher matrix, similarity, wrong labels. Works without a trainer.

noise       gradient noise scale (critical batch size) and signal-to-noise ratios
fisher      diagonal of the Fisher matrix over a dataset
similarity  cosines between per-sample gradients, pairs and clusters
scores      per-sample scores that are large for wrong labels and unusual samples
suspects    ranking of samples by these scores
dynamics    training dynamics of samples from a ledger: data map, forgetting events, AUM, EL2N, GraNd
profile     time and memory of an update, with and without compile=True
"""

from samplewise.diagnostics.dynamics import Dynamics, dynamics
from samplewise.diagnostics.fisher import fisher
from samplewise.diagnostics.noise import Noise, NoiseScale, noise_scale, signal_to_noise
from samplewise.diagnostics.similarity import Similarity, similarity
from samplewise.diagnostics.suspects import Suspects, suspects

__all__ = [
    "Dynamics",
    "Noise",
    "NoiseScale",
    "Similarity",
    "Suspects",
    "dynamics",
    "fisher",
    "noise_scale",
    "signal_to_noise",
    "similarity",
    "suspects",
]
