"""Block operations behind convert and reshard; numpy is the reference."""
