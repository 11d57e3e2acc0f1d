"""Reduce and gather: the values, the arithmetic, and the meeting point of replica threads."""
