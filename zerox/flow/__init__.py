"""The flow of a step: gradients in, the update, parameters out."""
