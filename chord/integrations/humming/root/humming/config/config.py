"""vLLM 0.32 imports it by name and uses nothing of it."""
