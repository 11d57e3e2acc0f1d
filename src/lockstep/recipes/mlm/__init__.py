"""The recipe ``mlm``: a small BERT learns to fill in masked words of text."""
