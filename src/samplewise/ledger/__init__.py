"""Per-sample log of a training run on disk: one row per sample and visit.

sample_ids  dataset wrapper that adds the index of each sample; ids in batches
rows        conversion of updates to table columns
files       Parquet files, one per part: writing and reading
aggregate   aggregation of visits to one row per sample: means and ranks
previews    thumbnails, texts or values of suspicious samples
ledger      `sw.Ledger`, for the trainer and for custom loops
"""
