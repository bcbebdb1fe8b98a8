"""Per-sample gradients from the autograd graph. Knows autograd, nothing of training."""
