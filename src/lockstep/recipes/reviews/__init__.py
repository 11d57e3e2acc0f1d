"""The recipe ``reviews``: a BERT learns whether a review is good or bad, with the Transformers Trainer."""
