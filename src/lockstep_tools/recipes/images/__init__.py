"""The recipe ``images``: MobileNetV2 learns to classify images.

    config -> train -> dataset -> split_folders (which folders are train, test and valid parts)
                    -> batches -> augmentation
                    -> model, pretrained; statistics (of batch norms, computed anew)
    predict (classes of new images)

``config.ImagesConfig`` is the configuration and ``train.train_images()`` runs it; begin reading in ``train``.
"""
