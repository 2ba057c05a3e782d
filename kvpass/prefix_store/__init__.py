"""A store of quantized prefixes for servers: chunks of tokens, in memory and in files. It knows nothing of vLLM."""

from .chunk_files import ChunkFiles, DamagedFileError
from .chunk_index import ChunkIndex
from .chunks import ChunkCodec, LayerShape
from .entropy_chunks import EntropyChunkCodec

__all__ = ["ChunkCodec", "ChunkFiles", "ChunkIndex", "DamagedFileError", "EntropyChunkCodec", "LayerShape"]
