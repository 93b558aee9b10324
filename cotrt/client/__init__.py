"""Branches that live in a cotrt server, for programs in other processes."""
