"""Recipes: functions that return a full, runnable configuration of a published workload, on data that any machine has.

Each recipe's config is a frozen dataclass (``mlm.MlmConfig``), from which its builder makes module, data and optimizer.
Nothing is imported here: a recipe's packages are needed only by whoever asks for it.
"""
