"""An engine that computes nothing: made-up tokens at a chosen pace, to put everything around the engine under load."""
