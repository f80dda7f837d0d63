"""Clips on disk: index rows, tar shards, video, cameras, sampling order and the procedural tiny world.

Nothing here knows a model; torch is not imported.
"""
