"""A miniature as a model: what liberties with its routing cost, next to the fidelity that a simulation prints."""
