"""Measures what each choice saves when memory is short, and what it costs in time."""
