"""The autograd graph of a loss: as data, folded by module, as text, as SVG."""
