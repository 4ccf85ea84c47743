"""Statistics of a trace: reuse, skew, hit rates of caches by replay, and how well it can be predicted."""
