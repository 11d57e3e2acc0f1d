"""Many workers beside DDP: on one host, and on two whose link is slowed. ``python -m benchmarks --workers``."""
