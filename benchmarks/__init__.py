"""Measured comparisons: the same training step by us and by the peers, in turn on one machine, and the table of it.

``python -m benchmarks`` runs it. A peer's numbers are never quoted from elsewhere: every ratio comes from one run.
"""
