"""What the headers of a checkpoint tell, as data: what `ckpt inspect` shows."""
