"""The recipe ``reviews``: a BERT learns to tell bad reviews from good ones, with the Transformers Trainer.

    config -> train -> trainer -> task -> dataset (quotations: marks that swallow rows of a CSV file), batches

``config.ReviewsConfig`` is the configuration and ``train.train_reviews()`` runs it; begin reading in ``train``.
``trainer`` subclasses transformers and is imported only when a run begins.
"""
