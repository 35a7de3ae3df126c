"""Image-caption data: sources, filters, and the stream of batches."""
