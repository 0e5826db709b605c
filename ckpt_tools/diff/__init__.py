"""Whether two checkpoints hold the same model, whatever their formats and layouts: names, shapes, dtypes, settings, values, causes."""
