"""Pending deletions in templates: `{% load djq_deletions %}`."""

from typing import Any

from django import template
from django.template import Context

from djqueue.dashboard import deletions
from djqueue.dashboard.deletions import Deletion, UndoButton

register = template.Library()


@register.simple_tag
def undo_button(message: Any) -> UndoButton | None:
    """Return the undo button of a message."""
    return deletions.undo_button(message)


@register.simple_tag(takes_context=True)
def pending_job_deletion(context: Context, queue: str, job_id: str) -> Deletion | None:
    """Return the pending deletion of a job."""
    return deletions.pending_deletions(context["request"]).job(queue, job_id)


@register.simple_tag(takes_context=True)
def pending_queue_deletions(context: Context, name: str) -> list[Deletion]:
    """Return the pending deletions that cover a queue."""
    return deletions.pending_deletions(context["request"]).queue(name)
