"""Published figures next to simulated ones."""
