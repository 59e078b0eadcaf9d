from humming.schema import ModeloptMxfp8WeightSchema, ModeloptNvfp4InputSchema, ModeloptNvfp4WeightSchema

__all__ = ["ModeloptMxfp8WeightSchema", "ModeloptNvfp4InputSchema", "ModeloptNvfp4WeightSchema"]
