"""Models as they are: what their cache layers hold, what stands in the way of capturing them, and where to get one."""

from .pretrained import cache_dir, load, packaged_folder

__all__ = ["cache_dir", "load", "packaged_folder"]
