"""Optimizer state: read from every form Megatron stores it in, as named tensors of the model; cut anew for another layout; repaired."""
