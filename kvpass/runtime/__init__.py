"""Run a model's forward over a packed cache, for each way in which a model may keep its cache."""
