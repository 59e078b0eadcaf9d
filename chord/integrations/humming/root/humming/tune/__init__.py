from chord.integrations.humming.tune import get_heuristics_config

__all__ = ["get_heuristics_config"]
