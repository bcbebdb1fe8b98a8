"""What became of every sample at every visit, on disk.

indexed   data sets whose samples say who they are
rows      updates as columns
files     those columns as Parquet, part by part; reading them back
visits    from visits to samples: means and ranks
previews  what suspicious samples look like
ledger    the callback, or for a loop of your own
"""
