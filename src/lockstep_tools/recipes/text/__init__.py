"""Text for the recipes: ``corpus`` reads it, ``tokenizer`` trains a WordPiece vocabulary and encodes lines."""
