"""What people look at: completion reports, the gallery page, the picture of the graph. Nothing here imports torch."""
