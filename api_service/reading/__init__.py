"""What an answer's text means: reasoning, content and tool calls, read character by character.

Because every parser sees single characters, where the text was cut into records cannot change what comes out: streamed
deltas joined are the whole answer, and any pod can read a stream again from its log.
"""
