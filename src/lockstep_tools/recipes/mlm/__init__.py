"""The recipe ``mlm``: a small BERT learns to fill in masked words.

    config <- model, batches, examples (words that it fills in) <- train

``config.MlmConfig`` is the configuration and ``train.train_mlm()`` runs it; begin reading in ``train``.
"""
