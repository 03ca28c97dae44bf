"""Models by architecture name, and the loader that fills them; `loading.loader.load` is the way in.

Nothing is imported here: what a checkpoint says about text (`loading.text_source`) needs no torch.
"""
