"""Parts that all users of the tables share: column values, dialects, clock, errors and lease holders."""
