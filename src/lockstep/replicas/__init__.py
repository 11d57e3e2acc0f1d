"""Replicas: their threads, their context, their random numbers."""
