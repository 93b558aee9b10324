"""From logits to tokens, text and log-probabilities."""
