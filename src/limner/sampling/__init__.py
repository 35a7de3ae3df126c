"""Image tokens drawn from a prior, and the order that a contrastive model gives to candidates."""
