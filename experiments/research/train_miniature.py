"""Train a miniature Mixture-of-Experts model and record its routing: ``python experiments/research/train_miniature.py qwen3``."""

import sys

from miniature.command import main

if __name__ == "__main__":
    sys.exit(main())
