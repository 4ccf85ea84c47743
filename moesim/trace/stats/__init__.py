"""Statistics of a trace: reuse, skew, hit rates of caches, predictability."""
