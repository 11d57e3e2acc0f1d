"""Whole-step CUDA graphs in fit: which steps can be recorded, their recording, and their replay."""
