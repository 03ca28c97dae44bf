"""The HTTP surface. Routes translate; everything they decide is decided in the modules below them."""
