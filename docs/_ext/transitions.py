"""The directives of states.md: the diagram and the table of `djqueue.core.states.TRANSITIONS`.

`{state-diagram}` draws every transition. `{state-table}` lists them; its lines, `name: words`, say what
each one means. A transition without words, or words without a transition, is a warning, and the build
has none.
"""

from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from drawing import diagram, read_words, table_rows

from djqueue.core.states import TRANSITIONS


class StateTable(Directive):
    """See the module."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        words = read_words(list(self.content))
        names = {transition.name for transition in TRANSITIONS}
        wrong = sorted(names ^ words.keys())
        if wrong:
            return [
                self.state_machine.reporter.warning(
                    f"state-table: words and transitions do not match: {', '.join(wrong)}",
                    line=self.lineno,
                )
            ]
        lines = ["| transition | from | to | event | when |", "|---|---|---|---|---|"]
        lines += [
            f"| `{row.name}` | {row.sources} | {row.targets} | `{row.event}` | {row.words} |"
            for row in table_rows(words)
        ]
        holder = nodes.container()
        self.state.nested_parse(StringList(lines, source="states.md"), 0, holder)
        return list(holder.children)


class StateDiagram(Directive):
    """See the module."""

    def run(self) -> list[nodes.Node]:
        return [nodes.raw("", diagram(), format="html")]


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("state-diagram", StateDiagram)
    app.add_directive("state-table", StateTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
