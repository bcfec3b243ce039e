"""Subjects of jobs: names of objects outside the queues."""

from typing import Any


def name_of(instance: Any) -> str | None:
    """Return `app_label.model:pk` of a model instance; None if it is not saved.

    A proxy has the name of its concrete model.
    """
    if instance.pk is None or instance._state.adding:
        return None
    return f"{instance._meta.concrete_model._meta.label_lower}:{instance.pk}"


def parts_of(subject: str) -> tuple[str, str, str] | None:
    """Return app label, model name and primary key; None if a subject cannot be a model instance."""
    label, colon, key = subject.partition(":")
    app, dot, model = label.partition(".")
    if not (colon and dot and key and app.isidentifier() and model.isidentifier()):
        return None
    return app, model, key
