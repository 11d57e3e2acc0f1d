"""Measures what each worker's memory peaks at on several layouts of one model, beside what ``lockstep plan`` expects."""
