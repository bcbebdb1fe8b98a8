"""Training on several ranks: `fsdp`, `join`, and the library's collectives and wrappers of torch.distributed."""

from samplewise.parallel.fsdp import fsdp as fsdp
from samplewise.parallel.launch import join as join
