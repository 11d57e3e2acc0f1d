"""Mirrored modules, optimizers and variables: one per replica, kept equal."""
