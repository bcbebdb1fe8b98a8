"""`samplewise demo`: find wrong labels in a small image dataset."""

from __future__ import annotations


def demo() -> None:
    """Find wrong labels in a small dataset with a per-sample ledger.

    Trains a small model on digits of which a tenth have a wrong label, and records every sample at every visit in a
    ledger. Then shows the most suspicious samples, the gradient noise scale and the cost of per-sample norms, and
    writes a report. Takes less than a minute; the data are part of scikit-learn. The run is kept under runs/.
    """
    from samplewise.cli.wrong_labels import find_wrong_labels

    find_wrong_labels()


if __name__ == "__main__":
    demo()
