"""What pods and workers agree on: wire messages, key names, queue, channel, errors, text. Imports nothing of ours."""
