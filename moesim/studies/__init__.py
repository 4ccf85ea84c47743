"""Studies over many runs: published results beside simulated ones, regret, assignment rules on random layers."""
