"""Inspect models: what their cache layers hold, what prevents capturing them; and load one."""

from .pretrained import cache_dir, load, packaged_folder

__all__ = ["cache_dir", "load", "packaged_folder"]
