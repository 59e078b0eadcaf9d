from chord.integrations.humming.refusals import unserved

process_input = unserved("process_input", "processing of activations outside experts")

__all__ = ["process_input"]
