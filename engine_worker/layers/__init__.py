"""What models are made of: fused weights and their places, decoder layers, rotary angles."""
