"""W4A16 MoE GEMMs: INT4 expert weights with group-32 scales, bfloat16 activations. Needs torch."""
