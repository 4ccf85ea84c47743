"""What a trace is like: reuse, skew, hit rates of caches by replay, and how well it can be predicted."""
