"""Whether a checkpoint is what it says it is: every check one function with a stable code; what is safe to mend can be mended."""
