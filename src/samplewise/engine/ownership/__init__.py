"""The sample that owns each element of a gradient: derived, probed and verified; and the cut below which none does."""
