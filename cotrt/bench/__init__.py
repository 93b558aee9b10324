"""Benchmarks, each a subcommand of ``python -m cotrt.bench``."""
