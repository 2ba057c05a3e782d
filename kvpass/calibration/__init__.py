"""Schemes that are fitted to a model: collect its keys and values, fit predictors to them, keep the result in files."""
