"""HTML report of a run directory, as one self-contained file.

    run_log       reads run.json and log.jsonl
    samples       reads the ledger: one row per sample, the suspects, repeated ids, quantiles of norms
    previews      reads previews.json: images, texts or values of samples

    training      sections about the course of a run: curves, time and memory, best values, epochs
    gradients     sections about gradients: norms over time, noise scale, layers
    scatter       sections of the samples: gallery of suspects, plot of loss and gradient norm, data map
    charts        charts as inline SVG, in the colors of the page
    html          the page and its parts; escapes all of the user's data
    dom.js, plot.js, samples.js, reload.js, style.css    scripts and style sheet of the page

    page          HTML file of one run: `write_report`; `watch` rewrites it while the run is training
    compare       HTML file that compares several runs: `write_comparison`
    attribution   HTML page of an attribution: `attribution_page`

The package reads files only and does not import torch, so that a report can be written on any machine.
"""
