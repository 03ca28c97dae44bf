"""`headrace dead`: requests that ended the workers that ran them, put aside so that they harm nobody else.

In: a Redis URL. Out: a list, one request in full, or a request queued again or forgotten. Owns no state.
"""
