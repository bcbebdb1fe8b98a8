"""Training step: slicing of batches, gradient accumulation, precision, optimizer update, counters."""
