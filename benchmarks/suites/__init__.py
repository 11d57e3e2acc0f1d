"""The suites: each measures one thing and returns one report."""
