"""The parts that all users of the tables share: column values, SQL dialects, the clock, errors, lease holders."""
