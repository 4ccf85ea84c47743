"""Studies over many runs: papers, regret, advice, what-if, leagues, validation."""
