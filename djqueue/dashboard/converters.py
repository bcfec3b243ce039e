"""Names of queues and ids of jobs as parts of an address: any text, each as one part."""

import re

from django.contrib.admin.utils import quote, unquote
from django.urls import register_converter

DOTS = re.compile(r"\A\.+\Z")


class QuotedConverter:
    """A text in the way of the admin's own addresses: `/` is `_2F`."""

    regex = "[^/]+"

    def to_python(self, value: str) -> str:
        """What was quoted."""
        found: str = unquote(value)
        return found

    def to_url(self, value: str) -> str:
        """Quoted; nothing but dots would be taken for a step through the path."""
        text: str = quote(str(value))
        return text.replace(".", "_2E") if DOTS.match(text) else text


CONVERTER = QuotedConverter()
register_converter(QuotedConverter, "djq")
