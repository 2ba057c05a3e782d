"""Fit schemes to a model: collect its keys and values, fit predictors, datatypes or bit widths, and save the result."""
