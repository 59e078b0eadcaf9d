from chord.integrations.humming.refusals import unserved

quantize_weight = unserved("quantize_weight", "quantising weights at load")

__all__ = ["quantize_weight"]
