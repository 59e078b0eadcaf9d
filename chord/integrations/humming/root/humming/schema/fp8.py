from humming.schema import Fp8WeightSchema

__all__ = ["Fp8WeightSchema"]
