"""The contenders' training loops on the GPU, one way of working a file. Each is written as its own users would."""
