"""One update: slicing, accumulation, precision, counters."""
