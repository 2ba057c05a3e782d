"""Where tokens live: who stays exact, who is packed and who is evicted, and in which slot or page each one is."""
