"""A small airline-claims office on real data, run by djqueue."""
