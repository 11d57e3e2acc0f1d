"""The recipe ``images``: MobileNetV2 learns to tell classes of pictures apart."""
