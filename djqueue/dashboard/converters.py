"""The path converter of queue names and job IDs: any text as one path segment."""

import re

from django.contrib.admin.utils import quote, unquote
from django.urls import register_converter

DOTS = re.compile(r"\A\.+\Z")


class QuotedConverter:
    """A text quoted like in the admin's URLs: `/` is `_2F`."""

    regex = "[^/]+"

    def to_python(self, value: str) -> str:
        """Return the text of a path segment."""
        found: str = unquote(value)
        return found

    def to_url(self, value: str) -> str:
        """Return the path segment of a text. Dots are quoted if the text has nothing else."""
        text: str = quote(str(value))
        return text.replace(".", "_2E") if DOTS.match(text) else text


CONVERTER = QuotedConverter()
register_converter(QuotedConverter, "djq")
