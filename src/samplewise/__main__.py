"""`python -m samplewise`, and so `torchrun -m samplewise`."""

from samplewise.cli.main import main

main()
