"""The pods: HTTP in, server-sent events out. Stateless; everything they know comes from Redis. Never imports torch."""
