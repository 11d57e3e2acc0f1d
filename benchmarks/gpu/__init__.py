"""The benchmark on one CUDA GPU, and the run of the tests that need one. It needs torch and nothing else."""
