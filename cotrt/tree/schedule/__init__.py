"""Who runs in a step, on which blocks, and what a step has done. No torch."""
