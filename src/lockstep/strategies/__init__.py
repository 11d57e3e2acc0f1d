"""Strategies: what runs a step on which replicas."""
