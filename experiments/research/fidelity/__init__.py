"""A miniature as a model: what liberties with its routing cost, beside the fidelity that a simulation prints."""
