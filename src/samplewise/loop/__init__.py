"""The loop: trainer, checkpoints, progress, logs."""
