"""A program that fails by itself."""


def prepare():
    raise ValueError("the data folder is empty")


prepare()
