"""Recipes: functions that return a full, runnable configuration of a published workload, on data that any machine has.

Each recipe is a folder. Its ``config`` holds a frozen dataclass and the function that gives it, from which ``build``
makes module, data and optimizer, and which ``run`` trains.
Nothing is imported here: a recipe's packages are needed only by whoever asks for it.
"""
