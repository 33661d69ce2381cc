"""What moves in a step: gradients in, the update, parameters out."""
