"""Low-rank adapters: reading them, and adding them to the weights they were trained for."""
