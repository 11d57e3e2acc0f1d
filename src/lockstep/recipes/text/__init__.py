"""Text for the recipes: lines in three parts, where they come from, and the tokenizer made of them."""
