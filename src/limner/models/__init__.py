"""The dVAE, the transformer over text and image tokens, and the contrastive model."""
