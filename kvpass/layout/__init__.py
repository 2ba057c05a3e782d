"""Where tokens are stored: which are exact, packed or evicted, and the slot or page of each one."""
