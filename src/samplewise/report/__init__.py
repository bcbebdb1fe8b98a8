"""A run directory, made into one page to look at, print or send.

    run     reads run.json and log.jsonl
    curves  draws a curve as SVG that takes its colours from the page
    page    puts both into one HTML file: `write_report`

It reads files and needs no torch: a report can be made where the training could not.
"""
