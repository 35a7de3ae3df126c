"""HTTP server: OpenAI's Images API, metrics, and a page to draw on."""
