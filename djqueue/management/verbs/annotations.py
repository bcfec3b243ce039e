"""`manage.py djqueue mark`."""

from djqueue.client import get_storage
from djqueue.operations.annotations import annotate
from djqueue.operations.scheduling import alias_of

from .base import Options, Output, Verbs

MARK = """Add an annotation to the charts of the dashboard, such as a deploy, a change or an incident.

Workers add one automatically when they start with another VERSION (in the settings) than the last worker.
"""


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    parser = verbs.add("mark", mark, MARK)
    parser.add_argument("label", metavar="LABEL", help="Text of the annotation, such as v1.2.")


def mark(options: Options, output: Output) -> None:
    """Add an annotation to the charts."""
    row = annotate(alias_of(get_storage()), options["label"])
    output.document({"label": row.label, "at": row.at})
    output.line(f"Added annotation: {row.label}")
