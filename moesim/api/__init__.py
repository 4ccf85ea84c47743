"""What `import moesim` offers: experiments from Python, on the same parts as the commands."""
