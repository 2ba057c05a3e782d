"""Packed caches: tensor storage, transformers cache layers on top of it, and the swap that installs them in a cache."""
