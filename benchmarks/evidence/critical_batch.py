"""Critical batch size of McCandlish et al. beside the measured noise scale, from the tables of docs/batch-size.md.

    python benchmarks/evidence/critical_batch.py [--write docs/evidence.md]

`make batch-size` trains the models, with eight batch sizes and two seeds, and makes those tables.
"""

from __future__ import annotations

import re
from statistics import fmean

from record import ROOT, Table, parser, show

# isort: split
# Below, because record adds the directory of this module to the path.
from batch_size import SEEDS, Row, fit

TABLES = {"Fashion-MNIST, MLP": "batch-size-fashion", "characters, MLP": "batch-size-characters"}


def rows_of(text: str, key: str) -> list[Row]:
    """Rows of a table for fixed sizes."""
    found = re.search(rf"<!-- {key} -->(.*?)<!-- /{key} -->", text, re.DOTALL)
    if found is None:
        raise ValueError(f"docs/batch-size.md must have the table {key}; found none. Run `make batch-size`.")
    lines = [[cell.strip().replace(",", "") for cell in line.strip("|").split("|")] for line in found[1].split("\n")]
    cells = [line for line in lines if len(line) == 5 and line[0].isdecimal()]
    return [
        Row(int(size), float(rate), float(updates), float(samples), float(scale), [])
        for size, rate, updates, samples, scale in cells
    ]


def main() -> None:
    options = parser(__doc__, "critical_batch").parse_args()
    text = (ROOT / "docs/batch-size.md").read_text()
    rows = [["", "fewest updates", "fewest samples", "critical batch size", "noise scale", "noise scale / critical"]]
    for title, key in TABLES.items():
        fixed = rows_of(text, key)
        fitted = fit(fixed)
        scales = [row.scale for row in fixed]
        scale = f"{fmean(scales):,.0f} ({min(scales):,.0f} to {max(scales):,.0f})"
        rows.append(
            [
                title,
                f"{fitted.updates:,.0f} ± {fitted.updates_error:.0%}",
                f"{fitted.samples:,.0f} ± {fitted.samples_error:.0%}",
                f"{fitted.critical:,.0f} ± {fitted.critical_error:.0%}",
                scale,
                f"{fmean(scales) / fitted.critical:.2f}",
            ]
        )
    seeds = " and ".join(map(str, SEEDS))
    caption = f"Seeds {seeds}. Noise scale: median over a run, then mean (and range) over the eight sizes."
    show(Table("evidence-critical-batch", "Critical batch size and noise scale", rows, caption), options.write)


if __name__ == "__main__":
    main()
