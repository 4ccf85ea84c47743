"""Predictors that need a model or training of their own: quantised shadows, and learned networks."""
