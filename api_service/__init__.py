"""HTTP in, SSE out. Stateless; never imports torch."""
