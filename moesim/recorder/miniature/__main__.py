"""``python -m moesim.recorder.miniature``."""

import sys

from moesim.recorder.miniature.command import main

if __name__ == "__main__":
    sys.exit(main())
