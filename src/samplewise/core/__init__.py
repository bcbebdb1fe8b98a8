"""Helpers that need torch alone and know nothing of per-sample gradients.

data          batches, losses (protocol of loss functions, criteria), comparisons (of losses that must agree), means
state         state (random generators, buffers, modes), closure_state and reachable (Python state of functions), modes
resources     memory (devices, copies, budget), microbatch (size, halving)
files         files (atomic writes, JSON, tensors), directory_lock
users         text (messages, progress), validate, package (version, lazy imports, deprecations)
"""
