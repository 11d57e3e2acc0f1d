"""The recipe ``mlm``: a small BERT learns to fill in masked words.

    config -> train -> model, batches, metrics, fill_mask

``config.mlm()`` returns the configuration and ``train.train_mlm()`` runs it; begin reading in ``train``.
"""
