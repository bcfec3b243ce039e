"""What jobs are about: names of things outside the queues."""

from typing import Any


def name_of(instance: Any) -> str | None:
    """`app_label.model:pk` of a model's instance; None if it is not saved.

    A proxy names what its table's model names.
    """
    if instance.pk is None or instance._state.adding:
        return None
    return f"{instance._meta.concrete_model._meta.label_lower}:{instance.pk}"


def parts_of(subject: str) -> tuple[str, str, str] | None:
    """App label, model name and primary key, if a subject may be a model's instance."""
    label, colon, key = subject.partition(":")
    app, dot, model = label.partition(".")
    if not (colon and dot and key and app.isidentifier() and model.isidentifier()):
        return None
    return app, model, key
