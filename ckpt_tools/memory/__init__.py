"""Resharding of tensors that are held in memory (reshard_state_dict), planned like a conversion between files."""
