"""Whether a job's function takes the arguments that somebody typed."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from django.core.exceptions import ValidationError
from django.utils.translation import gettext as _

from djqueue.client import registry


def check_arguments(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise ValidationError if the function of a job that is registered here does not take them."""
    try:
        inspect.signature(registry.get(name).function).bind(*args, **kwargs)
    except TypeError as error:
        said = _("The job does not accept these arguments: %(error)s.")
        raise ValidationError(said, params={"error": error}) from None
