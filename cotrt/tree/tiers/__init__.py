"""What moves below the pool and when, what it costs, and the keys of records. No torch."""
