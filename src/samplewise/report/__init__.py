"""HTML report of a run directory, as one self-contained file.

    run_log       reads run.json and log.jsonl
    samples       reads the ledger: one row per sample, and the suspects
    ledger_stats  incremental statistics of the ledger: repeated ids, quantiles of norms
    previews      reads previews.json: images, texts or values of samples

    training, scatter, norms, noise, layers, cost, settings    the sections
    charts        charts as inline SVG, in the colors of the page
    html          text, numbers and tables; escapes all of the user's data
    dom.js, plot.js, samples.js, reload.js, style.css    scripts and style sheet of the page

    page          HTML file of one run: `write_report`
    compare       HTML file that compares several runs: `write_comparison`
    watch         rewrites either file while a run is training

The package reads files only and does not import torch, so that a report can be written on any machine.
"""
