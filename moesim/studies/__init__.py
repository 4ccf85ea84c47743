"""Studies over many runs: published against simulated results, regret, advice, what-if, leagues, validation."""
