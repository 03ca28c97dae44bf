"""Stream in, tokens out: the worker that pulls requests, batches them continuously and logs every token."""
