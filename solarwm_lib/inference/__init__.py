"""Generation, validation, comparison: one path from (checkpoint, frozen plan, pass) to videos and metrics."""
