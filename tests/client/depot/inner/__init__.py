"""A package inside an app."""
