"""What runs over many jobs at once: the mirror in the tables, and what is put back from it."""
