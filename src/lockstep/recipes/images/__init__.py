"""The recipe ``images``: MobileNetV2 learns to classify images.

    config -> train -> dataset -> folder, pixels
                    -> batches, model

``config.images()`` returns the configuration and ``train.train_images()`` runs it; begin reading in ``train``.
"""
