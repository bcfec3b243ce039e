"""What is to be deleted, for templates: `{% load djq_deletions %}`."""

from typing import Any

from django import template
from django.template import Context

from djqueue.dashboard import deletions
from djqueue.dashboard.deletions import Deletion, UndoButton

register = template.Library()


@register.simple_tag
def undone_by(message: Any) -> UndoButton | None:
    """What a button beside a message undoes."""
    return deletions.undone_by(message)


@register.simple_tag(takes_context=True)
def leaving_job(context: Context, queue: str, job_id: str) -> Deletion | None:
    """Whether, and when, a job is deleted."""
    return deletions.leavings(context["request"]).job(queue, job_id)


@register.simple_tag(takes_context=True)
def leaving_queue(context: Context, name: str) -> list[Deletion]:
    """What of a queue is to be forgotten."""
    return deletions.leavings(context["request"]).queue(name)
