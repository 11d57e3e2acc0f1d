"""Our Transformers ``Trainer`` beside the original, on the training step of the recipe ``reviews``."""
