"""Proof that a run continues: an experiment with a minimal trainer, and the comparison of everything a resumed run must have.

The modules here plan, start processes and compare; they import no torch. `trainer` is what runs in those processes, on megatron-core.
"""
