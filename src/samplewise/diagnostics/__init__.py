"""What per-sample gradients tell of a model, its data and its batch size. Needs no trainer.

noise       how much of a batch's gradient is signal, and how large a batch is worth its samples
fisher      the diagonal Fisher matrix over a data set
similarity  which samples pull together, and which against each other
scores      numbers per sample that are large for wrong labels and odd samples
suspects    samples ranked by those
"""

from samplewise.diagnostics.fisher import fisher as fisher
from samplewise.diagnostics.noise import Noise as Noise
from samplewise.diagnostics.noise import NoiseScale as NoiseScale
from samplewise.diagnostics.noise import noise_scale as noise_scale
from samplewise.diagnostics.noise import signal_to_noise as signal_to_noise
from samplewise.diagnostics.similarity import Similarity as Similarity
from samplewise.diagnostics.similarity import similarity as similarity
from samplewise.diagnostics.suspects import Suspects as Suspects
from samplewise.diagnostics.suspects import suspects as suspects

__all__ = [
    "Noise",
    "NoiseScale",
    "Similarity",
    "Suspects",
    "fisher",
    "noise_scale",
    "signal_to_noise",
    "similarity",
    "suspects",
]
