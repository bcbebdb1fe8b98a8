"""A run directory, made into one page to look at, print or send.

    run       reads run.json and log.jsonl
    samples   reads the ledger: one row per sample, and who is suspect
    previews  reads previews.json: pictures, texts or values of samples

    training, scatter, norms, noise, layers, cost, settings    the sections
    charts    draws them as SVG that takes its colours from the page
    html      text, numbers and tables; nothing of the user's data passes by it
    words.js, plot.js, samples.js, reload.js, style.css    what the page runs and wears

    page      puts one run into one HTML file: `write_report`
    compare   puts several into one: `write_comparison`
    watch     writes either anew while a run goes on

It reads files and needs no torch: a report can be made where the training could not.
"""
