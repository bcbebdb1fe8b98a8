"""Entry point of `python -m samplewise` and `torchrun -m samplewise`."""

from samplewise.cli.main import main

main()
