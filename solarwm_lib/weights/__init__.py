"""Weights in and out: official Wan files, diffusers folders, released SolarWM packages and our own checkpoints."""
