"""Training loop: Trainer, callbacks, checkpoints, resumable data loading, progress and logs."""
