"""Weights that an engine takes in: by address, watched at each call, read anew after a change."""
