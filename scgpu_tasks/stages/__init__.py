"""Build partials over blocks, compute once, finish."""
