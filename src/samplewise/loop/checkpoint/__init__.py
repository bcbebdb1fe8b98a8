"""Checkpoint files without pickle: reading a checkpoint runs no code from it.

encoding       nested state <-> JSON text and tensors
file           one safetensors file with a checksum, written atomically
shards         storage layer for torch.distributed.checkpoint: one such file for each rank
directory      checkpoint of several ranks: a directory of these files
schema         checks of keys and kinds of values in a nested state
trainer_state  checks of the state of a trainer before and during loading
"""
