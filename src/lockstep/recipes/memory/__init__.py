"""What a recipe can do when memory is short: LoRA, gradient checkpointing, weights of 8 or 4 bits."""
