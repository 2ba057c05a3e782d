"""What a packed cache is made of: storage, layers of transformers over it, and the swap that puts them in place."""
