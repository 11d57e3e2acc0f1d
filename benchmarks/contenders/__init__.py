"""The contenders' training loops, one way of working a file. Each is written as its own users would write it."""
