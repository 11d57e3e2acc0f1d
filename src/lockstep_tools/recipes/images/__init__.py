"""The recipe ``images``: MobileNetV2 learns to classify images.

    config -> train -> dataset -> folder, pixels
                    -> batches, model

``config.ImagesConfig`` is the configuration and ``train.train_images()`` runs it; begin reading in ``train``.
"""
