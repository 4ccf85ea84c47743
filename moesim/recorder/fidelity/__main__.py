"""``python -m moesim.recorder.fidelity``."""

import sys

from moesim.recorder.fidelity.command import main

if __name__ == "__main__":
    sys.exit(main())
