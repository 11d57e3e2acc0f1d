"""Stands in for torchvision, whose wheels for torch with CUDA cannot be imported beside a torch without."""
