"""Measure what liberties with routing cost: ``python experiments/research/measure_fidelity.py build/mini-mixtral --out DIR``."""

import sys

from fidelity.command import main

if __name__ == "__main__":
    sys.exit(main())
