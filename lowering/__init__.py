"""How each ``kvpass::*`` op runs: implementations, and the table that picks one."""
