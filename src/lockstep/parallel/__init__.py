"""Models divided among workers: the grid of workers, tensor plans, and the part of a model that a worker holds."""
