"""Advice: which placement and policy suit a machine, how sure that is, and what to type."""
