from chord.integrations.humming.forward import humming_forward, may_process_input, may_quant_input

__all__ = ["humming_forward", "may_process_input", "may_quant_input"]
