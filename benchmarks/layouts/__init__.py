"""Measures the peak memory of each worker on several layouts of one model, beside what ``lockstep plan`` expects."""
