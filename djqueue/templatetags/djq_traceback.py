"""Tracebacks in templates: `{% load djq_traceback %}`."""

from django import template

from djqueue.dashboard import tracebacks

register = template.Library()


@register.filter
def of_the_app(text: str) -> str | None:
    """Return a traceback without the frames of libraries; None if there are none to leave out."""
    return tracebacks.of_the_app(text)
